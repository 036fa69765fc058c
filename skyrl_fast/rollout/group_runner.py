"""Runs groups: all trajectories of a prompt, with a last deadline after their own.

A trajectory has a deadline, and so has every call of its environment. The watchdog here handles
what those deadlines do not reach (code that swallows its cancellation, for example), so that a run
never waits for a trajectory that will not return, and its log names that trajectory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from skyrl_fast.config import GeneratorConfig
from skyrl_fast.rollout.activity import Activity, ActivityBoard
from skyrl_fast.rollout.loop_settings import RolloutPrompt, check_loop_settings
from skyrl_fast.rollout.stop_reason import TIMEOUT
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.rollout.trajectory_runner import Agent, TrajectoryRunner
from skyrl_fast.system.tasks import ignore_result

log = logging.getLogger(__name__)

POLL_SHARE = 0.02  # share of a trajectory's deadline between two checks by the watchdog
SLOW_SHARE = 0.5  # share of the deadline that, spent in one phase, is reported as slow
CLOSE_CALLS = 2  # calls of the environment after the deadline: metrics and close
GRACE_SECONDS = 5.0

OnGroup = Callable[[RolloutPrompt, Sequence[Trajectory]], Awaitable[None]]
Run = Callable[..., Awaitable[Trajectory]]  # `TrajectoryRunner.run`, with phase and version


class GroupDroppedError(RuntimeError):
    """None of a group's trajectories ever returned; the message names the group."""


