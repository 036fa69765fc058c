"""Real training runs of SkyRL and TRL with this package: calls, share taken, speed, results.

    python -m bench.hosts skyrl [--label main]   # of the SkyRL that is importable
    python -m bench.hosts trl [--trainers grpo,rloo,dpo,kto,sft]

A row is written only for a function that was called in the run. SkyRL: two steps of
`RayPPOTrainer.train` without and two with merged steps, on Ray, for calls and results; times are
those of bench/skyrl_drop_in.py, contenders in turn in one process. TRL: bench/trl_trainers.py,
stock and installed by turns. Writes bench/results/hosts.json and docs/hosts.md.
"""

from __future__ import annotations

import argparse
import json
import os
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
PAGE = ROOT / "docs" / "hosts.md"
RUN = ROOT / "python_tests" / "helpers" / "_skyrl_ray_run.py"
SIZE = "medium"
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

Other rows: [TRL 1.16's trainers](trl.md#measured), with calls, and [verl 0.9.1's worker](skyrl_drop_in.md#verl). The
machine was shared with other work while these were taken: ratios of single functions vary by a factor of two or more
between runs, those of torch with several threads most.
"""  # noqa: E501
SKYRL = """\
Calls: two steps of `RayPPOTrainer.train` without and two with merged steps, on a local Ray with two workers, rollouts and
the model's matrix synthetic. Times: the same functions on 512 trajectories of up to 3,348 tokens, the host's and ours in
turn in one process, as medians; "-": not timed separately."""  # noqa: E501
TRL = """\
Calls, times and results: the trainer's own `train()`, {steps} steps, stock and installed by turns in separate processes;
the ratio is that of median seconds of a step, and of the faster of the runs of each."""  # noqa: E501


def main() -> None:
    """Run one host, save its results, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host", choices=("skyrl", "trl", "page"))
    parser.add_argument("--label", help="version of this SkyRL in the table, such as main")
    parser.add_argument("--trainers", default=",".join(trl_trainers.TRAINERS))
    args = parser.parse_args()
    entries = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if args.host == "skyrl":
        version = args.label or metadata.version("skyrl")
        entries[f"SkyRL {version}"] = skyrl()
    elif args.host == "trl":
        entries[f"TRL {metadata.version('trl')}"] = trl(args.trainers.split(","))
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
    whole = {name: times[name]["stock"] / times[name]["installed"]
             for name in ("end to end", "end to end, merged")}  # fmt: skip
    return {"rows": rows, "end_to_end": whole, "results": skyrl_results(runs),
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


def trl(trainers: list[str]) -> dict[str, Any]:
    """Return runs of TRL's trainers."""
    options = argparse.Namespace(
        vocab=32_000, hidden=256, layers=2, steps=5, rounds=2, response=32, bf16=False
    )
    rows = []
    for name in trainers:
        found = trl_trainers.pairs(options, name)
        best = {kind: min(run["seconds"] for run in runs) for kind, runs in found.items()}
        a, b = (found[kind][0]["log"] for kind in ("stock", "installed"))
        worst = {
            metric: max(abs(x[metric] - y[metric]) for x, y in zip(a, b, strict=True))
            for metric in trl_trainers.METRICS
            if all(metric in x for x in (*a, *b))
        }
        rows.append({"trainer": name, "calls": found["installed"][0]["calls"], "worst": worst,
                     "seconds": best, "times": best["stock"] / best["installed"]})  # fmt: skip
    return {"rows": rows, "steps": options.steps, "where": skyrl_drop_in.where()}


def page(entries: dict[str, Any]) -> str:
    """Return the page of all saved results."""
    lines = [INTRODUCTION]
    for host, entry in sorted(entries.items()):
        lines += [f"## {host}", ""]
        lines += list(skyrl_table(entry) if "end_to_end" in entry else trl_table(entry))
        lines += ["", entry["where"], ""]
    return "\n".join(lines).rstrip() + "\n"


def skyrl_table(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a version of SkyRL."""
    yield from (SKYRL, "", "| function | calls | taken | times faster |", "|---|---:|---:|---:|")
    for row in entry["rows"]:
        taken = 1 - row["handed_back"] / row["calls"]
        times = "-" if row["times"] is None else f"{row['times']:.1f}"
        yield f"| `{row['function']}` | {row['calls']} | {taken:.0%} | {times} |"
    for name, times in entry["end_to_end"].items():
        yield f"| {name}: generator output to scaled advantages | | | {times:.1f} |"
    yield from ("", f"Results: {entry['results']}.")


def trl_table(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a version of TRL."""
    yield from (TRL.format(steps=entry["steps"]), "")
    yield "| trainer | calls | s a step, TRL | installed | times faster | largest difference |"
    yield "|---|---|---:|---:|---:|---|"
    for row in entry["rows"]:
        seconds = " | ".join(f"{row['seconds'][kind]:.2f}" for kind in ("stock", "installed"))
        worst = ", ".join(f"{metric} {value:.0e}" for metric, value in row["worst"].items())
        name = row["trainer"].upper()
        yield f"| {name} | {row['calls']} | {seconds} | {row['times']:.1f} | {worst} |"


if __name__ == "__main__":
    main()
