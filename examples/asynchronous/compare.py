"""Asynchronous compared with synchronous training on the quickstart, with slow environments.

    python examples/asynchronous/compare.py --base work --seeds 3 --steps 26

Runs both for each seed, one after the other, and writes `comparison.json` and `comparison.png`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.asynchronous.quickstart_run import prepare, settings, train
from skyrl_fast.train.output.loggers import read_metrics

EVAL = "eval/all/avg_score"
SKIPPED = 2  # first steps, in which the pipeline fills and caches warm up


def main() -> None:
    """Train, print a table, write the numbers and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("asynchronous"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--plot", type=Path, default=None, help="file of the plot")
    options = parser.parse_args()
    options.base.mkdir(parents=True, exist_ok=True)
    prepare(options.base.resolve())
    runs = []
    for seed in range(options.seeds):
        for name, staleness in (("synchronous", None), ("asynchronous", options.staleness)):
            runs.append(one_run(options, name, staleness, seed))
            print(json.dumps(runs[-1] | {"steps": "..."}), flush=True)
    (options.base / "comparison.json").write_text(json.dumps(runs, indent=1), encoding="utf-8")
    report(runs)
    plot(runs, options.plot or options.base / "comparison.png")


def one_run(
    options: argparse.Namespace, name: str, staleness: int | None, seed: int
) -> dict[str, Any]:
    """Return times and rewards of one run; a finished run is read, not repeated."""
    base: Path = options.base.resolve()
    folder = f"{name}_{seed}"
    if not (base / folder / "done").exists():
        overrides = settings(folder, staleness=staleness, seed=seed)
        overrides += [
            f"trainer.max_training_steps={options.steps}",
            "trainer.epochs=10",
            "trainer.ckpt_interval=-1",
            f"trainer.eval_interval={options.steps}",
        ]
        train(base, overrides, log=f"{folder}.log")
        (base / folder / "done").write_text("", encoding="utf-8")
    rows = read_metrics(base / folder / "metrics.jsonl")
    steps = [row for row in rows if "timing/step" in row]
    evals = [row[EVAL] for row in rows if EVAL in row]
    seconds = [row["timing/step"] for row in steps]
    ages: dict[str, float] = {}
    for row in steps:
        for key, value in row.items():
            if key.startswith("async/num_groups_of_staleness_"):
                age = key.rpartition("_")[2]
                ages[age] = ages.get(age, 0) + value
    return {
        "name": name,
        "seed": seed,
        "step_seconds": statistics.mean(seconds[SKIPPED:]),
        "eval_before": evals[0],
        "eval_after": evals[-1],
        "train_reward": [row["reward/avg_raw_reward"] for row in steps],
        "staleness": ages,
        "token_staleness_max": max(r.get("async/token_staleness_max", 0) for r in steps),
        "steps": seconds,
    }


def report(runs: list[dict[str, Any]]) -> None:
    """Print means over seeds."""
    means = {}
    for name in ("synchronous", "asynchronous"):
        of_name = [run for run in runs if run["name"] == name]
        means[name] = statistics.mean(run["step_seconds"] for run in of_name)
        rewards = [run["eval_after"] for run in of_name]
        print(
            f"{name:13} {means[name]:6.2f} s per step; evaluation reward at the end "
            f"{statistics.mean(rewards):.3f} ({', '.join(f'{r:.3f}' for r in rewards)})"
        )
    saved = 1 - means["asynchronous"] / means["synchronous"]
    print(f"wall time per step: {saved:.0%} less")


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Plot reward over wall time, seconds per step, and the staleness of groups."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (reward, time, age) = plt.subplots(1, 3, figsize=(12, 3.4))
    colours = {"synchronous": "tab:gray", "asynchronous": "tab:blue"}
    for run in runs:
        colour = colours[run["name"]]
        clock = [sum(run["steps"][: i + 1]) for i in range(len(run["steps"]))]
        label = run["name"] if run["seed"] == 0 else None
        reward.plot(clock, run["train_reward"], color=colour, alpha=0.7, label=label)
        time.plot(run["steps"], color=colour, alpha=0.7)
    reward.set(xlabel="seconds", ylabel="training reward")
    reward.legend()
    time.set(xlabel="step", ylabel="seconds per step", ylim=(0, None))
    ages = [run["staleness"] for run in runs if run["name"] == "asynchronous"]
    names = sorted({name for counts in ages for name in counts}, key=int)
    totals = [sum(counts.get(name, 0) for counts in ages) for name in names]
    age.bar(names, totals, color="tab:blue")
    age.set(xlabel="versions between start and training", ylabel="groups, all seeds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
