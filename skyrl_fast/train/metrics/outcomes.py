"""The outcome of each trajectory. N rows, J trajectories.

A trajectory is one sample, whatever its number of steps: its reward is its last row's; earlier
steps are not samples with reward zero.
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
        rewards: (J,) float64, sum of the last row's token rewards.
        positive_rewards: (J,) float64, sum of the last row's positive token rewards.
    """

    trajectory_ids: np.ndarray
    last_rows: np.ndarray
    group_ids: np.ndarray
    rewards: np.ndarray
    positive_rewards: np.ndarray

    def per_trajectory(self, per_row: np.ndarray) -> np.ndarray:
        """Return (J,) sums of a per-row array over each trajectory's rows."""
        return np.bincount(self.trajectory_ids, weights=per_row, minlength=len(self.last_rows))


def outcomes_of_trajectories(trajectories: Sequence[Trajectory]) -> Outcomes:
    """Return the outcomes of J trajectories, as if each had only its last row."""
    every = np.arange(len(trajectories), dtype=np.int32)
    last = [t.steps_or_placeholder()[-1] for t in trajectories]
    rewards = np.array([step.reward for step in last], dtype=np.float64)
    return Outcomes(
        trajectory_ids=every,
        last_rows=every,
        group_ids=dense_ids([t.uid for t in trajectories]).astype(np.int32),
        rewards=rewards,
        positive_rewards=np.maximum(rewards, 0.0),
    )


def outcomes_of_batch(batch: StepBatch) -> Outcomes:
    # Earlier rows are no samples of their own: their reward counts with the last row's.
    last_rows = np.flatnonzero(batch.is_last_step.numpy())
    rewards = batch.row_rewards.numpy()[last_rows].astype(np.float64)
    positive = np.maximum(rewards, 0.0)
    # Without a negative reward, the common case, the positive part is the reward.
    if batch.rewards.numel() and batch.rewards.numpy().min() < 0:
        tokens = batch.rewards.clamp(min=0).numpy()
        cu_responses = batch.cu_responses.numpy()
        has_tokens = np.diff(cu_responses)[last_rows] > 0
        sums = segment_sums(tokens, cu_responses, np.float64)[last_rows]
        positive = np.where(has_tokens, sums, positive)
    return Outcomes(
        trajectory_ids=batch.trajectory_ids.numpy(),
        last_rows=last_rows,
        group_ids=batch.group_ids.numpy()[last_rows],
        rewards=rewards,
        positive_rewards=positive,
    )


def mean(values: np.ndarray) -> float:
    """Return the mean; 0 of nothing."""
    return float(values.mean()) if values.size else 0.0
