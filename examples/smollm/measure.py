"""The reward of SmolLM2 before and after training, over seeds, and with a learning rate of 0.

    python examples/smollm/measure.py --base work

Runs one after the other; a finished run is read, not repeated. Prints a table, and writes
`runs/smollm/rewards.png`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from skyrl_fast.train.output.loggers import read_metrics  # noqa: E402

EVAL, SAMPLED = "eval/all/avg_score", "reward/avg_raw_reward"
RUNS = [(seed, frozen) for seed in (42, 7) for frozen in (False, True)]


def one_run(base: Path, seed: int, *, frozen: bool) -> list[dict[str, Any]]:
    """Return the metrics of a run.

    Args:
        base: parent of the runs' folder.
        seed: of the run.
        frozen: whether the learning rate is 0.
    """
    folder = base / f"runs/smollm/seed_{seed}{'_lr_0' if frozen else ''}"
    if not (folder / "learning_curve.png").exists():  # written at the end
        settings = [f"trainer.seed={seed}", f"trainer.run_path={folder.resolve()}"]
        settings += ["trainer.policy.optimizer_config.lr=0"] * frozen
        command = [sys.executable, str(HERE / "run.py"), "--base", str(base), *settings]
        subprocess.run(command, check=True)
    return read_metrics(folder / "metrics.jsonl")


def report(found: list[list[dict[str, Any]]]) -> None:
    """Print a table."""
    print("| seed, learning rate | evaluation | sampled | seconds per step |\n|---|---|---|---|")
    for (seed, frozen), rows in zip(RUNS, found, strict=True):
        scores = [row[EVAL] for row in rows if EVAL in row]
        sampled = [row[SAMPLED] for row in rows if SAMPLED in row]
        times = sorted(row["timing/step"] for row in rows if "timing/step" in row)
        rate = "0" if frozen else "as set"
        print(
            f"| {seed}, {rate} | {scores[0]:.2f}, {scores[-1]:.2f} |"
            f" {sampled[0]:.2f}, {sampled[-1]:.2f} | {times[len(times) // 2]:.0f} |"
        )


def plot(found: list[list[dict[str, Any]]], path: Path) -> None:
    """Plot the evaluations of all runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for (seed, frozen), rows in zip(RUNS, found, strict=True):
        points = [(row["step"], row[EVAL]) for row in rows if EVAL in row]
        label = f"seed {seed}{', learning rate 0' if frozen else ''}"
        axes.plot(*zip(*points, strict=True), "--o" if frozen else "-o", label=label)
    axes.set(xlabel="step", ylabel="evaluation reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("."), help="parent of the runs' folder")
    base = parser.parse_args().base
    found = [one_run(base, seed, frozen=frozen) for seed, frozen in RUNS]
    report(found)
    plot(found, base / "runs/smollm/rewards.png")


if __name__ == "__main__":
    main()
