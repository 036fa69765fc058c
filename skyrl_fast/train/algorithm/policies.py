"""The trajectories of each policy, in a run of several.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from skyrl_fast.rollout.trajectory import Step, Trajectory


def split_by_policy(
    trajectories: Sequence[Trajectory], names: Iterable[str]
) -> dict[str, list[Trajectory]]:
    """Return for each policy the trajectories of its steps; a policy without any is left out.

    The last step of each has the trajectory's outcome, or that of the policy's name. A trajectory
    in which a policy made no call is none of its samples. A prompt in which it made none at all has
    one trajectory without steps, a masked row, so that mini-batches have the same prompts for all.

    Args:
        trajectories: adjacent per group. One that failed has failed for each policy.
    """
    parts = {}
    for name in names:
        part = [_part(t, name) for t in trajectories]
        # A policy that nobody called has nothing to train in this step.
        if any(trajectory.steps for trajectory in part):
            groups = groupby(part, key=lambda trajectory: trajectory.uid)
            parts[name] = [t for _, group in groups for t in _samples(list(group))]
    return parts


def _samples(group: list[Trajectory]) -> list[Trajectory]:
    return [t for t in group if t.steps or t.failure is not None] or group[:1]


def _part(trajectory: Trajectory, name: str) -> Trajectory:
    steps = [step for step in trajectory.steps if step.policy == name]
    if not steps:
        return replace(trajectory, steps=[])
    last, of_all = steps[-1], trajectory.steps[-1]
    steps[-1] = replace(last, reward=_outcome(trajectory, last, name))
    reason = trajectory.stop_reason if last is of_all else last.stop_reason
    return replace(trajectory, steps=steps, stop_reason=reason)


def _outcome(trajectory: Trajectory, last: Step, name: str) -> float:
    of_all = trajectory.steps[-1]
    outcome = trajectory.policy_rewards.get(name, of_all.reward)
    # In another step than the trajectory's last one the outcome is not in its reward yet.
    return outcome if last is of_all else last.reward + outcome
