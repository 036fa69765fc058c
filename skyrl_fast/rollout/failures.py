"""Trajectories that failed for good: named in the log, and told apart from a wrong set-up."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from skyrl_fast.rollout.trajectory import Trajectory

log = logging.getLogger(__name__)

NAMED_FAILURES = 5  # of one batch, in the log; the others are only counted
WHOLE_FAILURES_IN_A_ROW = 3  # batches: bad luck does not last that long


class RolloutError(RuntimeError):
    """Batch after batch without one usable trajectory: the set-up is wrong."""


def log_failures(trajectories: Sequence[Trajectory]) -> None:
    """Warn of trajectories without steps or that failed for good: how many, which, and why."""
    too_long = [t.uid for t in trajectories if not t.steps and t.failure is None]
    if too_long:
        log.warning(
            "the first prompt of %d trajectories is longer than max_input_length; they stay as "
            "masked stub rows: %s",
            len(too_long),
            ", ".join(list(dict.fromkeys(too_long))[:NAMED_FAILURES]),
        )
    failed = [t for t in trajectories if t.failure is not None]
    if not failed:
        return
    whole = len(failed) == len(trajectories)
    log.warning(
        "%s%d of %d trajectories failed for good; they stay as masked stub rows",
        "NOTHING TO TRAIN IN THIS BATCH: " if whole else "",
        len(failed),
        len(trajectories),
    )
    for trajectory in failed[:NAMED_FAILURES]:
        log.warning("  %s/%d: %s", trajectory.uid, trajectory.repetition_id, trajectory.failure)
    if len(failed) > NAMED_FAILURES:
        log.warning("  and %d more", len(failed) - NAMED_FAILURES)


class FailureWatch:
    """Ends a run in which nothing works any more.

    A failed trajectory never ends a training step, not even when all of a batch fail. A set-up
    that is wrong (an environment that is not registered, a database that is not there) fails
    every time: after three whole batches in a row, training or evaluation, there is an error.
    """

    def __init__(self) -> None:
        self._in_a_row = 0

    def see(self, trajectories: Sequence[Trajectory]) -> None:
        """Take note of a batch that is over.

        Raises:
            RolloutError: it is the third in a row of which every trajectory failed.
        """
        if not trajectories or any(t.failure is None for t in trajectories):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row >= WHOLE_FAILURES_IN_A_ROW:
            first = trajectories[0]
            raise RolloutError(
                f"every trajectory of {self._in_a_row} batches in a row failed; the last time "
                f"{len(trajectories)}, the first of them ({first.uid}): {first.failure}"
            )
