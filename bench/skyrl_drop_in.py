"""SkyRL stock against SkyRL with skyrl_fast installed: `make bench-peers`.

Op by op and end to end (a step-wise generator output to scaled advantages, by SkyRL's own trainer
methods), in one process, contenders in turn. Results are compared before anything is timed.
`--write` saves the table under bench/results/.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench import _data
from bench.baselines.pipeline import SkyRL

RESULT = Path(__file__).resolve().parent / "results" / "skyrl_drop_in.md"
REPEATS = {"small": 15, "medium": 7, "large": 3}
DP_SIZE = 8
LOSS_CELLS = 4096 * 512  # of a mini-batch for the policy loss
LOGITS = (1, 256, 32000)


class Pipeline(SkyRL):
    """SkyRL's trainer methods, found anew at each call, so that installing takes effect."""

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
    """Yield each work by name: a call that looks SkyRL's functions up."""
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


def measure(size: str) -> Iterator[tuple[str, float, float]]:
    """Yield work, stock milliseconds, installed milliseconds: medians."""
    from skyrl_fast.integrations import skyrl as drop_in

    drop_in.uninstall()
    for name, work in works(size):
        times: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(REPEATS[size] + 1):
            results = []
            for installed in (False, True):
                if installed:
                    drop_in.install(ray_workers=False)
                start = time.perf_counter()
                result = work()
                times[installed].append(time.perf_counter() - start)
                if repeat == 0:
                    results.append(result)
                del result
                drop_in.uninstall()
            if repeat == 0:
                check(name, *results)
                times = {False: [], True: []}  # the first round is for comparing and warming up
        stock, installed_ms = (statistics.median(times[k]) * 1e3 for k in (False, True))
        yield name, stock, installed_ms


def check(name: str, want: Any, got: Any) -> None:
    """Raise where the two results differ by more than rounding."""
    if isinstance(want, dict):
        assert want.keys() == got.keys(), name
        for key in want:
            check(f"{name}: {key}", want[key], got[key])
    elif isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=name)
    elif isinstance(want, (list, tuple)) and len(want) and isinstance(want[0], torch.Tensor):
        for a, b in zip(want, got, strict=True):
            check(name, a, b)
    else:
        assert want == got, name


def main() -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", default=list(REPEATS), choices=list(REPEATS))
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    import skyrl
    from loguru import logger

    logger.disable("skyrl")
    logger.disable("skyrl_fast")
    version = getattr(skyrl, "__version__", "?")
    lines = [
        "| trajectories | work | SkyRL, median ms | installed, median ms | times faster |",
        "|---:|---|---:|---:|---:|",
    ]
    for size in args.sizes:
        facts = _data.describe(size)
        for name, stock, ours in measure(size):
            lines.append(
                f"| {facts['trajectories']:,} | {name} | {stock:.2f} | {ours:.2f} "
                f"| {stock / ours:.1f} |"
            )
            print(lines[-1], flush=True)
    where = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    lines += [
        "",
        f"SkyRL {version} ({Path(skyrl.__file__).parent.parent.name}), torch {torch.__version__}, "
        f"Python {platform.python_version()}, {where}; {datetime.date.today()}. "
        "Contenders in turn within one process; `make bench-peers`.",
    ]
    print("\n" + "\n".join(lines))
    if args.write:
        RESULT.write_text("# SkyRL stock and installed\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
