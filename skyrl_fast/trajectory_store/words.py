"""Plain text of a trajectory, for the terminal."""

from __future__ import annotations

from typing import Any

from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.trajectory_store.record import total_reward


def readable(trajectory: Trajectory, *, tokenizer: Any) -> str:
    """Return prompt, turns and reward as lines of text."""
    steps = trajectory.steps
    prompt = tokenizer.decode(steps[0].prompt_token_ids) if steps else ""
    lines = [f"prompt: {prompt.strip()}"]
    for number, step in enumerate(steps, start=1):
        lines.append(f"agent, turn {number}: {step.text.strip()}")
        if step.observation:
            lines.append(f"environment: {step.observation.strip()}")
    lines.append(f"reward: {total_reward(trajectory):g} ({trajectory.stop_reason})")
    return "\n".join(lines)
