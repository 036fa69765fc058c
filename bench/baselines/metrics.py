"""SkyRL 0.3.0's rollout and reward metrics, restated: loops over rows of Python lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np


def rollout_metrics(output: dict[str, Any]) -> dict[str, float]:
    """Return token counts per row, by reward, and of trained tokens, also per turn."""
    tokens = np.array([len(response) for response in output["response_ids"]])
    rewards = np.array([float(np.sum(row)) for row in output["rewards"]])
    trained = np.array([sum(mask) for mask in output["loss_masks"]])
    turns: list[int] = []
    for mask in output["loss_masks"]:
        on = (np.asarray(mask) != 0).astype(np.int8)
        if on.sum() == 0:
            continue
        edges = np.diff(np.concatenate(([0], on, [0])))
        turns.extend((np.where(edges == -1)[0] - np.where(edges == 1)[0]).tolist())
    of_turns = np.array(turns)
    return {
        "min": tokens.min().item(),
        "max": tokens.max().item(),
        "avg": tokens.mean().item(),
        "std": tokens.std().item(),
        "non_zero": tokens[rewards > 0].mean().item(),
        "zero": tokens[rewards == 0].mean().item(),
        "assistant_avg": trained.mean().item(),
        "assistant_min": trained.min().item(),
        "assistant_max": trained.max().item(),
        "assistant_std": trained.std().item(),
        "turn_mean": of_turns.mean().item(),
        "turn_std": of_turns.std().item(),
        "turn_max": of_turns.max().item(),
    }


def reward_metrics(output: dict[str, Any], uids: Sequence[str]) -> dict[str, float]:
    """Return mean reward, mean positive reward and pass@n of the given rows."""
    rewards = output["rewards"]
    by_uid = defaultdict(list)
    for uid, row in zip(uids, rewards, strict=True):
        by_uid[uid].append(row[-1])
    return {
        "avg_raw_reward": float(np.mean([sum(row) for row in rewards])),
        "mean_positive_reward": float(np.mean([sum(max(r, 0) for r in row) for row in rewards])),
        "pass_at_n": sum(any(r > 0 for r in group) for group in by_uid.values()) / len(by_uid),
    }


def last_rows(output: dict[str, Any]) -> dict[str, Any]:
    """Return the output's last rows only, as SkyRL does for its reward metrics."""
    last = output["is_last_step"]
    return {
        name: [value for value, is_last in zip(values, last, strict=True) if is_last]
        for name, values in output.items()
        if isinstance(values, list)
    }