class _Slot:
    """One of the slots for concurrent trajectories; released once, by the first who asks."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._held = False

    async def acquire(self) -> None:
        await self._slots.acquire()
        self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._slots.release()


@dataclass(slots=True)
class _GroupMember:
    task: asyncio.Task[Trajectory]
    slot: _Slot
    entry: Activity
    runs: int = 1


@dataclass(slots=True)
class _Group:
    prompt: RolloutPrompt
    phase: str
    run: Run
    members: dict[int, _GroupMember] = field(default_factory=dict)
    ended: dict[int, Trajectory] = field(default_factory=dict)


class GroupRunner:
    """Run the groups of one run; calls of `group` may overlap.

    Args:
        env_timeout_seconds: deadline of one environment call.
        poll_seconds: between two checks by the watchdog; None: `POLL_SHARE` of the deadline.
        on_group: awaited with a prompt and its trajectories when all of them have ended.

    Raises:
        ValueError: settings that cannot work.
    """

    def __init__(
        self,
        agent: Agent,
        config: GeneratorConfig,
        *,
        board: ActivityBoard | None = None,
        env_timeout_seconds: float = 60.0,
        poll_seconds: float | None = None,
        on_group: OnGroup | None = None,
    ) -> None:
        check_loop_settings(config)
        self._on_group = on_group
        self.board = board or ActivityBoard()
        self.faults: Counter[str] = Counter()
        self._runner = TrajectoryRunner(agent, config, board=self.board, faults=self.faults)
        self._config = config
        self.slots = asyncio.Semaphore(config.max_concurrent_trajectories)
        self._abandoned: set[asyncio.Task[Trajectory]] = set()
        self._close_seconds = CLOSE_CALLS * env_timeout_seconds + GRACE_SECONDS
        deadline = config.trajectory_timeout_seconds
        if poll_seconds is None:
            self._poll_seconds = POLL_SHARE * deadline
        else:
            self._poll_seconds = poll_seconds
        self._slow_seconds = SLOW_SHARE * deadline
        self._stuck_seconds = deadline + self._close_seconds

    async def group(
        self, prompt: RolloutPrompt, *, phase: str, policy_version: int
    ) -> list[Trajectory]:
        """Return all trajectories of the prompt, by repetition.

        A trajectory that is stuck past its deadline is abandoned and restarted, `max_retries`
        times; then it counts as failed. Finished trajectories are kept in any case.

        Raises:
            GroupDroppedError: all of them were abandoned, in training.
            EngineDeadError: no engine is left.
        """
        run = partial(self._runner.run, phase=phase, policy_version=policy_version)
        group = _Group(prompt, phase, run)
        try:
            for repetition_id in range(self._config.samples(phase)):
                self._begin(group, repetition_id)
            while group.members:
                await self._poll(group)
        finally:
            await self._end(list(group.members.values()))
        trajectories = [group.ended[repetition_id] for repetition_id in sorted(group.ended)]
        if self._on_group is not None:
            await self._on_group(prompt, trajectories)
        return trajectories

    async def _end(self, members: list[_GroupMember]) -> None:
        """Cancel them, and wait for a bounded time until their environments are closed."""
        for member in members:
            member.task.cancel()
            self.board.leave(member.entry)
        if members:
            await asyncio.wait([m.task for m in members], timeout=self._close_seconds)
        for member in members:
            self._abandon(member)

    def _abandon(self, member: _GroupMember) -> None:
        """Stop waiting for it; it may still be running."""
        member.slot.release()
        self._abandoned.add(member.task)
        member.task.add_done_callback(self._abandoned.discard)
        member.task.add_done_callback(ignore_result)

    def _begin(self, group: _Group, repetition_id: int, runs: int = 0) -> None:
        entry = self.board.enter(group.prompt.uid, repetition_id)
        # Seeds follow from the attempt: a restarted trajectory must not repeat what an abandoned
        # one, which may still be sampling, has said.
        first_attempt = runs * (self._config.max_retries + 1)
        slot = _Slot(self.slots)

        async def one() -> Trajectory:
            await slot.acquire()
            try:
                return await group.run(
                    group.prompt, repetition_id, entry=entry, first_attempt=first_attempt
                )
            finally:
                slot.release()

        member = _GroupMember(asyncio.create_task(one()), slot, entry, runs + 1)
        group.members[repetition_id] = member

    async def _poll(self, group: _Group) -> None:
        """Wait for all, up to `poll_seconds`; collect ended ones, and give up stuck ones."""
        members = group.members
        ended = group.ended
        uid = group.prompt.uid
        await asyncio.wait(
            [member.task for member in members.values()],
            timeout=self._poll_seconds,
            return_when=asyncio.FIRST_EXCEPTION,
        )
        for repetition_id, member in list(members.items()):
            if member.task.done():
                ended[repetition_id] = member.task.result()
                del members[repetition_id]
        self._report_slow()
        for entry in self.board.find_stuck(uid, self._stuck_seconds):
            if entry.repetition_id in members:
                self._give_up(group, entry)
        lost = not members and all(t.failure == _GIVEN_UP for t in ended.values())
        if lost and group.phase == "train":  # in an evaluation no other group replaces it
            raise GroupDroppedError(
                f"group {uid}: all {len(ended)} trajectories were stuck past every deadline"
            )

    def _report_slow(self) -> None:
        """Name those of all groups in one line: the trajectories of a batch begin together."""
        slow = self.board.report_slow(self._slow_seconds)
        if not slow:
            return
        self.faults["slow_trajectories"] += len(slow)
        longest, *others = slow
        text = longest.describe(self.board.clock())
        if others:
            names = []
            for entry in others:
                names.append(f"{entry.uid}/{entry.repetition_id}")
            text += f"; and {len(others)} more: {', '.join(names)}"
        log.warning("slow: %s", text)

    def _give_up(self, group: _Group, entry: Activity) -> None:
        # Its deadline has cancelled it before, in vain; what swallowed that may not see this one
        # either, so it is not awaited.
        member = group.members.pop(entry.repetition_id)
        self.faults["stuck_trajectories"] += 1
        member.task.cancel()
        self._abandon(member)
        self.board.leave(entry)
        again = member.runs <= self._config.max_retries
        log.warning(
            "STUCK: %s; %s",
            entry.describe(self.board.clock()),
            "restarted" if again else "given up",
        )
        if again:
            self._begin(group, entry.repetition_id, member.runs)
            return
        group.ended[entry.repetition_id] = Trajectory(
            uid=group.prompt.uid,
            repetition_id=entry.repetition_id,
            stop_reason=TIMEOUT,
            env_class=group.prompt.env_class,
            failure=_GIVEN_UP,
            phase=group.phase,
            data_source=group.prompt.data_source,
        )


_GIVEN_UP = "stuck past every deadline, and given up"
