"""Real training runs of SkyRL and TRL with this package: calls, share taken, speed, results.

    python -m bench.hosts skyrl [--label main]   # of the SkyRL that is importable
    python -m bench.hosts trl [--trainers grpo,rloo,dpo,kto,sft]   # default: those without a row

A row is written only for a function that was called in the run. SkyRL: two steps of
`RayPPOTrainer.train` without and two with merged steps, on Ray, for calls and results; times are
those of bench/skyrl_drop_in.py, contenders in turn in one process. TRL: bench/trl_trainers.py,
stock and installed by turns. Writes bench/results/hosts.json and docs/integrations/hosts.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import skyrl_drop_in, trl_trainers

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "bench" / "results" / "hosts.json"
PAGE = ROOT / "docs" / "integrations" / "hosts.md"
RUN = ROOT / "python_tests" / "helpers" / "_skyrl_ray_run.py"
SIZE = "medium"
TRL_ROUNDS = 3
WORKS = {  # functions that bench/skyrl_drop_in.py times under another name
    "RayPPOTrainer.compute_advantages_and_returns": "compute_advantages_and_returns",
    "ppo_policy_loss": "ppo_policy_loss, forward + backward",
    "logprobs_from_logits": "logprobs_from_logits, 256 x 32,000",
}
INTRODUCTION = """\
# Calls and speed in SkyRL, TRL and verl

Counted in real runs of each host with this package installed, by `python -m bench.hosts` (`make peers` installs the
hosts): a function that a run did not call has no row. *Taken* is the share of its calls that this package answered; the
others went to the host's own function. *Results* are compared with the same run of the host alone.

