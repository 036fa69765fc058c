"""Plain-torch reference of group-wise advantages. Shapes: N rows, J trajectories, R cells."""

from __future__ import annotations

import torch

EPSILON = 1e-6


def trajectory_of_row(is_last_step: torch.Tensor) -> torch.Tensor:
    """Return (N,) int64, the trajectory number of each row: the last steps before it."""
    last = is_last_step.to(torch.int64)
    return torch.cumsum(last, 0) - last


def group_advantage(
    scores: torch.Tensor,
    group_ids: torch.Tensor,
    is_last_step: torch.Tensor,
    estimator: str,
) -> torch.Tensor:
    """Return (N,) float64, the advantage of each row's trajectory.

    Args:
        scores: (N,) sums of each row's token rewards; only last steps count.
        group_ids: (N,) int64.
        is_last_step: (N,) bool.
        estimator: "grpo", "dr_grpo", "rloo" or "maxrl".
    """
    scores = scores.double()
    of_row = trajectory_of_row(is_last_step)
    score, group = scores[is_last_step], group_ids[is_last_step]
    advantage = torch.zeros_like(score)
    for g in group.unique():
        members = group == g
        s = score[members]
        n = s.numel()
        if n == 1:
            alone = {"grpo": s / (1 + EPSILON), "dr_grpo": s, "rloo": s * 0, "maxrl": s}
            advantage[members] = alone[estimator]
            continue
        centred = s - s.mean()
        advantage[members] = {
            "grpo": centred / (s.std(correction=1) + EPSILON),
            "dr_grpo": centred,
            "rloo": centred * n / (n - 1),
            "maxrl": centred / (s.mean() + EPSILON),
        }[estimator]
    return advantage[of_row]
