"""SkyRL stock against SkyRL with skyrl_fast installed: `make bench-peers`.

Op by op and end to end (a step-wise generator output to scaled advantages, by SkyRL's own trainer
methods), in one process, contenders in turn. Results are compared before anything is timed.
A second baseline is SkyRL with freed memory kept mapped and the garbage collector off. `--write`
saves the results to bench/results/peers.json, by version and size, and generates peers.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import inspect
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench import _data
from bench.baselines.pipeline import SkyRL, warm_pages

RESULT = Path(__file__).resolve().parent / "results" / "peers.json"
SIZES = ("small", "medium", "large")
BLOCKS = 5  # of each contender, in turn
REPEATS, MIN_REPEATS = 15, 1  # of a block
BLOCK_SECONDS = 0.7  # then a block ends
END_TO_END = "end to end"
INTRODUCTION = """\
`make bench-peers ARGS=--write`. Medians in milliseconds, contenders in turn within one process, after a
comparison of their results. SkyRL: as it comes; warm: with freed memory kept mapped and the garbage collector
off, its best case. Installed: SkyRL with `install()`, nothing else changed. End to end: generator output -> checks
-> reward metrics (-> merged steps) -> padded batch -> advantages -> advantages scaled for the loss, by SkyRL's own
trainer methods. Floor: the batch's bytes written once to mapped memory, and the pointers of its lists read once,
by torch on all threads."""  # noqa: E501
DP_SIZE = 8
LOSS_CELLS = 4096 * 512  # of a mini-batch for the policy loss
LOGITS = (1, 256, 32000)


class Pipeline(SkyRL):
    """SkyRL's trainer methods, looked up at each call, so that installing takes effect."""

    def run_to_loss(self, output: dict[str, Any], uids: list[str], *, merge: bool) -> Any:
        """Return the batch whose advantages are scaled for the loss."""
        from skyrl.train import trainer as module

        methods = module.RayPPOTrainer
        stand_in = self._stand_in(len(set(uids)))
        stand_in.cfg.generator.merge_stepwise_output = merge
        stand_in.cfg.trainer.algorithm.advantage_batch_normalize = False
        stand_in.cfg.trainer.algorithm.loss_reduction = "token_mean"
        stand_in.cfg.trainer.micro_train_batch_size_per_gpu = 8
        output = dict(output)
        module.validate_generator_output(len(uids), output, step_wise=True)
        output, uids = methods.postprocess_generator_output(stand_in, output, uids)
        batch = methods.convert_to_training_input(stand_in, output, uids)
        batch["values"] = None
        batch = methods.compute_advantages_and_returns(stand_in, batch)
        boundaries = batch.metadata["policy_mini_batch_boundaries"]
        return methods._normalize_advantages(stand_in, batch, boundaries)


