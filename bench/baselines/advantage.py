"""The step-wise GRPO block of SkyRL 0.3.0's trainer, restated with the same operations."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch


def skyrl_stepwise_grpo(
    rewards: torch.Tensor, response_mask: torch.Tensor, uids: list[str], is_last_step: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), both (N, R) float32.

    Args:
        rewards: (N, R) float32. response_mask: (N, R) int64. uids, is_last_step: N entries.
    """
    last = torch.tensor(is_last_step, dtype=torch.bool)
    index = np.array(uids)[last.numpy()]
    scores = rewards[last].sum(dim=-1)
    ones = torch.ones_like(response_mask[last], dtype=torch.float)
    by_group = defaultdict(list)
    for i in range(len(scores)):
        by_group[index[i]].append(scores[i])
    mean, std = {}, {}
    for uid, members in by_group.items():
        alone = len(members) == 1
        mean[uid] = torch.tensor(0.0) if alone else torch.mean(torch.tensor(members))
        std[uid] = torch.tensor(1.0) if alone else torch.std(torch.tensor([members]))
    for i in range(len(scores)):
        scores[i] = (scores[i] - mean[index[i]]) / (std[index[i]] + 1e-6)
    per_trajectory = scores.unsqueeze(-1) * ones
    trajectory = torch.cat([torch.tensor([False]), last[:-1]]).int().cumsum(dim=0)
    assert int(trajectory[-1]) + 1 == len(per_trajectory)
    mask = response_mask.to(per_trajectory.dtype)
    return per_trajectory[trajectory] * mask, per_trajectory[trajectory] * mask
