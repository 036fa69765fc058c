"""Rewards that the advantage estimator does not read: said once, with what to set."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from skyrl_fast.config import Config, estimator_spec
from skyrl_fast.ops.advantage.estimators import ADVANTAGE_ESTIMATORS
from skyrl_fast.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)

MAX_SHOWN = 8  # rewards of the example


def unread_rewards(config: Config, trajectories: Sequence[Trajectory]) -> str | None:
    """Return what to set if steps before the last one have rewards that are not read, else None."""
    # An estimator of level "outcome" reads the last row's reward. A row of a full trajectory
    # (`step_wise_trajectories=false`) has the sum of all.
    spec = estimator_spec(config.trainer.algorithm)
    if spec.level != "outcome" or not config.generator.step_wise_trajectories:
        return None
    for trajectory in trajectories:
        rewards = [step.reward for step in trajectory.steps]
        if trajectory.failure is None and any(rewards[:-1]):
            break
    else:
        return None
    others = ", ".join(n for n, other in ADVANTAGE_ESTIMATORS.items() if other.level != "outcome")
    shown = ", ".join(f"{reward:g}" for reward in rewards[-MAX_SHOWN:])
    return (
        f"trainer.algorithm.advantage_estimator={spec.name} reads the reward of a trajectory's "
        "last step only, so rewards of earlier steps are ignored: sample "
        f"{trajectory.repetition_id} of prompt {trajectory.uid!r} has "
        f"{'..., ' if len(rewards) > MAX_SHOWN else ''}{shown} and counts as {rewards[-1]:g}. "
        "Return the sum with the last step, or set generator.step_wise_trajectories=false (one "
        f"row per trajectory, with the sum), or choose an estimator that reads all: {others}"
    )


class UnreadRewardsWatch:
    """Warns once of rewards that are not read."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._warned = False

    def see(self, trajectories: Sequence[Trajectory]) -> None:
        # Once: the settings do not change during a run.
        message = None if self._warned else unread_rewards(self._config, trajectories)
        if message is not None:
            self._warned = True
            logger.warning("%s", message)
