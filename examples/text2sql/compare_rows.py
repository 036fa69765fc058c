"""Three forms of training rows on the same recipe: does the form change the learning curve?

    python examples/text2sql/compare_rows.py                three forms, three seeds each
    python examples/text2sql/compare_rows.py --seeds 0      one seed

step: a row per turn. merged: turns whose context only grew are merged. trajectory: a row per
trajectory. All runs start from one warm-started model; the seed determines prompts and samples. The
context of this recipe only grows, so all three forms are defined, and should learn equally well.
Existing runs are not repeated. Prints a table and draws runs/text2sql_rows/curves.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.text2sql.run import prepare  # noqa: E402
from examples.tiny_model.jsonl import read_jsonl  # noqa: E402

FOLDER = Path("runs/text2sql_rows")
FORMS = ("step", "merged", "trajectory")
NUM_STEPS = 12
EVAL_INTERVAL = 3
EVAL_REWARD = "eval/all/avg_score"
COLOURS = {"step": "#c33", "merged": "#36c", "trajectory": "#393"}


def train(form: str, seed: int, num_steps: int) -> Path:
    """Train one run unless its results exist; return its metrics file."""
    run_path = FOLDER / f"{form}_{seed}"
    metrics = run_path / "metrics.jsonl"
    if metrics.exists() and read_jsonl(metrics)[-1]["step"] == num_steps:
        return metrics
    command = [
        *(sys.executable, str(HERE / "run.py"), "--resume"),
        f"trainer.rows={form}",
        f"trainer.run_path={run_path}",
        f"trainer.run_name={form}",
        f"trainer.seed={seed}",
        f"trainer.max_training_steps={num_steps}",
        f"trainer.eval_interval={EVAL_INTERVAL}",
        "trainer.dump_trajectories=false",
    ]
    print(f"{form}, seed {seed} ...", flush=True)
    log = FOLDER / f"{form}_{seed}.log"
    with log.open("wb") as file:
        result = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{log}: the run failed:\n{log.read_text(errors='replace')[-2000:]}")
    return metrics


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the rewards of one run at the start and the end, and its mean batch.

    Args:
        rows: lines of metrics.jsonl.
    """
    rewards = [row[EVAL_REWARD] for row in rows if EVAL_REWARD in row]
    steps = [row for row in rows if row["step"] > 0]

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in steps)

    return {
        "before": rewards[0],
        "after": rewards[-1],
        "area": statistics.fmean(rewards),
        "rows": mean("generate/batch_num_seq"),
        "tokens": mean("generate/batch_num_tokens"),
        "forward": mean("policy/forward_tokens"),
        "train seconds": mean("timing/forward_backward"),
        "step seconds": mean("timing/step"),
    }


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Return the forms as a Markdown table: means over seeds, rewards with their deviation."""
    lines = [
        "| rows | reward before | after | mean of the curve | rows a batch | tokens of the rows | "
        "tokens through the model | seconds to train a batch | seconds a step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for form, runs in results.items():

        def cell(name: str, pattern: str, runs: list[dict[str, float]] = runs) -> str:
            return format(statistics.fmean(run[name] for run in runs), pattern)

        def spread(name: str, runs: list[dict[str, float]] = runs) -> str:
            values = [run[name] for run in runs]
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            return f"{statistics.fmean(values):.3f} ± {deviation:.3f}"

        cells = [form, cell("before", ".3f"), spread("after"), spread("area")]
        cells += [cell(name, ",.0f") for name in ("rows", "tokens", "forward")]
        cells += [cell(name, ".2f") for name in ("train seconds", "step seconds")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(curves: dict[str, list[list[tuple[int, float]]]], path: Path) -> None:
    """Plot evaluation reward over steps: a thin line for each seed, a thick one for the mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for form, runs in curves.items():
        for run in runs:
            axes.plot(*zip(*run, strict=True), color=COLOURS[form], linewidth=0.7, alpha=0.5)
        mean = [
            (points[0][0], statistics.fmean(reward for _, reward in points))
            for points in zip(*runs, strict=True)
        ]
        axes.plot(*zip(*mean, strict=True), color=COLOURS[form], linewidth=2.5, label=form)
    axes.set(xlabel="step", ylabel="evaluation reward", title="rows of training, same recipe")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=Path("."), help="parent folder of runs/")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs of each form"
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="training steps of a run")
    parser.add_argument(
        "--forms", nargs="+", choices=list(FORMS), default=list(FORMS), help="forms to compare"
    )
    options = parser.parse_args()
    os.chdir(options.base)
    prepare(Path("runs/text2sql"), thinking=False)
    FOLDER.mkdir(parents=True, exist_ok=True)
    runs = {  # seeds in the outer loop, so that an early end leaves complete comparisons
        (form, seed): read_jsonl(train(form, seed, options.steps))
        for seed in options.seeds
        for form in options.forms
    }
    metrics = {form: [runs[form, seed] for seed in options.seeds] for form in options.forms}
    curves = {
        form: [[(r["step"], r[EVAL_REWARD]) for r in rows if EVAL_REWARD in r] for rows in seeds]
        for form, seeds in metrics.items()
    }
    draw(curves, FOLDER / "curves.png")
    text = table({form: [summary(rows) for rows in seeds] for form, seeds in metrics.items()})
    (FOLDER / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
