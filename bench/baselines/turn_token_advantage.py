"""GAE and REINFORCE++ as SkyRL 0.3.0 and verl compute them, GiGPO as verl-agent does: restated.

None of them links the steps of a trajectory: every row is a separate sequence.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean 0 and unbiased variance 1 over the mask."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = (((values - mean) ** 2) * mask).sum() / count * (count / (count - 1))
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def skyrl_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whitened advantages and returns, (N, R); one step of the loop per column."""
    running: torch.Tensor | float = 0.0
    columns = []
    width = rewards.shape[-1]
    for t in reversed(range(width)):
        following = values[:, t + 1] if t < width - 1 else 0.0
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = delta + gamma * lambd * running
        columns.append(running)
    advantages = torch.stack(columns[::-1], dim=1)
    return masked_whiten(advantages, mask), advantages + values


def skyrl_reinforce_plus_plus(
    rewards: torch.Tensor, mask: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Return whitened rewards to go, (N, R)."""
    returns = torch.zeros_like(rewards)
    running: torch.Tensor | float = 0.0
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
        running = running * mask[:, t]
    return masked_whiten(returns, mask) * mask


def verl_agent_gigpo(
    step_rewards: np.ndarray,
    mask: torch.Tensor,
    anchors: np.ndarray,
    uids: np.ndarray,
    trajectory_uids: np.ndarray,
    gamma: float,
    weight: float,
) -> torch.Tensor:
    """Return (N, R) advantages; statistics over trajectories, its `cross_steps=False`."""
    num_rows = len(uids)
    returns, episodes = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.float32)
    for name in np.unique(trajectory_uids):
        rows = np.where(trajectory_uids == name)[0]
        running = 0.0
        for row in reversed(rows):
            running = step_rewards[row] + gamma * running
            returns[row] = running
        episodes[rows] = step_rewards[rows].sum()
    states = np.empty(num_rows, dtype=object)
    for uid in np.unique(uids):
        clusters = defaultdict(list)
        for row in np.where(uids == uid)[0]:
            clusters[anchors[row]].append(row)
        for state, rows in clusters.items():
            for row in rows:
                states[row] = f"{uid}-{state}"
    width = mask.shape[1]
    episode = _normalized(torch.from_numpy(episodes), uids, trajectory_uids, alone_mean=0.0)
    step = _normalized(torch.from_numpy(returns), states, np.arange(num_rows), alone_mean=None)
    spread = episode.unsqueeze(-1).tile([1, width]) * mask
    return spread + weight * (step.unsqueeze(-1).tile([1, width]) * mask)


def _normalized(
    scores: torch.Tensor, index: np.ndarray, members: np.ndarray, alone_mean: float | None
) -> torch.Tensor:
    """(score - mean) / (std + 1e-6) within the index, each member counted once."""
    by_index, seen = defaultdict(list), set()
    for i in range(len(scores)):
        if (index[i], members[i]) not in seen:
            seen.add((index[i], members[i]))
            by_index[index[i]].append(scores[i])
    mean, std = {}, {}
    for name, values in by_index.items():
        alone = len(values) == 1
        mean[name] = (
            torch.tensor(alone_mean)
            if alone and alone_mean is not None
            else torch.mean(torch.tensor(values))
        )
        std[name] = torch.tensor(1.0) if alone else torch.std(torch.tensor([values]))
    result = scores.clone()
    for i in range(len(scores)):
        result[i] = (scores[i] - mean[index[i]]) / (std[index[i]] + 1e-6)
    return result
