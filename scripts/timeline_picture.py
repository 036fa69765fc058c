"""Draw timelines of steps below each other, with one time axis.

    python -m scripts.timeline_picture OUT.png TITLE=STEP.json [TITLE=STEP.json ...]

STEP.json is written by `trainer.profile_steps`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from skyrl_fast.rollout.activity import ACTING, CLOSING, GENERATING, MAKING
from skyrl_fast.train.output.timeline import ROLLOUTS, TRAINER

COLORS = {GENERATING: "#d8843b", ACTING: "#4a9c6d", MAKING: "#b9b9b9", CLOSING: "#7f7f7f"}


def draw(out: Path, steps: dict[str, Path]) -> None:
    """Draw the trainer's phases of each step, and below them a line per trajectory."""
    figure = Figure(figsize=(10, 3.4 * len(steps)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 * len(steps), 1, sharex=True, height_ratios=[1, 6] * len(steps))
    found = [json.loads(path.read_text())["traceEvents"] for path in steps.values()]
    spans = [[event for event in events if event["ph"] == "X"] for events in found]
    phases = dict.fromkeys(e["name"] for step in spans for e in step if e["pid"] == TRAINER)
    for number, (title, step) in enumerate(zip(steps, spans, strict=True)):
        above, below = axes[2 * number], axes[2 * number + 1]
        trainer = [event for event in step if event["pid"] == TRAINER]
        for color, name in enumerate(phases):
            above.broken_barh(bars(trainer, name), (0, 1), color=f"C{color}")
        above.set(yticks=[], ylabel="trainer")
        above.set_title(title, loc="left", fontsize="medium")
        draw_trajectories(below, [event for event in step if event["pid"] == ROLLOUTS])
    axes[-1].set(xlabel="seconds")
    labels = [Patch(color=f"C{color}", label=name) for color, name in enumerate(phases)]
    labels += [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=labels, loc="outside lower center", ncols=5, fontsize="x-small")
    figure.savefig(out, dpi=80)


def draw_trajectories(axes: Any, spans: list[dict[str, Any]]) -> None:
    """Draw a line per trajectory, in the order in which they appear."""
    for name, color in COLORS.items():
        for track in sorted({event["tid"] for event in spans}):
            mine = [event for event in spans if event["tid"] == track]
            axes.broken_barh(bars(mine, name), (track, 0.9), color=color)
    axes.set(ylabel="trajectory")
    axes.invert_yaxis()


def bars(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return begin and length in seconds of the spans of this name."""
    return [(e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["name"] == name]


if __name__ == "__main__":
    named = (argument.rpartition("=") for argument in sys.argv[2:])
    draw(Path(sys.argv[1]), {title: Path(path) for title, _, path in named})
