"""Plots of one run's learning curve and of a metric of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from skyrl_fast.train.output.metric_table import EVAL_REWARD, REWARD


def plot_learning_curve(rows: Sequence[dict[str, Any]], path: Path, *, title: str = "") -> Path:
    """Plot rewards (left) and time per phase (right) over the steps; return the path.

    Args:
        rows: lines of metrics.jsonl: dicts with "step" and metric names.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = _new_figure(11, 4)
    rewards, times = figure.subplots(1, 2)
    for name, label, style in (
        (REWARD, "training (sampled)", {"color": "#9ab", "linewidth": 1}),
        (
            EVAL_REWARD,
            "evaluation (held out)",
            {"color": "#c33", "linewidth": 2, "marker": "o"},
        ),
    ):
        points = []
        for row in rows:
            if name in row:
                points.append((row["step"], row[name]))
        if points:
            rewards.plot(*zip(*points, strict=True), label=label, **style)
    rewards.set(xlabel="step", ylabel="mean reward per trajectory")
    rewards.set_title(title or "learning curve", parse_math=False)  # a name with $ is no formula
    rewards.grid(alpha=0.3)
    if rewards.has_data():
        rewards.legend()
    stack_times(times, rows)
    figure.savefig(path, dpi=120)
    return path


def plot_runs(
    curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]], metric: str, path: Path
) -> Path:
    """Plot a metric of runs, those of one label as a line of means in a range; return the path.

    Args:
        curves: the (step, value) points of each run, by label.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = _new_figure(7, 4.5)
    axes = figure.subplots()
    for rank, (label, runs) in enumerate(curves.items()):
        by_step: dict[int, list[float]] = {}
        for step, value in chain.from_iterable(runs):
            by_step.setdefault(step, []).append(value)
        steps = sorted(by_step)
        means = [fmean(by_step[step]) for step in steps]
        width = 1 + 0.8 * (len(curves) - rank)  # equal curves are seen side by side
        (line,) = axes.plot(steps, means, label=label, linewidth=width)
        if len(runs) > 1:
            least, most = ([end(by_step[step]) for step in steps] for end in (min, max))
            axes.fill_between(steps, least, most, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="step", ylabel=metric)
    axes.grid(alpha=0.3)
    legend = figure.legend(loc="outside lower center", ncols=2)  # over the lines it hides some
    for label_text in legend.get_texts():
        label_text.set_parse_math(False)
    figure.savefig(path, dpi=120)
    return path


def _new_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("the learning curve needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def stack_times(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    steps = [row for row in rows if "timing/step" in row]
    phases = ("wait", "generate", "environment", "batch", "advantages", "forward_backward", "sync")
    names = [name for name in phases if any(row.get(f"timing/{name}") for row in steps)]
    if names:
        series = [[row.get(f"timing/{name}", 0.0) for row in steps] for name in names]
        axes.stackplot([row["step"] for row in steps], series, labels=names, alpha=0.8)
        axes.legend(fontsize="small")
    axes.set(xlabel="step", ylabel="seconds per step", title="time per phase")
