"""The summary at the end of a run: rewards before and after, files, one trajectory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from shlex import quote

from skyrl_fast.train.output.result import TrainResult

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 40
RESUME_COMMAND = "run the same command with --resume to continue"
_RESUME_CALL = "call it again with trainer.resume_mode=latest to continue"


def show_summary(result: TrainResult) -> None:
    """Write the summary of a run that Python code has started to standard error."""
    from rich.console import Console

    text = summary(result, resume=_RESUME_CALL)
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True, end="")


def summary(result: TrainResult, *, resume: str = RESUME_COMMAND) -> str:
    """Return the summary of a run.

    Args:
        resume: how a run that was stopped is continued.
    """
    done = f"{result.step} of {result.total_steps} steps"
    lines = ["", f"{'finished' if result.signal is None else 'stopped'}: {done}"]
    rewards = []
    for when, reward in (("before", result.before), ("after", result.after)):
        if reward is not None:
            rewards.append(f"{reward:.3f} {when}")
    if rewards:
        curve = draw_curve(list(result.evaluations.values()))
        lines.append(f"evaluation reward: {', '.join(rewards)}  {curve}".rstrip())
    for name, path in (
        ("learning curve", result.plot),
        ("metrics", result.metrics),
        ("trajectories", result.trajectories),
        ("checkpoint", result.checkpoint),
    ):
        if path is not None and path.exists():
            lines.append(f"{name + ':':16}{path}")
    if result.trajectories.is_dir():
        lines.append(f"{'view it:':16}skyrl-fast view {quote(str(result.run_path))}")
    lines += [f"{'look at:':16}{warning}" for warning in result.warnings]
    if result.warnings:
        lines.append(f"{'':16}what they mean: the page Metrics of the documentation")
    if result.sample:
        lines += ["", "one trajectory:", result.sample]
    if result.signal is not None:
        lines += ["", resume]
    return "\n".join(lines) + "\n"


def draw_curve(values: Sequence[float]) -> str:
    """Return values as a line of bars; "" for fewer than two, or where stdout has no such sign."""
    if len(values) < 2 or "utf" not in (sys.stdout.encoding or "").lower():
        return ""
    least = min(values)
    most = max(values)
    scale = (len(_BARS) - 1) / ((most - least) or 1)
    return "".join(_BARS[round((value - least) * scale)] for value in values[-_MAX_BARS:])
