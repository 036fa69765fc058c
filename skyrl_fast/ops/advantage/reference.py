"""Plain-torch reference of the advantages of trajectories, turns and tokens.

N rows (turns), A cells of all rows. A trajectory's rows are adjacent and in time order. In all
functions `rewards` are (N,), one per turn, ids (N,) int64, and `is_last_step` is (N,) bool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

EPSILON = 1e-6  # keeps a constant group finite
MIN_VARIANCE = 1e-8  # least variance of normalised advantages


def trajectory_numbers(is_last_step: torch.Tensor) -> torch.Tensor:
    """Return (N,) int64, the trajectory number of each row: the count of last steps before it."""
    last = is_last_step.to(torch.int64)
    # Minus itself: a last step belongs to the trajectory that it ends.
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
    """
    scores = scores.double()
    score = scores[is_last_step]
    group = group_ids[is_last_step]
    advantage = torch.zeros_like(score)
    for g in group.unique():
        members = group == g
        s = score[members]
        n = s.numel()
        if n == 1:
            # As SkyRL, with mean 0 and deviation 1 where there is nothing to compare with; RLOO has
            # no other trajectory to take a mean of.
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
    return advantage[trajectory_numbers(is_last_step)]


def gdpo_advantage(
    part_rewards: torch.Tensor,
    group_ids: torch.Tensor,
    is_last_step: torch.Tensor,
    weights: Sequence[float],
) -> torch.Tensor:
    """Return (N,) float64, the weighted sum of the parts' advantages, normalized over the batch.

    Args:
        part_rewards: (N, K); only last steps count.
        weights: K numbers.
    """
    total = torch.zeros(len(group_ids), dtype=torch.float64)
    for part, weight in zip(part_rewards.unbind(1), weights, strict=True):
        total += weight * group_advantage(part, group_ids, is_last_step, "grpo")
    of_last = group_ids[is_last_step]
    sizes = [int((of_last == group).sum()) for group in group_ids]
    is_compared = torch.tensor(sizes) > 1
    counted = total[is_last_step & is_compared]
    if not len(counted):
        return torch.zeros_like(total)
    normalized = (total - counted.mean()) / (counted.std(correction=1) + EPSILON)
    return torch.where(is_compared, normalized, 0.0)


def turn_level_returns(
    rewards: torch.Tensor, is_last_step: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Return (N,) float64, the discounted rewards from each turn to its trajectory's end."""
    returns = rewards.double().clone()
    for row in range(len(returns) - 2, -1, -1):
        if not is_last_step[row]:
            returns[row] += gamma * returns[row + 1]
    return returns


def turn_numbers(is_last_step: torch.Tensor) -> torch.Tensor:
    """Return (N,) int64, the number of each row within its trajectory, from 0."""
    trajectory = trajectory_numbers(is_last_step)
    rows = torch.arange(len(is_last_step), device=is_last_step.device)
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
        baseline: "turn" (the others' returns at this turn, 0 after their end) or "episode" (the
            others' returns from the start).
        scale_by_std: divide by the root mean square of the group's values.
    """
    value = turn_level_returns(rewards, is_last_step, gamma)
    trajectory = trajectory_numbers(is_last_step)
    turn = turn_numbers(is_last_step)
    advantage = torch.zeros_like(value)
    for row in range(len(value)):
        others = (group_ids == group_ids[row]) & (trajectory != trajectory[row])
        number = len(trajectory[others].unique())
        at = turn == (turn[row] if baseline == "turn" else 0)
        if number:
            # Over all others, those that have ended count as 0: a mean over those that still run
            # would bias the gradient.
            advantage[row] = value[row] - value[others & at].sum() / number
    if scale_by_std:
        for group in group_ids.unique():
            members = group_ids == group
            rms = advantage[members].square().mean().sqrt()
            advantage[members] /= rms + EPSILON
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
    """Return (N,) float64, the episode's advantage plus the weighted one at the anchor state."""
    trajectory = trajectory_numbers(is_last_step)
    score = rewards.new_zeros(int(trajectory[-1]) + 1, dtype=torch.float64)
    score.index_add_(0, trajectory, rewards.double())
    estimator = "grpo" if scale_by_std else "dr_grpo"
    # `group_advantage` reads last steps only, so each row may hold its episode's sum.
    episode = group_advantage(score[trajectory], group_ids, is_last_step, estimator)
    value = turn_level_returns(rewards, is_last_step, gamma)
    step = torch.zeros_like(value)
    for row in range(len(value)):
        same = (group_ids == group_ids[row]) & (anchor_ids == anchor_ids[row])
        # A state seen once has no other action to compare with.
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

    Args:
        rewards, values, trained: (A,), of all rows' cells.
        trajectory: (A,) int64, of each cell's row.
    """
    # The reward of an untrained token is added to that of the trained token before it.
    rewards = rewards.double()
    values = values.double()
    advantages = torch.zeros_like(rewards)
    returns = torch.zeros_like(rewards)
    advantage = value = reward = 0.0
    for cell in range(len(rewards) - 1, -1, -1):
        if cell + 1 == len(rewards) or trajectory[cell] != trajectory[cell + 1]:
            advantage = value = reward = 0.0
        reward += float(rewards[cell])
        if trained[cell]:
            delta = reward + gamma * value - float(values[cell])
            advantage = delta + gamma * lambd * advantage
            value = float(values[cell])
            reward = 0.0
            advantages[cell] = advantage
            returns[cell] = advantage + value
    return advantages, returns


def normalize(values: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Return float64 values with mean 0 and (biased) variance 1 where trained, 0 elsewhere."""
    kept = values[trained].double()
    result = torch.zeros_like(values, dtype=torch.float64)
    if kept.numel():
        # Bounded, so that a batch of equal values gives 0, not NaN.
        variance = kept.var(correction=0).clamp(min=MIN_VARIANCE)
        result[trained] = (kept - kept.mean()) / variance.sqrt()
    return result
