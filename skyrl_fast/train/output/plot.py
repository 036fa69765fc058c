"""Plot of the learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot_learning_curve(rows: Sequence[dict[str, Any]], path: Path, *, title: str = "") -> Path:
    """Plot evaluation and training reward (left) and time per phase (right) over the steps.

    Args:
        rows: lines of metrics.jsonl: dicts with "step" and metric names.

    Returns:
        path.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("the learning curve needs matplotlib: pip install matplotlib") from error

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rewards, times = figure.subplots(1, 2)
    for name, label, style in (
        ("reward/avg_raw_reward", "training (sampled)", {"color": "#9ab", "linewidth": 1}),
        (
            "eval/all/avg_score",
            "evaluation (held out)",
            {"color": "#c33", "linewidth": 2, "marker": "o"},
        ),
    ):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            rewards.plot(*zip(*points, strict=True), label=label, **style)
    rewards.set(xlabel="step", ylabel="mean reward per trajectory", title=title or "learning curve")
    rewards.grid(alpha=0.3)
    if rewards.has_data():
        rewards.legend()
    _stack_times(times, rows)
    figure.savefig(path, dpi=120)
    return path


def _stack_times(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    steps = [row for row in rows if "timing/step" in row]
    names = ("generate", "environment", "batch", "forward_backward", "sync")
    if steps:
        series = [[row.get(f"timing/{name}", 0.0) for row in steps] for name in names]
        axes.stackplot([row["step"] for row in steps], series, labels=names, alpha=0.8)
        axes.legend(fontsize="small")
    axes.set(xlabel="step", ylabel="seconds per step", title="time per phase")
