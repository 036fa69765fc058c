"""The outcome of each trajectory. N rows, J trajectories.

A trajectory is one sample, whatever its number of steps. Its reward is its last row's, or, with
`sums_rewards`, the sum of its rows'; earlier steps are not samples with reward zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.row_index import dense_ids
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcome of each trajectory.

    Args:
        trajectory_ids: (N,) int32.
        last_rows: (J,) the last row of each trajectory.
        group_ids: (J,) int32.
        rewards: (J,) float64, sum of the token rewards of the last row, or of all rows.
        positive_rewards: (J,) float64, sum of the positive ones of these.
    """

    trajectory_ids: np.ndarray
    last_rows: np.ndarray
    group_ids: np.ndarray
    rewards: np.ndarray
    positive_rewards: np.ndarray

    def per_trajectory(self, per_row: np.ndarray) -> np.ndarray:
        """Return (J,) sums of a per-row array over each trajectory's rows."""
        return np.bincount(self.trajectory_ids, weights=per_row, minlength=len(self.last_rows))


def outcomes_of_trajectories(
    trajectories: Sequence[Trajectory], *, sums_rewards: bool = False
) -> Outcomes:
    """Return the outcomes of J trajectories, as if each had one row."""
    every = np.arange(len(trajectories), dtype=np.int32)
    rewards = [t.outcome(sums_rewards=sums_rewards) for t in trajectories]
    read = [t.steps if sums_rewards else t.steps[-1:] for t in trajectories]
    positive = [
        sum(max(step.reward, 0.0) for step in steps) if t.has_acted else 0.0
        for t, steps in zip(trajectories, read, strict=True)
    ]
    return Outcomes(
        trajectory_ids=every,
        last_rows=every,
        group_ids=dense_ids([t.uid for t in trajectories]).astype(np.int32),
        rewards=np.array(rewards, dtype=np.float64),
        positive_rewards=np.array(positive, dtype=np.float64),
    )


def outcomes_of_batch(batch: StepBatch, *, sums_rewards: bool = False) -> Outcomes:
    last_rows = np.flatnonzero(batch.is_last_step.numpy())
    # Earlier rows are no samples of their own.
    of_rows = batch.row_rewards.numpy().astype(np.float64)
    positive = np.maximum(of_rows, 0.0)
    # Without a negative reward, the common case, the positive part is the reward.
    if batch.rewards.numel() and batch.rewards.numpy().min() < 0:
        tokens = batch.rewards.clamp(min=0).numpy()
        cu_responses = batch.cu_responses.numpy()
        has_tokens = np.diff(cu_responses) > 0
        positive = np.where(has_tokens, segment_sums(tokens, cu_responses, np.float64), positive)
    trajectory_ids = batch.trajectory_ids.numpy()

    def per_trajectory(values: np.ndarray) -> np.ndarray:
        if sums_rewards:
            return np.bincount(trajectory_ids, weights=values)
        return values[last_rows]

    return Outcomes(
        trajectory_ids=trajectory_ids,
        last_rows=last_rows,
        group_ids=batch.group_ids.numpy()[last_rows],
        rewards=per_trajectory(of_rows),
        positive_rewards=per_trajectory(positive),
    )


def outcomes_of_samples(batch: StepBatch, *, sums_rewards: bool = False) -> Outcomes:
    """Return the outcomes of the trajectories that have acted, as of `Trajectory.has_acted`."""
    table = outcomes_of_batch(batch, sums_rewards=sums_rewards)
    if batch.is_placeholder is None:
        return table
    acted = ~batch.is_placeholder.numpy()[table.last_rows]
    return Outcomes(
        trajectory_ids=table.trajectory_ids,
        last_rows=table.last_rows[acted],
        group_ids=table.group_ids[acted],
        rewards=table.rewards[acted],
        positive_rewards=table.positive_rewards[acted],
    )


def mean(values: np.ndarray) -> float:
    """Return the mean; 0 of nothing."""
    if values.size:
        return float(values.mean())
    return 0.0
