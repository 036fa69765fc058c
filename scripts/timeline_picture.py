"""Draw the timeline of a step: `python -m scripts.timeline_picture STEP.json OUT.png [TITLE]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from skyrl_fast.rollout.activity import ACTING, CLOSING, GENERATING, MAKING
from skyrl_fast.train.output.timeline import ROLLOUTS, TRAINER

COLORS = {GENERATING: "#d8843b", ACTING: "#4a9c6d", MAKING: "#b9b9b9", CLOSING: "#7f7f7f"}


def draw(path: Path, out: Path, title: str) -> None:
    """Draw the trainer's phases, and below them a line per trajectory."""
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    trainer = [event for event in spans if event["pid"] == TRAINER]
    trajectories = [event for event in spans if event["pid"] == ROLLOUTS]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 5])
    names = list(dict.fromkeys(event["name"] for event in trainer))
    for number, name in enumerate(names):
        above.broken_barh(bars(trainer, name), (0, 1), color=f"C{number}", label=name)
    above.set(yticks=[], ylabel="trainer", title=title)
    above.legend(
        fontsize="x-small", ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.2)
    )
    for name, color in COLORS.items():
        label = name
        for track in sorted({event["tid"] for event in trajectories}):
            mine = [event for event in trajectories if event["tid"] == track]
            below.broken_barh(bars(mine, name), (track, 0.9), color=color, label=label)
            label = ""
    below.set(xlabel="seconds", ylabel="trajectory")
    below.invert_yaxis()
    below.legend(fontsize="x-small", loc="lower right")
    figure.savefig(out, dpi=100)


def bars(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return begin and length in seconds of the spans of this name."""
    return [(e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["name"] == name]


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
