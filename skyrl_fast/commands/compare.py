"""The command `skyrl-fast compare RUN [RUN ...] [--out FILE.png]`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from skyrl_fast.commands.command import UsageError, as_usage_error, log_to_stderr, needs_extra
from skyrl_fast.train.output.metric_table import EVAL_REWARD

HELP = "draw a metric of several runs"
DESCRIPTION = (
    "Print the first, last and largest value of a metric for each run, and draw them in one plot. "
    "Runs of one label, such as seeds, are a line of means in a band of their range."
)

_NUM_SUGGESTED = 3

Curves: TypeAlias = dict[str, list[list[tuple[int, float]]]]  # (step, value) of each run of a label


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="run folders")
    parser.add_argument(
        "--metric", default=EVAL_REWARD, help=f"of metrics.jsonl; default: {EVAL_REWARD}"
    )
    parser.add_argument("--out", type=Path, help="PNG to write; default: only print")


def run(options: argparse.Namespace) -> int:
    with needs_extra("train"):
        from skyrl_fast.train.output.plot import plot_runs

    log_to_stderr()
    metric = options.metric
    table, curves = read_curves(options.runs, metric)
    sys.stdout.write(table)
    if options.out is not None:
        with as_usage_error(ValueError, OSError):
            sys.stdout.write(f"{plot_runs(curves, metric, options.out)}\n")
    return 0


def read_curves(runs: Sequence[str], metric: str) -> tuple[str, Curves]:
    """Return a table of the metric with a line for each run, and the curves of each label.

    Args:
        runs: folders, with `LABEL=` in front or not.
        metric: a name in metrics.jsonl.

    Raises:
        UsageError: a folder is no run, or has no value of the metric.
    """
    from skyrl_fast.train.output.loggers import read_metrics

    curves: Curves = {}
    lines = [metric, f"{'first':>10}{'last':>10}{'largest':>10}{'at step':>9}  run"]
    for text in runs:
        label, folder = _label_and_folder(text)
        file = Path(folder) / "metrics.jsonl"
        if not file.is_file():
            raise UsageError(
                f"compare: {folder}: expected a run folder, got one without {file.name}"
            )
        with as_usage_error(OSError):
            rows = read_metrics(file)
        points = []
        for row in rows:
            if row.get(metric) is not None:
                points.append((row["step"], row[metric]))
        if not points:
            raise UsageError(
                f"compare: {file}: expected values of {metric}, got none{_suggestion(metric, rows)}"
            )
        step, most = max(points, key=lambda point: (not math.isnan(point[1]), point[1]))
        first = points[0][1]
        last = points[-1][1]
        lines.append(f"{first:10.4g}{last:10.4g}{most:10.4g}{step:9}  {text}")
        curves.setdefault(label, []).append(points)
    return "\n".join(lines) + "\n", curves


def _suggestion(metric: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a question after the metrics of a run whose names are like this one, or ""."""
    names: set[str] = set()
    for row in rows:
        names.update(row)
    names -= {"step", metric}
    part = metric.lower()
    near = []
    for name in sorted(names):
        if part in name.lower():
            near.append(name)
    if not near:
        near = get_close_matches(metric, names)
    if not near:
        return "; --metric chooses another one" + _examples(names)
    suggested = " or ".join(near[:_NUM_SUGGESTED])
    return f" (did you mean {suggested}?)"


def _examples(names: Iterable[str]) -> str:
    """Return those of the metrics that most people compare, or ""."""
    found = [name for name in sorted(names) if name.startswith(("reward/", "eval/"))]
    if not found:
        return ""
    return f", such as {' or '.join(found[:_NUM_SUGGESTED])}"


def _label_and_folder(text: str) -> tuple[str, str]:
    """Return the parts of [LABEL=]RUN, either of which may have "=" in it; the label may be RUN."""
    if Path(text).is_dir():
        return text, text
    for place, letter in enumerate(text):
        if letter == "=" and Path(text[place + 1 :]).is_dir():
            return text[:place], text[place + 1 :]
    return text, text
