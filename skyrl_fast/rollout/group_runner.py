"""Runs groups: all trajectories of a prompt, with a last deadline behind their own.

A trajectory ends by itself: it has a deadline, and so has every call of its environment. What is
here is for what the deadlines do not reach (code that swallows its cancellation, say), so that a
run never waits for something that will not come, and says in its log what that was.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl_fast.config import GeneratorConfig
from skyrl_fast.rollout.activity import Activity, ActivityBoard, Watchdog
from skyrl_fast.rollout.agent_loop import AgentLoop
from skyrl_fast.rollout.engine.protocol import Sampler
from skyrl_fast.rollout.engine.weight_gate import WeightGate
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.rollout_config import RolloutPrompt, check_loop_settings
from skyrl_fast.rollout.stop_reason import TIMEOUT
from skyrl_fast.rollout.trajectory import Trajectory

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks of the watchdog at a group
SLOW_SHARE = 0.5  # of a trajectory's deadline, spent in one phase: worth a word in the log
CLOSE_CALLS = 2  # an environment's calls after the deadline: its metrics, its end
GRACE_SECONDS = 5.0


class GroupDroppedError(RuntimeError):
    """None of a group's trajectories ever came back; the message names them."""


class _Slot:
    """One of the places for trajectories that run at once; given back once, by whoever is first."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._held = False

    async def take(self) -> None:
        await self._slots.acquire()
        self._held = True

    def give_back(self) -> None:
        if self._held:
            self._held = False
            self._slots.release()


@dataclass(slots=True)
class _Member:
    """One trajectory of a group: its task, its place, its row, and how often it began."""

    task: asyncio.Task[Trajectory]
    slot: _Slot
    row: Activity
    runs: int = 1


class GroupRunner:
    """Runs the groups of one run; calls of `group` may overlap.

    Args:
        engine, tokenizer, env_factory, config, seed: as for `rollout`.
        gate: of the engine.
        board: where trajectories say what they do.
        env_timeout_seconds: deadline of one environment call.
        look_seconds: between two looks of the watchdog.
        on_trajectory: called with each trajectory as it ends.

    Raises:
        ValueError: settings that cannot work, or a tokenizer without end token.
    """

    def __init__(
        self,
        engine: Sampler,
        tokenizer: Any,
        env_factory: EnvFactory,
        config: GeneratorConfig,
        *,
        seed: int,
        gate: WeightGate,
        board: ActivityBoard | None = None,
        env_timeout_seconds: float = 60.0,
        look_seconds: float = LOOK_SECONDS,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("rollout: tokenizer: it has no end-of-sequence token (eos_token)")
        check_loop_settings(config)
        self._on_trajectory = on_trajectory
        self.board = board or ActivityBoard()
        self.faults: Counter[str] = Counter()
        self._engine = engine
        self._tokenizer = tokenizer
        self._env_factory = env_factory
        self._config = config
        self._seed = seed
        self._gate = gate
        self._look_seconds = look_seconds
        self._slots = asyncio.Semaphore(config.max_concurrent_trajectories)
        self._abandoned: set[asyncio.Task[Trajectory]] = set()
        self._close_seconds = CLOSE_CALLS * env_timeout_seconds + GRACE_SECONDS
        deadline = config.trajectory_timeout_seconds
        self._watchdog = Watchdog(
            self.board,
            slow_seconds=SLOW_SHARE * deadline,
            stuck_seconds=deadline + self._close_seconds,
        )

    async def group(
        self, prompt: RolloutPrompt, *, phase: str, policy_version: int
    ) -> list[Trajectory]:
        """Return all trajectories of the prompt, by repetition.

        One that is stuck past its deadline is given up and begun anew, `max_retries` times; then
        it stays as a failed one. Trajectories that are whole stay, whatever becomes of the others.

        Args:
            phase: "train" or "eval".
            policy_version: at the start, for the seeds.

        Raises:
            GroupDroppedError: every one of them was given up, in training.
            EngineDeadError: no engine is left.
        """
        loop = AgentLoop(
            self._engine,
            self._tokenizer,
            self._env_factory,
            self._config,
            phase=phase,
            policy_version=policy_version,
            seed=self._seed,
            gate=self._gate,
            board=self.board,
            faults=self.faults,
        )
        members: dict[int, _Member] = {}
        ended: dict[int, Trajectory] = {}
        try:
            for repetition_id in range(self._config.samples(phase)):
                members[repetition_id] = self._begin(loop, prompt, repetition_id)
            while members:
                await self._look(loop, prompt, phase, members, ended)
        finally:
            await self._end(list(members.values()))
        return [ended[repetition_id] for repetition_id in sorted(ended)]

    async def _end(self, members: list[_Member]) -> None:
        """Cancel them, and wait until their environments are closed, but not for ever."""
        for member in members:
            member.task.cancel()
            self.board.leave(member.row)
        if members:
            await asyncio.wait([m.task for m in members], timeout=self._close_seconds)
        for member in members:
            self._abandon(member)

    def _abandon(self, member: _Member) -> None:
        """Whatever it still does, nobody waits for it."""
        member.slot.give_back()
        self._abandoned.add(member.task)
        member.task.add_done_callback(self._abandoned.discard)
        member.task.add_done_callback(_forget)

    def _begin(
        self, loop: AgentLoop, prompt: RolloutPrompt, repetition_id: int, runs: int = 0
    ) -> _Member:
        row = self.board.enter(prompt.uid, repetition_id)
        first_attempt = runs * (self._config.max_retries + 1)

        slot = _Slot(self._slots)

        async def one() -> Trajectory:
            await slot.take()
            try:
                trajectory = await loop.run(
                    prompt, repetition_id, row=row, first_attempt=first_attempt
                )
            finally:
                slot.give_back()
            if self._on_trajectory is not None:
                self._on_trajectory(trajectory)
            return trajectory

        return _Member(asyncio.create_task(one()), slot, row, runs + 1)

    async def _look(
        self,
        loop: AgentLoop,
        prompt: RolloutPrompt,
        phase: str,
        members: dict[int, _Member],
        ended: dict[int, Trajectory],
    ) -> None:
        """Wait a little; move what has ended, and give up what is stuck."""
        await asyncio.wait(
            [member.task for member in members.values()],
            timeout=self._look_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for repetition_id, member in list(members.items()):
            if member.task.done():
                ended[repetition_id] = member.task.result()
                del members[repetition_id]
        for row in self._watchdog.slow(prompt.uid):
            self.faults["slow_trajectories"] += 1
            log.warning("slow: %s", row.text(self.board.clock()))
        for row in self._watchdog.stuck(prompt.uid):
            if row.repetition_id in members:
                self._give_up(loop, prompt, phase, members, ended, row)
        lost = not members and all(t.failure == _GIVEN_UP for t in ended.values())
        if lost and phase == "train":  # in an evaluation no other group takes its place
            raise GroupDroppedError(
                f"group {prompt.uid}: all {len(ended)} trajectories were stuck past every deadline"
            )

    def _give_up(
        self,
        loop: AgentLoop,
        prompt: RolloutPrompt,
        phase: str,
        members: dict[int, _Member],
        ended: dict[int, Trajectory],
        row: Activity,
    ) -> None:
        """Leave a stuck trajectory to itself; begin it anew, or let it have failed."""
        member = members.pop(row.repetition_id)
        self.faults["stuck_trajectories"] += 1
        member.task.cancel()
        self._abandon(member)
        self.board.leave(row)
        again = member.runs <= self._config.max_retries
        log.warning(
            "STUCK: %s; %s",
            row.text(self.board.clock()),
            "begun anew" if again else "given up for good",
        )
        if again:
            members[row.repetition_id] = self._begin(loop, prompt, row.repetition_id, member.runs)
            return
        ended[row.repetition_id] = Trajectory(
            uid=prompt.uid,
            repetition_id=row.repetition_id,
            steps=[],
            stop_reason=TIMEOUT,
            env_class=prompt.env_class,
            env_metrics={},
            seconds=0.0,
            failure=_GIVEN_UP,
            phase=phase,
            data_source=prompt.data_source,
        )


_GIVEN_UP = "stuck past every deadline, and given up"


def _forget(task: asyncio.Task[Trajectory]) -> None:
    """Ask for an abandoned task's error, so that asyncio does not report it as unseen."""
    if not task.cancelled():
        task.exception()
