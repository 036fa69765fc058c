"""Named parts of rewards, of which GDPO compares each by itself. N rows, J trajectories, K parts.

A part is a metric of the trajectory: of a reward with named parts, of a reward function, or one
that the environment or the agent reports.

Design: docs/design/003-advantage.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.rollout.env.answers import read_reward
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.setting import ConfigError, did_you_mean

OUTCOME = "reward"  # name of the reward itself
WEIGHTS = "trainer.algorithm.gdpo_weights"
MAX_SHOWN = 20  # names in an error


def with_reward_parts(
    batch: StepBatch, trajectories: Sequence[Trajectory], names: Sequence[str]
) -> StepBatch:
    """Return the batch with the parts of these names, those of a trajectory on each of its rows.

    A part that a trajectory does not report is 0, as the sum of no rewards; `reward` is the row's
    own reward, which is the outcome on a trajectory's last row. Without names the batch is
    unchanged.

    Args:
        trajectories: those of the batch, in order.

    Raises:
        ValueError: a part that is no finite float32 number.
    """
    if not names:
        return batch
    parts = np.zeros((len(trajectories), len(names)), np.float32)
    for number, trajectory in enumerate(trajectories):
        if not trajectory.has_acted:
            continue
        for place, name in enumerate(names):
            parts[number, place] = _value(trajectory, name)
    of_rows = torch.from_numpy(parts[batch.trajectory_ids.numpy()])
    for place, name in enumerate(names):
        if name == OUTCOME:
            of_rows[:, place] = batch.row_rewards
    return batch.with_(reward_parts=of_rows)


def _value(trajectory: Trajectory, name: str) -> float:
    value = trajectory.env_metrics.get(name)
    if value is None:
        return 0.0
    sample = f"sample {trajectory.repetition_id} of prompt {trajectory.uid!r}"
    return read_reward(value, f"{WEIGHTS}: {name} of {sample}")


class RewardParts:
    """Checks that a run's trajectories report the parts by name: 0 is what others count as."""

    def __init__(self, names: Iterable[str]) -> None:
        self._missing = [name for name in names if name != OUTCOME]

    def see_batch(self, trajectories: Sequence[Trajectory]) -> None:
        """Look at the complete trajectories of a training batch.

        Raises:
            ConfigError: no trajectory up to now, of which some acted, has reported a part.
        """
        reports: list[dict[str, Any]] = []
        for trajectory in trajectories:
            if trajectory.has_acted:
                reports.append(trajectory.env_metrics)
        if not self._missing or not reports:
            return
        reported = list(dict.fromkeys(name for report in reports for name in report))
        self._missing = [name for name in self._missing if name not in reported]
        if not self._missing:
            return
        name = self._missing[0]
        if reported:
            known = f"which report {', '.join(map(repr, sorted(reported)[:MAX_SHOWN]))}"
        else:
            known = "which report none"
        raise ConfigError(
            f"{WEIGHTS}: expected names that the trajectories of the first batch report as "
            f"metrics, {known} (and {OUTCOME!r}, their outcome), got {name!r}"
            f"{did_you_mean(name, [*reported, OUTCOME])}"
        )
