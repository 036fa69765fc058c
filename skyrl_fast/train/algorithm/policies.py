"""The trajectories of each policy in a run of several, or of each role of one policy.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from skyrl_fast.rollout.trajectory import Step, Trajectory, recorded_steps


def split_by_policy(
    trajectories: Sequence[Trajectory], names: Iterable[str], *, sums_rewards: bool = False
) -> dict[str, list[Trajectory]]:
    """Return for each policy the trajectories of its steps; a policy without any is left out.

    The last step of each has the trajectory's outcome, or that of the policy's name. Steps keep
    what was recorded of them: the state, and the answers of all policies in the prompt. So does the
    trajectory, with its stop reason. A trajectory in which a policy made no call is none of its
    samples. A prompt in which it made none at all has one trajectory without steps, a masked row,
    so that mini-batches have the same prompts for all.

    Args:
        trajectories: adjacent per group. One that failed has failed for each policy.
        sums_rewards: an outcome is the sum of the steps' rewards, as of `Trajectory.outcome`; the
            sum of a policy's steps is then the outcome, too.
    """
    complete = [replace(t, steps=recorded_steps(t)) for t in trajectories]
    parts = {}
    for name in names:
        part = [_part(t, name, sums_rewards) for t in complete]
        # A policy that nobody called has nothing to train in this step.
        if any(trajectory.steps for trajectory in part):
            groups = groupby(part, key=lambda trajectory: trajectory.uid)
            parts[name] = [t for _, group in groups for t in _samples(list(group))]
    return parts


def join_roles(parts: Mapping[str, Sequence[Trajectory]]) -> tuple[list[Trajectory], list[str]]:
    """Return the trajectories of all roles, in groups of a prompt and a role, and their prompts.

    The uid of a group is that of its prompt and the role; groups of a prompt are adjacent.

    Args:
        parts: by role, as of `split_by_policy`, which has the same prompts for all of them.

    Example:
        >>> both = {"white": [Trajectory("a", 0)], "black": [Trajectory("a", 0)]}
        >>> trajectories, uids = join_roles(both)
        >>> [one.uid for one in trajectories], uids
        (['a/white', 'a/black'], ['a', 'a'])
    """
    by_prompt: dict[str, list[Trajectory]] = {}
    for role, part in parts.items():
        for trajectory in part:
            group = replace(trajectory, uid=f"{trajectory.uid}/{role}")
            by_prompt.setdefault(trajectory.uid, []).append(group)
    joined: list[Trajectory] = []
    uids: list[str] = []
    for uid, trajectories in by_prompt.items():
        joined += trajectories
        uids += [uid] * len(trajectories)
    return joined, uids


def _samples(group: list[Trajectory]) -> list[Trajectory]:
    return [t for t in group if t.steps or t.failure is not None] or group[:1]


def _part(trajectory: Trajectory, name: str, sums_rewards: bool) -> Trajectory:
    steps = [step for step in trajectory.steps if step.policy == name]
    if steps:
        steps[-1] = replace(steps[-1], reward=_last_reward(trajectory, steps, name, sums_rewards))
    return replace(trajectory, steps=steps)


def _last_reward(
    trajectory: Trajectory, steps: Sequence[Step], name: str, sums_rewards: bool
) -> float:
    """Return the reward of a policy's last step, with the trajectory's outcome."""
    last = steps[-1]
    of_all = trajectory.steps[-1]
    if sums_rewards:
        total = sum(step.reward for step in trajectory.steps)
        earlier = sum(step.reward for step in steps[:-1])
        return trajectory.policy_rewards.get(name, total) - earlier
    outcome = trajectory.policy_rewards.get(name, of_all.reward)
    # In another step than the trajectory's last one the outcome is not in its reward yet.
    if last is of_all:
        return outcome
    return last.reward + outcome