def works(size: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each workload by name: a call that looks up SkyRL's functions."""
    from skyrl.backends.skyrl_train import training_batch
    from skyrl.backends.skyrl_train.utils import ppo_utils, torch_utils
    from skyrl.train import trainer
    from skyrl.train.config import AlgorithmConfig
    from skyrl.train.dataset import preprocess
    from skyrl.train.generators import utils

    raw = _data.generator_output(size)
    pipeline = Pipeline(_data.SHAPES[size].samples_per_prompt, _data.PAD_TOKEN_ID, DP_SIZE)
    output, uids = pipeline.prepare(raw), raw["uids"]
    signature = inspect.signature(preprocess.convert_prompts_responses_to_batch_tensors)
    first = next(iter(signature.parameters))
    pad = pipeline.pad_token_id
    pad = pad if first == "pad_token_id" else SimpleNamespace(pad_token_id=pad)
    lists = [output[f] for f in ("prompt_token_ids", "response_ids", "rewards", "loss_masks")]

    def convert() -> Any:
        return preprocess.convert_prompts_responses_to_batch_tensors(
            pad, *lists, output["rollout_logprobs"]
        )

    names = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask", "logprobs")
    batch = training_batch.TrainingInputBatch(dict(zip(names, convert()[:6], strict=True)))
    batch.metadata = {
        "uids": uids, "is_last_step": output["is_last_step"], "avg_response_length": 1.0,
    }  # fmt: skip
    batch["values"] = None
    stand_in = pipeline._stand_in(len(set(uids)))
    yield (
        "validate_generator_output",
        lambda: trainer.validate_generator_output(len(uids), output, step_wise=True),
    )
    yield (
        "get_rollout_metrics",
        lambda: utils.get_rollout_metrics(
            output["response_ids"], output["rewards"], loss_masks=output["loss_masks"]
        ),
    )
    yield "merge_stepwise_output", lambda: utils.merge_stepwise_output(output)
    yield "convert_prompts_responses_to_batch_tensors", convert
    yield "pad_training_input_batch", lambda: training_batch.pad_training_input_batch(batch, 7)
    yield (
        "compute_advantages_and_returns",
        lambda: trainer.RayPPOTrainer.compute_advantages_and_returns(stand_in, batch)["advantages"],
    )
    yield "end to end", lambda: pipeline.run_to_loss(output, uids, merge=False)
    yield "end to end, merged", lambda: pipeline.run_to_loss(output, uids, merge=True)
    config = AlgorithmConfig(policy_loss_type="regular")
    rows = min(len(uids), LOSS_CELLS // batch["rewards"].shape[1])
    torch.manual_seed(0)
    old, mask = batch["logprobs"][:rows], batch["loss_mask"][:rows]
    advantages = torch.randn(rows, old.shape[1])
    current = (old + 0.1 * torch.randn_like(old)).requires_grad_()

    def loss() -> Any:
        current.grad = None
        value, _ = ppo_utils.PolicyLossRegistry.get("regular")(
            current, old, advantages, config, mask, None
        )
        value.backward()
        return value.detach()

    yield "ppo_policy_loss, forward + backward", loss
    logits, labels = torch.randn(*LOGITS), torch.randint(0, LOGITS[-1], LOGITS[:2])
    yield (
        "logprobs_from_logits, 256 x 32,000",
        lambda: torch_utils.logprobs_from_logits(logits, labels),
    )


def measure(size: str, only: list[str]) -> Iterator[dict[str, Any]]:
    """Yield workload, rows and medians in milliseconds: stock, stock on warm pages, installed."""
    from skyrl_fast.integrations import skyrl as drop_in

    drop_in.uninstall()
    chosen = [(name, work) for name, work in works(size) if not only or name in only]
    by_name: dict[str, dict[str, Any]] = {}
    for name, work in chosen:
        want = work()  # warms up too
        drop_in.install(ray_workers=False)
        got = work()
        drop_in.uninstall()
        check(name, want, got)
        bytes_out = sum(t.nbytes for t in tensors_of(got))
        del want, got
        stock, installed = [], []
        for _ in range(BLOCKS):
            stock += block(work)
            drop_in.install(ray_workers=False)
            installed += block(work)
            drop_in.uninstall()
        by_name[name] = {"work": name, "bytes": bytes_out, "stock": median_ms(stock),
                         "installed": median_ms(installed)}  # fmt: skip
    # At the end: glibc's setting cannot be fully reverted.
    with warm_pages():
        for name, work in chosen:
            by_name[name]["stock_warm"] = median_ms([t for _ in range(2) for t in block(work)])
            yield by_name[name]


def block(work: Callable[[], Any]) -> list[float]:
    """Return the seconds of some runs; a short first run is not counted."""
    seconds = [timed(work)]
    if seconds[0] < BLOCK_SECONDS:
        seconds.clear()
    while len(seconds) < MIN_REPEATS or (len(seconds) < REPEATS and sum(seconds) < BLOCK_SECONDS):
        seconds.append(timed(work))
    return seconds


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    del result
    return seconds


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def tensors_of(result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a result, each storage once."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (dict, list, tuple)):
        values = list(result.values() if isinstance(result, dict) else result)
        tensors = {id(v): v for v in values if isinstance(v, torch.Tensor)}
        yield from {t.data_ptr(): t for t in tensors.values()}.values()


def floor_ms(size: str, num_bytes: int) -> float:
    """Return the time to write a batch's bytes to mapped memory and read its lists' pointers.

    By torch on all threads: a lower bound for any code that builds this batch from these lists.
    """
    counts = _data.describe(size)
    pointers = counts["tokens"] + 3 * counts["response_tokens"]
    out = torch.zeros(num_bytes // 8, dtype=torch.int64)
    items = torch.zeros(pointers, dtype=torch.int64)
    return median_ms([timed(lambda: (out.fill_(1), items.max())) for _ in range(9)])


def check(name: str, want: Any, got: Any) -> None:
    """Raise where the two results differ by more than rounding."""
    if isinstance(want, dict):
        assert want.keys() == got.keys(), name
        for key in want:
            check(f"{name}: {key}", want[key], got[key])
    elif isinstance(want, torch.Tensor):
        if want.dtype == got.dtype and torch.equal(want, got):
            return
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=name)
    elif isinstance(want, (list, tuple)) and len(want) and isinstance(want[0], torch.Tensor):
        for a, b in zip(want, got, strict=True):
            check(name, a, b)
    else:
        assert want == got, name


def table(entries: dict[str, Any]) -> str:
    """Return the page of all saved results."""
    lines = [
        "# SkyRL stock and installed",
        "",
        *INTRODUCTION.splitlines(),
    ]
    for version in sorted({key.split("/")[0] for key in entries}):
        lines += ["", f"## SkyRL {version}"]
        for size in SIZES:
            entry = entries.get(f"{version}/{size}")
            if entry is None:
                continue
            counts = entry["facts"]
            lines += [
                "",
                f"{counts['trajectories']:,} trajectories, {counts['rows']:,} rows, "
                f"{counts['tokens']:,} tokens; batch {entry['bytes'] / 2**20:,.0f} MiB, floor "
                f"{entry['floor']:.1f} ms. {entry['where']}",
                "",
                "| work | SkyRL | warm | installed | times faster | than warm |",
                "|---|---:|---:|---:|---:|---:|",
            ]
            for row in entry["rows"]:
                stock, warm, ours = row["stock"], row["stock_warm"], row["installed"]
                lines.append(
                    f"| {row['work']} | {stock:.2f} | {warm:.2f} | {ours:.2f} "
                    f"| {stock / ours:.1f} | {warm / ours:.1f} |"
                )
    return "\n".join(lines) + "\n"


def where() -> str:
    """Return machine, versions and date in one line."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        text = Path("/proc/cpuinfo").read_text()
        name = next(x for x in text.splitlines() if x.startswith("model name")).split(": ", 1)[1]
    threads = torch.get_num_threads()
    return (
        f"{name}, {threads} thread{'s'[: threads > 1]}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {datetime.date.today()}."
    )


def main() -> None:
    """Measure, print, and write if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--works", nargs="*", default=[], help="workloads; default: all")
    parser.add_argument("--label", help="label of this SkyRL in the table, such as main")
    parser.add_argument("--write", action="store_true", help="save the results and write the page")
    args = parser.parse_args()
    import skyrl
    from loguru import logger

    logger.disable("skyrl")
    logger.disable("skyrl_fast")
    version = args.label or getattr(skyrl, "__version__", "of a source tree")
    entries = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for size in args.sizes:
        found = []
        for row in measure(size, args.works):
            found.append(row)
            ratio = row["stock"] / row["installed"]
            print(f"{size:7} {row['work']:45} {row['stock']:9.2f} {row['stock_warm']:9.2f} "
                  f"{row['installed']:9.2f} {ratio:5.1f}", flush=True)  # fmt: skip
        batch_bytes = next((row["bytes"] for row in found if row["work"] == END_TO_END), 0)
        key = f"{version}/{size}"
        kept = entries.get(key, {}).get("rows", [])
        names = [row["work"] for row in found]
        entries[key] = {
            "facts": _data.describe(size),
            "bytes": batch_bytes or entries.get(key, {}).get("bytes", 0),
            "floor": (
                floor_ms(size, batch_bytes)
                if batch_bytes
                else entries.get(key, {}).get("floor", 0.0)
            ),
            "where": where(),
            "rows": [row for row in kept if row["work"] not in names] + found,
        }
        _data.generator_output.cache_clear()
    print(table(entries))
    if args.write:
        RESULT.write_text(json.dumps(entries, indent=1) + "\n")
        RESULT.with_suffix(".md").write_text(table(entries))


if __name__ == "__main__":
    main()
