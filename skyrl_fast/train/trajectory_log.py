"""Each step's trajectories as JSON lines that a person can read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_fast.rollout.trajectory import Trajectory


def write_trajectories(
    path: Path,
    trajectories: Sequence[Trajectory],
    *,
    tokenizer: Any,
    advantages: Sequence[float] | None = None,
) -> None:
    """Write one line per trajectory: who, how it went, and every turn in words.

    Args:
        path: replaced if it is there.
        tokenizer: decodes the first prompt.
        advantages: one per trajectory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        for number, trajectory in enumerate(trajectories):
            record = trajectory_record(trajectory, tokenizer=tokenizer)
            if advantages is not None:
                record["advantage"] = advantages[number]
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
    temporary.replace(path)


def trajectory_record(trajectory: Trajectory, *, tokenizer: Any) -> dict[str, Any]:
    """Return the trajectory as plain values: first prompt decoded, then text and observation."""
    steps = trajectory.steps
    return {
        "uid": trajectory.uid,
        "repetition_id": trajectory.repetition_id,
        "phase": trajectory.phase,
        "env_class": trajectory.env_class,
        "data_source": trajectory.data_source,
        "reward": total_reward(trajectory),
        "stop_reason": trajectory.stop_reason,
        "failure": trajectory.failure,
        "policy_version": steps[-1].policy_version if steps else None,
        "seconds": round(trajectory.seconds, 4),
        "env_metrics": trajectory.env_metrics,
        "prompt": tokenizer.decode(steps[0].prompt_token_ids) if steps else "",
        "turns": [
            {
                "response": step.text,
                "observation": step.observation,
                "reward": step.reward,
                "stop_reason": step.stop_reason,
                "prompt_tokens": len(step.prompt_token_ids),
                "response_tokens": len(step.response_ids),
                "trained_tokens": sum(step.loss_mask),
                "llm_seconds": round(step.llm_seconds, 4),
                "env_seconds": round(step.env_seconds, 4),
            }
            for step in steps
        ],
    }


def total_reward(trajectory: Trajectory) -> float:
    """Return the outcome: the last step's reward; 0 without steps."""
    return float(trajectory.steps[-1].reward) if trajectory.steps else 0.0


def readable(trajectory: Trajectory, *, tokenizer: Any) -> str:
    """Return the trajectory as text for a terminal."""
    record = trajectory_record(trajectory, tokenizer=tokenizer)
    lines = [f"prompt: {record['prompt'].strip()}"]
    for number, turn in enumerate(record["turns"], start=1):
        lines.append(f"agent, turn {number}: {turn['response'].strip()}")
        if turn["observation"]:
            lines.append(f"environment: {turn['observation'].strip()}")
    lines.append(f"reward: {record['reward']:g} ({record['stop_reason']})")
    return "\n".join(lines)