The machine, two cores of a Xeon, was shared with other work while these were taken: ratios of single functions vary by a
factor of two or more between runs, those of torch with several threads most. End to end, SkyRL 0.3.0 gains more than
later versions: it spends most of its time filling batches from Python lists; later versions use NumPy.
"""  # noqa: E501
SKYRL = """\
For each version calls, the share taken, and times faster ("-": not timed separately). Calls: two steps of
`RayPPOTrainer.train` without and two with merged steps, on a local Ray with two workers, rollouts and the model's matrix
synthetic. Times: the same functions on 512 trajectories of up to 3,348 tokens, the host's and ours in turn in one
process, as medians."""  # noqa: E501
TRL = """\
The trainer's own `train()` on a CPU, {steps} steps, without and with `install()`, {rounds} pairs in one process by turns: a
Qwen2 of 2 layers, hidden 256, {vocab:,} words, random weights, float32, batches of 8 rows with answers of 32 tokens, one
thread (`OMP_NUM_THREADS=1`), which other work disturbs least. Calls: of one run. Seconds: the median of the runs; times
faster: the median of the pairs, then the pairs' least and most. The last column is the largest absolute difference in
any step. Steps of GRPO and RLOO include their generation, which stays TRL's. A larger model with two threads, and peak
memory: [TRL](trl.md#measured).

Asynchronous GRPO does not run on a CPU unchanged: it asks CUDA for the GPU's name, its attention is a FlashAttention 3
kernel, and its rollouts and weights need a vLLM server with NCCL. Its row is `AsyncGRPOTrainer.train()` with that
attention computed by torch, synthetic rollouts and no weight transfer (`bench/_async_grpo.py`), so it shows the head
and the loss only."""  # noqa: E501
VERL = """\
## verl 0.9.1

Calls: verl's `TrainingWorker` with its FSDP2 engine and PPO loss in a Ray actor with gloo, for a batch of 8 rows,
log-probabilities and two updates, counted by a test (`python_tests/integrations/test_verl.py`); not timed.

| function | calls | taken | times faster |
|---|---:|---:|---:|
| `logprobs_from_logits` | 6 | 100% | not timed |
| `unpad_input` | 1 | 100% | not timed |

Results: losses and gradient norms are the stock run's within 1e-5, log-probabilities within 4e-6. `pad_input` is not
called by this engine; a step of `main_ppo` [has not been shown](skyrl.md#verl).
"""  # noqa: E501


def main() -> None:
    """Run one host, save its results, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host", choices=("skyrl", "trl", "page"))
    parser.add_argument("--label", help="version of this SkyRL in the table, such as main")
    parser.add_argument("--trainers", help="default: those without a row")
    args = parser.parse_args()
    entries = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if args.host == "skyrl":
        version = args.label or metadata.version("skyrl")
        entries[f"SkyRL {version}"] = skyrl()
    elif args.host == "trl":
        key = f"TRL {metadata.version('trl')}"
        saved = entries.get(key, {}).get("rows", [])
        measured = {row["trainer"] for row in saved}
        left = [name for name in trl_trainers.TRAINERS if name not in measured]
        for entries[key] in trl(args.trainers.split(",") if args.trainers else left, saved):
            save(entries)
    save(entries)


def save(entries: dict[str, Any]) -> None:
    """Write the results and the page."""
    RESULT.write_text(json.dumps(entries, indent=1) + "\n")
    PAGE.write_text(page(entries))


def skyrl() -> dict[str, Any]:
    """Return the counted run of SkyRL's trainer, and the times of its functions."""
    runs = {how: skyrl_run(how) for how in ("stock", "installed")}
    counts = {
        name: calls for name, (_, *calls) in runs["installed"]["driver"].items() if calls[0] > 0
    } | runs["installed"]["workers"]["calls"]
    times = {row["work"]: row for row in skyrl_drop_in.measure(SIZE, [])}
    rows = []
    for name, (calls, handed_back) in sorted(counts.items()):
        row = times.get(WORKS.get(name, name))
        rows.append({"function": name, "calls": calls, "handed_back": handed_back,
                     "times": row and row["stock"] / row["installed"]})  # fmt: skip
    end_to_end = {name: times[name]["stock"] / times[name]["installed"]
             for name in ("end to end", "end to end, merged")}  # fmt: skip
    return {"rows": rows, "end_to_end": end_to_end, "results": skyrl_results(runs),
            "where": skyrl_drop_in.where()}  # fmt: skip


def skyrl_run(how: str) -> dict[str, Any]:
    """Return what SkyRL's trainer gave in a process of its own, stock or installed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        subprocess.run([sys.executable, str(RUN), how, str(out)], env=env, check=True)
        return json.loads(out.read_text())


def skyrl_results(runs: dict[str, Any]) -> str:
    """Return how the installed run's batches, losses and metrics differ from the stock run's."""
    unequal: set[str] = set()
    worst = 0.0
    for want, got in zip(runs["stock"]["runs"], runs["installed"]["runs"], strict=True):
        for a, b in zip(want["batches"], got["batches"], strict=True):
            unequal |= {name for name in a["tensors"] if a["tensors"][name] != b["tensors"][name]}
        for kind in ("logs", "statuses"):
            worst = max(
                [worst, *(relative(a, b) for a, b in zip(want[kind], got[kind], strict=True))]
            )
    batches = "batches identical" if unequal <= {"action_log_probs"} else f"differ: {unequal}"
    return f"{batches}; losses, gradient norms and metrics within {worst:.0e} relative"


def relative(want: dict[str, float], got: dict[str, float]) -> float:
    """Return the largest relative difference of two sets of metrics."""
    assert want.keys() == got.keys()
    return max(abs(want[k] - got[k]) / max(abs(want[k]), 1e-3) for k in want)


def trl(trainers: list[str], saved: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield runs of TRL's trainers, with those saved before: an entry after each trainer."""
    options = argparse.Namespace(
        vocab=32_000, hidden=256, layers=2, steps=4, response=32, bf16=False
    )
    rows = [row for row in saved if row["trainer"] not in trainers]
    for name in trainers:
        rows.append(trl_row(name, [trl_pair(options, name, i) for i in range(TRL_ROUNDS)]))
        yield {"rows": rows, "where": skyrl_drop_in.where(), "vocab": options.vocab,
               "steps": options.steps}  # fmt: skip


def trl_pair(options: argparse.Namespace, name: str, turn: int) -> dict[str, Any]:
    """Return a stock and an installed run of a trainer; the second first in every other turn."""
    from skyrl_fast.integrations import trl as fast

    pair: dict[str, Any] = {}
    for kind in ("stock", "installed") if turn % 2 == 0 else ("installed", "stock"):
        try:
            pair[kind] = trl_trainers.run(options, name, kind == "installed")
        finally:
            fast.uninstall()
    return pair


def trl_row(name: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return calls, medians of the seconds of a step and of the ratio, and differences."""
    steps = [
        (a, b)
        for turn in turns
        for a, b in zip(turn["stock"]["log"], turn["installed"]["log"], strict=True)
    ]
    seconds = {kind: [turn[kind]["seconds"] for turn in turns] for kind in ("stock", "installed")}
    ratios = [a / b for a, b in zip(seconds["stock"], seconds["installed"], strict=True)]
    return {
        "trainer": name,
        "counts": turns[0]["installed"]["counts"],
        "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
        "ratios": ratios,
        "worst": {
            metric: max(abs(a[metric] - b[metric]) for a, b in steps)
            for metric in trl_trainers.METRICS
            if all(metric in a for a, _ in steps)
        },
    }


def page(entries: dict[str, Any]) -> str:
    """Return the page of all saved results."""
    versions = {host: entry for host, entry in sorted(entries.items()) if "end_to_end" in entry}
    lines = [INTRODUCTION, "## SkyRL", "", *skyrl_table(versions), ""]
    for host, entry in sorted(entries.items()):
        if host not in versions:
            lines += [f"## {host}", "", *trl_table(entry), "", entry["where"], ""]
    return "\n".join([*lines, VERL])


def skyrl_table(versions: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of all versions of SkyRL, one column for each."""
    cells: dict[str, dict[str, str]] = {}
    for version, entry in versions.items():
        for row in entry["rows"]:
            taken = 1 - row["handed_back"] / row["calls"]
            times = "-" if row["times"] is None else f"{row['times']:.1f}"
            cell = f"{row['calls']}, {taken:.0%}, {times}"
            cells.setdefault(f"`{row['function']}`", {})[version] = cell
        for name, times in entry["end_to_end"].items():
            work = f"{name}: generator output to scaled advantages"
            cells.setdefault(work, {})[version] = f"{times:.1f}"
    yield from (
        SKYRL,
        "",
        f"| function | {' | '.join(versions)} |",
        "|---|" + "---|" * len(versions),
    )
    for work, row in cells.items():
        yield f"| {work} | {' | '.join(row.get(version, '') for version in versions)} |"
    yield ""
    for version, entry in versions.items():
        yield f"- {version}: {entry['results']}. {entry['where']}"


def trl_table(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a version of TRL."""
    yield from (TRL.format(**entry, rounds=TRL_ROUNDS), "")
    yield (
        "| trainer | function | calls | taken | s a step, TRL | installed | times faster "
        "| least, most | largest differences |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---|---|"
    for row in entry["rows"]:
        seconds = " | ".join(f"{row['seconds'][kind]:.2f}" for kind in ("stock", "installed"))
        worst = ", ".join(f"{metric} {value:.0e}" for metric, value in row["worst"].items())
        trainer = row["trainer"].upper().replace("_", " ")
        ratios = row["ratios"]
        spread = f"{min(ratios):.1f}, {max(ratios):.1f}"
        times = f"{seconds} | {statistics.median(ratios):.1f} | {spread} | {worst}"
        for name, (calls, handed_back) in row["counts"].items():
            taken = 1 - handed_back / calls
            yield f"| {trainer} | `{name}` | {calls} | {taken:.0%} | {times} |"


if __name__ == "__main__":
    main()
