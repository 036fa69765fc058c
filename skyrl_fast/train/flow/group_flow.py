"""Groups in flight: generated in the background while the trainer trains.

`GroupSchedule` decides which group may start and which are next; here each group has a task that
generates it, and the trainer waits for the next ones. No group starts without room in the schedule,
so a slow trainer limits generation.

Design: docs/design/018-asynchronous.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace

from skyrl_fast.rollout.failures import RolloutError, fail_infinite_rewards
from skyrl_fast.rollout.group_runner import GroupDroppedError
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.data.prompts import Prompt, PromptSampler
from skyrl_fast.train.flow.group_schedule import (
    ACCEPTED,
    DROPPED,
    READY,
    RUNNING,
    TAKEN,
    Group,
    GroupSchedule,
)
from skyrl_fast.train.flow.rollouts import Rollouts

logger = logging.getLogger(__name__)

WAIT_LOG_SECONDS = 60.0  # between log lines about what the trainer waits for
CLOSE_SECONDS = 10.0  # for groups to close their environments when the run ends
DROPPED_BATCHES_IN_A_ROW = 3  # dropped groups without a successful one: the set-up is broken


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group whose trajectories have all finished, and how many versions ago it started."""

    group: Group
    trajectories: list[Trajectory]
    staleness: int


class GroupFlow:
    """Starts groups in the order of the data, and returns them in that order.

    Args:
        sampler: order of the data, at the position where the run begins.
        batch_size, max_staleness, version: as for `GroupSchedule`.
        last_version: the version at which the run ends: no group is started beyond it.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        prompts: Sequence[Prompt],
        sampler: PromptSampler,
        *,
        batch_size: int,
        max_staleness: int,
        version: int,
        epochs: int,
        last_version: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.schedule = GroupSchedule(
            batch_size=batch_size, max_staleness=max_staleness, version=version
        )
        self.faults = Counter(dropped_groups=0)
        self._rollouts = rollouts
        self._prompts = prompts
        # Runs ahead of the trainer's position, which moves when a batch is consumed.
        self._ahead = copy(sampler)
        self._batch_size = batch_size
        self._ahead_of_need = max_staleness > 0
        self._epochs = epochs
        self._last_version = last_version
        self._clock = clock
        self._tasks: dict[Group, asyncio.Task[list[Trajectory]]] = {}
        self._trajectories: dict[Group, list[Trajectory]] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._dropped_in_a_row = 0
        self._closed = False

    async def take(self, number: int) -> list[ReadyGroup] | None:
        """Return the next groups in the order of their start once ready; None if the data ran out.

        Raises:
            RolloutError: too many groups in a row were dropped. Whatever generating a group raised.
        """
        while True:
            self._changed.clear()
            if self._error is not None:
                raise self._error
            self.fill(wanted=number)
            groups = self.schedule.next_ready(number)
            if groups is not None:
                self.schedule.take(groups)
                ages = self.schedule.staleness(groups)
                return [
                    ReadyGroup(group, self._trajectories.pop(group), age)
                    for group, age in zip(groups, ages, strict=True)
                ]
            # `fill` has started what it could: the data has run out.
            if self.schedule.num(ACCEPTED, RUNNING, READY) < number:
                return None
            await wait_for_change(self._changed, self._waiting_for, WAIT_LOG_SECONDS)

    def fill(self, *, wanted: int = 0) -> None:
        """Start as many groups as there is room for, or as the trainer waits for, `wanted`."""
        # Without staleness a batch is generated after the previous one was trained: none starts
        # before the trainer waits for it.
        if self._closed or (not wanted and not self._ahead_of_need):
            return
        # Groups of batches beyond the last version would be sampled for nothing.
        to_come = (self._last_version - self.schedule.version) * self._batch_size
        for _ in range(self.schedule.room(wanted=wanted, limit=to_come)):
            if self._ahead.epoch >= self._epochs:
                break
            place = (self._ahead.epoch, self._ahead.position)
            prompt = self._ahead.next_prompt()
            self.schedule.accept(self._prompts[prompt].uid, prompt=prompt, place=place)
        for group in self.schedule.to_start():
            self._start(group)

    def drop(self, names: Collection[str]) -> None:
        """Drop these groups from the batch; others may start in their place."""
        for group in self.schedule.line:
            if group.name in names:
                self.schedule.drop(group)
        self.fill()

    def consume(self) -> PromptSampler:
        """Mark the batch as trained; return the data position: everything before it is finished."""
        # Groups leave in the order of the data, so this one position separates what was consumed or
        # dropped from what a resumed run has to start again.
        self.schedule.consume()
        line = self.schedule.line
        position = copy(self._ahead)
        if line:
            position.move_to(*line[0].place)
        return position

    def advance(self, version: int) -> None:
        """Record that the engine has this version; groups that start now have it too."""
        self.schedule.advance(version)
        self.fill()

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)

    def metrics(self) -> dict[str, float]:
        return {
            "async/num_groups_running": float(self.schedule.num(RUNNING)),
            "async/num_groups_ready": float(self.schedule.num(READY)),
        }

    def _start(self, group: Group) -> None:
        self.schedule.start(group, now=self._clock())
        # A prompt that is in flight twice is two groups, each with a name of its own.
        prompt = replace(self._prompts[group.prompt], uid=group.name)
        task = asyncio.ensure_future(
            self._rollouts.generate([prompt], step=group.version, phase="train")
        )
        self._tasks[group] = task
        task.add_done_callback(lambda task: self._take_result(group, task))

    def _take_result(self, group: Group, task: asyncio.Task[list[Trajectory]]) -> None:
        del self._tasks[group]
        self._changed.set()
        if self._closed:
            # Read, or asyncio logs that nobody did.
            if not task.cancelled():
                task.exception()
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._trajectories[group] = task.result()
            fail_infinite_rewards(self._trajectories[group])
            self.schedule.finish(group)
            self._dropped_in_a_row = 0
        elif isinstance(error, GroupDroppedError):
            self._lose(group, error)
        else:
            # The first one: the others are often its consequences.
            self._error = self._error or error

    def _lose(self, group: Group, error: GroupDroppedError) -> None:
        logger.warning("dropped: %s", error)
        self.faults["dropped_groups"] += 1
        self.schedule.drop(group)
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= DROPPED_BATCHES_IN_A_ROW * self._batch_size:
            self._error = RolloutError(
                f"{self._dropped_in_a_row} groups in a row were dropped, the last one: {error}"
            )
        self.fill()

    def _waiting_for(self) -> str:
        waiting = []
        for g in self.schedule.line:
            if g.state not in (READY, TAKEN, DROPPED):
                waiting.append(g)
        first = waiting[0]
        doing = self._rollouts.activity([group.name for group in waiting])
        return (
            f"waiting for {len(waiting)} groups, first for {first.name}, {first.state} for "
            f"{self._clock() - first.started:.0f} s. " + ("; ".join(doing) or "no details")
        )


async def wait_for_change(
    changed: asyncio.Event, describe: Callable[[], str], log_seconds: float
) -> None:
    """Wait for an event, and log from time to time what is waited for.

    Args:
        changed: the event.
        describe: returns what is waited for.
        log_seconds: between two lines of the log.
    """
    while not changed.is_set():
        try:
            # Not wait_for: before Python 3.12 it drops a cancellation that meets the event.
            async with asyncio.timeout(log_seconds):
                await changed.wait()
        except TimeoutError:
            if not changed.is_set():  # else a group ended in the same moment
                logger.warning("%s", describe())
