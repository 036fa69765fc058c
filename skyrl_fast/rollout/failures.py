"""Trajectories that failed after all retries: logged, and told apart from a wrong setup."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from skyrl_fast.errors import RunError
from skyrl_fast.rollout.env.answers import LARGEST_REWARD
from skyrl_fast.rollout.stop_reason import ENV_ERROR
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.system.printable import log_line

log = logging.getLogger(__name__)

MAX_LOGGED_FAILURES = 5  # failures of one batch; the others are only counted
MAX_FAILED_BATCHES = 3  # in a row: chance does not explain that many
_EXCEPTION = re.compile(r"environment \S+: \w+ raised \w+: ")


class RolloutError(RunError):
    """Several batches in a row had no usable trajectory: the setup is wrong."""


def fail_infinite_rewards(trajectories: Sequence[Trajectory]) -> None:
    """Mark trajectories as failed whose rewards, or their sums, are not finite in float32."""
    for trajectory in trajectories:
        total = sum(abs(step.reward) for step in trajectory.steps)
        if trajectory.failure is None and not total <= LARGEST_REWARD:
            rewards = [step.reward for step in trajectory.steps]
            trajectory.failure = f"rewards: expected finite float32 numbers, got {rewards!r:.200}"
            trajectory.stop_reason = ENV_ERROR


def log_failures(trajectories: Sequence[Trajectory]) -> None:
    """Warn about trajectories without steps and failed trajectories: how many, which, and why."""
    too_long = [t.uid for t in trajectories if not t.steps and t.failure is None]
    if too_long:
        log.warning(
            "the first prompt of %d trajectories is longer than max_input_length; each becomes a "
            "masked placeholder row: %s",
            len(too_long),
            ", ".join(list(dict.fromkeys(too_long))[:MAX_LOGGED_FAILURES]),
        )
    failed = [t for t in trajectories if t.failure is not None]
    if not failed:
        return
    all_failed = len(failed) == len(trajectories)
    log.warning(
        "%s%d of %d trajectories failed after all retries; each becomes a masked placeholder row",
        "NOTHING TO TRAIN IN THIS BATCH: " if all_failed else "",
        len(failed),
        len(trajectories),
    )
    for trajectory in failed[:MAX_LOGGED_FAILURES]:
        name = trajectory.uid
        failure = log_line(trajectory.failure)
        log.warning("  %s/%d: %s", name, trajectory.repetition_id, failure)
    if len(failed) > MAX_LOGGED_FAILURES:
        log.warning("  and %d more", len(failed) - MAX_LOGGED_FAILURES)


def _has_one_exception(trajectories: Sequence[Trajectory]) -> bool:
    """Return whether the same call of an environment raised the same type in each of them."""
    found = {_EXCEPTION.match(t.failure or "") for t in trajectories}
    return None not in found and len({match[0] for match in found if match}) == 1


class FailureWatch:
    """End a run in which every trajectory fails.

    A failed trajectory never ends a training step, not even if all of a batch fail. A wrong setup
    (an environment that is not registered, a missing database) fails every time: after three
    completely failed batches in a row, training or evaluation, an error is raised, after the first
    one if the same exception of an environment ended all of its trajectories, and at the end of a
    shorter run without any usable trajectory.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._usable = False  # there was a trajectory that did not fail
        self._first: Trajectory | None = None  # first trajectory of the last failed batch

    def see(self, trajectories: Sequence[Trajectory]) -> None:
        """Record a finished batch; RolloutError if no further one can be expected to succeed."""
        if not trajectories or any(t.failure is None for t in trajectories):
            self._in_a_row = 0
            self._usable = self._usable or bool(trajectories)
            return
        self._in_a_row += 1
        self._first = trajectories[0]
        if len(trajectories) > 1 and _has_one_exception(trajectories):
            raise RolloutError(
                f"every trajectory of a batch, {len(trajectories)}, failed by the same exception, "
                f"the first of them ({self._first.uid}): {log_line(self._first.failure)}"
            )
        if self._in_a_row >= MAX_FAILED_BATCHES:
            raise RolloutError(
                f"every trajectory of {self._in_a_row} batches in a row failed; the last time "
                f"{len(trajectories)}, the first of them ({self._first.uid}): "
                f"{log_line(self._first.failure)}"
            )

    def end(self) -> None:
        """Note the end of the run; RolloutError if there were trajectories, and all failed."""
        if self._first is not None and not self._usable:
            raise RolloutError(
                "every trajectory of the run failed, so that nothing was trained; the first of the "
                f"last batch ({self._first.uid}): {log_line(self._first.failure)}"
            )
