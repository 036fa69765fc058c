"""Plain-torch reference of credit for turns and tokens.

N rows (turns), A cells of all rows. A trajectory's rows are adjacent, in time order.
"""

from __future__ import annotations

import torch

from skyrl_fast.ops.advantage.reference import EPSILON, group_advantage, trajectory_of_row

MIN_VARIANCE = 1e-8


def turn_level_returns(
    rewards: torch.Tensor, is_last_step: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Return (N,) float64, the discounted rewards from each turn to its trajectory's end.

    Args:
        rewards: (N,), one per turn.
        is_last_step: (N,) bool.
    """
    returns = rewards.double().clone()
    for row in range(len(returns) - 2, -1, -1):
        if not is_last_step[row]:
            returns[row] += gamma * returns[row + 1]
    return returns


def turn_of_row(is_last_step: torch.Tensor) -> torch.Tensor:
    """Return (N,) int64, the number of each row within its trajectory, from 0."""
    trajectory = trajectory_of_row(is_last_step)
    rows = torch.arange(len(is_last_step))
    first = torch.stack([rows[trajectory == j].min() for j in trajectory.unique()])
    return rows - first[trajectory]


def turn_group_advantage(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    is_last_step: torch.Tensor,
    gamma: float,
    baseline: str,
    scale_by_std: bool,
) -> torch.Tensor:
    """Return (N,) float64, returns minus the mean of the group's other trajectories.

    Args:
        rewards: (N,), one per turn.
        group_ids: (N,) int64.
        is_last_step: (N,) bool.
        baseline: "turn" (the others' returns at this turn, 0 after their end) or "episode" (the
            others' returns from the start).
        scale_by_std: divide by the root mean square of the group's values.
    """
    value = turn_level_returns(rewards, is_last_step, gamma)
    trajectory, turn = trajectory_of_row(is_last_step), turn_of_row(is_last_step)
    advantage = torch.zeros_like(value)
    for row in range(len(value)):
        others = (group_ids == group_ids[row]) & (trajectory != trajectory[row])
        number = len(trajectory[others].unique())
        at = turn == (turn[row] if baseline == "turn" else 0)
        if number:
            advantage[row] = value[row] - value[others & at].sum() / number
    if scale_by_std:
        for group in group_ids.unique():
            own = advantage[group_ids == group]
            advantage[group_ids == group] = own / (own.square().mean().sqrt() + EPSILON)
    return advantage


def gigpo_advantage(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    anchor_ids: torch.Tensor,
    is_last_step: torch.Tensor,
    gamma: float,
    step_advantage_w: float,
    scale_by_std: bool,
) -> torch.Tensor:
    """Return (N,) float64, the episode's advantage plus the weighted one of the anchor state.

    Args:
        rewards: (N,), one per turn.
        group_ids, anchor_ids: (N,) int64.
        is_last_step: (N,) bool.
    """
    trajectory = trajectory_of_row(is_last_step)
    score = torch.zeros(int(trajectory[-1]) + 1, dtype=torch.float64)
    score.index_add_(0, trajectory, rewards.double())
    estimator = "grpo" if scale_by_std else "dr_grpo"
    episode = group_advantage(score[trajectory], group_ids, is_last_step, estimator)
    value = turn_level_returns(rewards, is_last_step, gamma)
    step = torch.zeros_like(value)
    for row in range(len(value)):
        same = (group_ids == group_ids[row]) & (anchor_ids == anchor_ids[row])
        if int(same.sum()) > 1:
            step[row] = value[row] - value[same].mean()
            if scale_by_std:
                step[row] /= value[same].std(correction=1) + EPSILON
    return episode + step_advantage_w * step


def token_chain(
    rewards: torch.Tensor,
    values: torch.Tensor,
    trained: torch.Tensor,
    trajectory: torch.Tensor,
    gamma: float,
    lambd: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (A,) float64 advantages and returns of generalised advantage estimation.

    The reward of a token that is not trained falls to the trained one before it.

    Args:
        rewards, values: (A,), of all rows' cells.
        trained: (A,) bool.
        trajectory: (A,) int64, of each cell's row.
    """
    rewards, values = rewards.double(), values.double()
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    advantage = value = reward = 0.0
    for cell in range(len(rewards) - 1, -1, -1):
        if cell + 1 == len(rewards) or trajectory[cell] != trajectory[cell + 1]:
            advantage = value = reward = 0.0
        reward += float(rewards[cell])
        if trained[cell]:
            delta = reward + gamma * value - float(values[cell])
            advantage = delta + gamma * lambd * advantage
            value, reward = float(values[cell]), 0.0
            advantages[cell], returns[cell] = advantage, advantage + value
    return advantages, returns


def normalize(values: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Return float64 values with mean 0 and (biased) variance 1 where trained, 0 elsewhere."""
    kept = values[trained].double()
    result = torch.zeros(values.shape, dtype=torch.float64)
    if kept.numel():
        variance = kept.var(correction=0).clamp(min=MIN_VARIANCE)
        result[trained] = (kept - kept.mean()) / variance.sqrt()
    return result
