"""Plain text of a trajectory, for the terminal."""

from __future__ import annotations

from typing import Any

from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.system.printable import printable

MAX_SHOWN = 4_000  # characters of a prompt, an answer or an observation


def readable(trajectory: Trajectory, *, tokenizer: Any, sums_rewards: bool = False) -> str:
    """Return prompt, turns and reward as lines of text; long texts are cut, controls escaped."""
    steps = trajectory.steps
    if steps:
        prompt = tokenizer.decode(list(steps[0].prompt_token_ids))
    else:
        prompt = ""
    lines = [f"prompt: {_shown(prompt)}"]
    for number, step in enumerate(steps, start=1):
        lines.append(f"agent, turn {number}: {_shown(step.text)}")
        if step.observation:
            lines.append(f"environment: {_shown(step.observation)}")
    outcome = trajectory.outcome(sums_rewards=sums_rewards)
    lines.append(f"reward: {outcome:g} ({trajectory.stop_reason})")
    return "\n".join(lines)


def _shown(text: str) -> str:
    return printable(text.strip(), MAX_SHOWN)
