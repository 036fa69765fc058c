"""Several engines as one: requests go to running engines, weights to all, dead ones restart.

Design: docs/design/018-asynchronous.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypeVar

import torch

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.protocol import (
    Engine,
    EngineDeadError,
    EngineError,
    EngineStoppedError,
    Generation,
    NoRoomError,
)
from skyrl_fast.rollout.engine.weights.probe import Probe, WeightSyncReport
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transfer import (
    Transport,
    Weights,
    WorkerCall,
    transfer_weights,
)
from skyrl_fast.rollout.engine.weights.transports.file import send_by_file
from skyrl_fast.rollout.stop_reason import INTERRUPTED
from skyrl_fast.system.tasks import gather_or_cancel

log = logging.getLogger(__name__)
T = TypeVar("T")
MakeProbe = Callable[[Engine], Probe]
MORE_REQUESTS = 8  # than twice another engine's, with which an engine loses sessions to it
RELEASED_SECONDS = 0.01  # until a request is answered that an update does not wait for
MAX_SESSIONS = 1 << 17  # whose engines are remembered between two updates; others may change it


@dataclass(frozen=True, slots=True)
class PoolSeconds:
    """How long a pool waits for its engines.

    Args:
        poll: between two checks whether a dead engine can be restarted.
        pause: to pause, after which an engine counts as hung.
        load: the same for loading weights, moving them, and for the probe.
        log: between two log messages while waiting for any engine.
        back: for any engine to come back if all are down; None: no limit.
    """

    poll: float = 1.0
    pause: float = 60.0
    load: float = 600.0
    log: float = 60.0
    back: float | None = None


SECONDS = PoolSeconds()


@dataclass(slots=True)
class _PoolMember:
    engine: Engine
    probe: Probe | None = None
    down_since: float | None = None
    error: EngineError | WeightSyncError | None = None
    restarts: int = 0  # since the last weight update that it survived
    given_up: bool = False
    calls: set[asyncio.Task[Any]] = field(default_factory=set)  # still without an answer
    num_sessions: int = 0  # that began on it

    @property
    def up(self) -> bool:
        return self.down_since is None


class EnginePool:
    """Engines behind one `generate`.

    A request whose engine dies is sent to another one, or waits until one is running again: it
    depends only on its tokens and its seed, so its trajectory loses nothing.

    Args:
        max_restarts: restarts of one engine between two weight updates that it survives.
        seconds: how long it waits for engines.
        is_stopping: whether the run is ending: a signal to all its processes ends engines, too, and
            none is started again.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        max_restarts: int = 3,
        transport: Transport = send_by_file,
        seconds: PoolSeconds = SECONDS,
        is_stopping: Callable[[], bool] = bool,
    ) -> None:
        if not engines:
            raise ValueError("EnginePool: engines: expected at least one, got none")
        self.faults: Counter[str] = Counter()
        self.reports: dict[int, WeightSyncReport] = {}  # report of each engine's last weight update
        self._members = [_PoolMember(engine) for engine in engines]
        self._max_restarts = max_restarts
        self._transport = transport
        self._seconds = seconds
        self._sessions: dict[str, _PoolMember] = {}  # the last one used is the last
        self._is_stopping = is_stopping
        self._changed = asyncio.Condition()
        self._interrupting = False

    async def start(self) -> None:
        """Start all; return when requests can be served. If one does not start, all are closed.

        One for which the cluster has no room counts as down, as long as there is another one.

        Raises:
            EngineError: one did not start, or there is room for none.
        """
        starts = [asyncio.create_task(member.engine.start()) for member in self._members]
        try:
            for member, start in zip(self._members, starts, strict=True):
                try:
                    await start
                except NoRoomError as error:
                    member.down_since = time.monotonic()
                    member.error = error
                    log.warning("NO ROOM: %s: %s", member.engine.name, error)
            if not self._up():
                raise self._members[0].error or AssertionError("down without an error")
        except BaseException:  # Ctrl-C, too
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise

    async def close(self) -> None:
        for member in self._members:
            await member.engine.close()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str,
        **options: Any,
    ) -> Generation:
        """Raise EngineDeadError if no engine is left and none can be restarted."""
        while True:
            member = await self._choose(session_id)
            if member is None:
                # A request that comes again at once must not keep the update from its turn.
                await asyncio.sleep(RELEASED_SECONDS)
                return Generation([], [], INTERRUPTED)
            request = asyncio.create_task(
                member.engine.generate(prompt_token_ids, sampling, session_id=session_id, **options)
            )
            member.calls.add(request)
            try:
                return await request
            except EngineDeadError as error:
                await self._mark_dead(member, error)
            except asyncio.CancelledError:  # by `_mark_dead`: sent again; else by the caller
                if not (request.cancelled() and _not_cancelled()):
                    raise
            finally:
                member.calls.discard(request)
            self.faults["requests_sent_again"] += 1

    async def interrupt(self) -> None:
        """End all requests with their tokens so far, including those that wait for an engine."""
        await self.release()
        await asyncio.gather(
            *(self._call(m, m.engine.interrupt, self._seconds.pause) for m in self._up())
        )

    async def release(self) -> None:
        """End requests that wait for an engine, without tokens, until the next update is over."""
        async with self._changed:
            self._interrupting = True
            self._changed.notify_all()

    async def sleep(self) -> None:
        await asyncio.gather(
            *(self._call(m, m.engine.sleep, self._seconds.load) for m in self._up())
        )

    async def update(
        self,
        weights: Weights,
        make_probe: MakeProbe,
        *,
        frozen: Collection[str] = (),
    ) -> WeightSyncReport:
        """Load the weights into all engines, and verify them; return the worst report.

        No request runs during the update. Dead engines are restarted if possible; one that fails
        the update counts as dead.

        Raises:
            WeightSyncError, EngineError: all engines failed the update.
        """
        reports: list[WeightSyncReport] = []
        self.reports.clear()
        started = time.perf_counter()
        dtype = self.weights_dtype
        try:
            async with transfer_weights(self._transport, weights, dtype, frozen) as call:
                seconds = time.perf_counter() - started
                waited = 0.0
                # Until one engine has the weights: the others are repaired while it serves.
                while not reports:
                    members = [*self._up(), *await self._restart_dead_engines()]
                    answers = await self._load_all(members, call, make_probe, seconds)
                    reports = [report for report in answers if report is not None]
                    if not reports:
                        self._refuse_if_all_fail()
                        self._refuse_if_none_comes_back()
                        self._refuse_long_wait()
                        waited = await self._wait_for_any(waited)
        finally:
            await self._serve_waiting()
        return max(reports, key=lambda report: report.difference.maximum)

    async def verify(self, make_probe: MakeProbe) -> WeightSyncReport:
        """Compare all engines with the trainer; one that dies meanwhile is left out.

        Raises:
            WeightSyncError: an engine differs. EngineError: none answered.
        """
        reports: list[WeightSyncReport] = []
        for member in self._up():
            member.probe = make_probe(member.engine)
            report = await self._call(member, member.probe.verify, self._seconds.load)
            if report is not None:
                reports.append(report)
            elif isinstance(member.error, WeightSyncError):
                raise member.error
        if not reports and self._is_stopping():
            raise EngineStoppedError("the engines have ended with the run")
        if not reports:
            first = self._members[0].error
            raise EngineDeadError(f"no engine is left; the first one: {first}") from first
        return max(reports, key=lambda report: report.difference.maximum)

    @property
    def start_with_model(self) -> bool:
        return all(member.engine.starts_with_model for member in self._members)

    @property
    def weights_dtype(self) -> torch.dtype | None:
        dtypes = {member.engine.weights_dtype for member in self._members}
        if len(dtypes) == 1:
            return dtypes.pop()
        return None

    async def wait_for_fault(self) -> None:
        """Return when an engine is down that may be restarted, also one that has no requests.

        Raises:
            EngineDeadError: all have been down for too long.
        """
        while True:
            for member in self._up():
                try:
                    member.engine.check_running()
                except EngineDeadError as error:
                    await self._mark_dead(member, error)
            self._refuse_long_wait()
            for member in self._members:
                if not member.up and not member.given_up and await member.engine.comes_back():
                    return
            await asyncio.sleep(self._seconds.poll)

    async def repair(
        self,
        weights: Weights,
        make_probe: MakeProbe,
        *,
        frozen: Collection[str] = (),
    ) -> None:
        """Restart dead engines with these weights; the others continue to serve.

        Raises:
            WeightSyncError: all engines have other weights. EngineDeadError: none is left.
        """
        restarted = await self._restart_dead_engines()
        if restarted:
            dtype = self.weights_dtype
            async with transfer_weights(self._transport, weights, dtype, frozen) as call:
                await self._load_all(restarted, call, make_probe, 0.0)
        self._refuse_if_all_fail()
        self._refuse_if_none_comes_back()
        await self._serve_waiting()

    async def restart(self) -> None:
        """Restart dead engines where nothing is trained; EngineDeadError if none is left."""
        for member in await self._restart_dead_engines():
            self.faults["engine_restarts"] += 1
            log.warning("BACK: %s", member.engine.name)
            member.down_since = member.error = None
        self._refuse_if_none_comes_back()
        await self._serve_waiting()

    def activity(self) -> list[str]:
        now = time.monotonic()
        result: list[str] = []
        for m in self._members:
            if m.down_since is not None:
                seconds = now - m.down_since
                reason = _first_line(m.error)
                result.append(f"{m.engine.name} is down for {seconds:.0f} s: {reason}")
        return result

    def _up(self) -> list[_PoolMember]:
        return [member for member in self._members if member.up]

    async def _choose(self, session_id: str) -> _PoolMember | None:
        """Return a running engine: the same one for a session, which has cached earlier turns.

        A new session goes to the engine with the fewest requests, of these to the one on which
        fewest sessions began. So does one whose engine has so many more that its cache is worth
        less than the wait.
        """
        # None during an update, which waits for requests to end.
        async with self._changed:
            while not (up := self._up()) and not self._interrupting:
                self._refuse_if_none_comes_back()
                await self._changed.wait()
        if self._interrupting:
            return None
        member = self._sessions.pop(session_id, None)
        idlest = min(up, key=lambda one: (len(one.calls), one.num_sessions))
        most = 2 * len(idlest.calls) + MORE_REQUESTS
        if member is None or not member.up or len(member.calls) > most:
            member = idlest
            member.num_sessions += 1
        self._sessions[session_id] = member  # now the last one
        if len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return member

    async def _mark_dead(self, member: _PoolMember, error: EngineError | WeightSyncError) -> None:
        member.error = error
        if not member.up:
            return
        member.down_since = time.monotonic()
        if self._is_stopping():
            log.info("%s has ended while the run stops", member.engine.name)
        else:
            self.faults["engine_deaths"] += 1
            log.warning(
                "DEAD: %s; %d of %d engines are up: %s",
                member.engine.name,
                len(self._up()),
                len(self._members),
                _first_line(error),
            )
        for call in member.calls:  # they will never be answered
            call.cancel()
        async with self._changed:
            self._changed.notify_all()

    async def _call(
        self, member: _PoolMember, call: Callable[[], Coroutine[Any, Any, T]], seconds: float
    ) -> T | None:
        """Return the engine's answer, or None if it fails or does not answer in time."""

        async def answer() -> T:
            async with asyncio.timeout(seconds):
                return await call()

        task = asyncio.create_task(answer())
        member.calls.add(task)
        try:
            return await task
        except (EngineError, WeightSyncError) as error:
            await self._mark_dead(member, error)
        except TimeoutError:
            text = f"{member.engine.name} did not answer within {seconds:g} s"
            await self._mark_dead(member, EngineDeadError(text))
        except asyncio.CancelledError:
            if not (task.cancelled() and _not_cancelled()):
                raise
        finally:
            member.calls.discard(task)
        return None

    async def _wait_for_any(self, waited: float) -> float:
        """Wait until the next check, logging from time to time; return the total seconds waited."""
        seconds = self._seconds
        await asyncio.sleep(seconds.poll)
        total = waited + seconds.poll
        if int(waited / seconds.log) < int(total / seconds.log):
            log.warning("waiting for an engine. %s", "; ".join(self.activity()))
        return total

    async def _load_all(
        self,
        members: Sequence[_PoolMember],
        call: WorkerCall,
        make_probe: MakeProbe,
        seconds: float,
    ) -> list[WeightSyncReport | None]:
        calls = call.for_engines(len(members))
        return await gather_or_cancel(  # an error of one ends the update
            self._load(member, each, make_probe, seconds)
            for member, each in zip(members, calls, strict=True)
        )

    async def _load(
        self,
        member: _PoolMember,
        call: WorkerCall,
        make_probe: MakeProbe,
        seconds: float,
    ) -> WeightSyncReport | None:
        """Load and verify the weights, and serve again; None if the engine failed."""

        async def load() -> WeightSyncReport:
            started = time.perf_counter()
            member.probe = probe = member.probe or make_probe(member.engine)
            loading = member.engine.load_weights(call)
            expected: Any
            expected, _ = await asyncio.gather(probe.ask_trainer(), loading)
            await member.engine.resume()  # before the probe, which is a request, too
            taken = seconds + time.perf_counter() - started
            size = call.sent.num_bytes
            return await probe.verify(expected, update_seconds=taken, num_bytes=size)

        try:
            report = await self._call(member, load, self._seconds.load)
        finally:
            call.close()
        if report is None:
            return None
        if not member.up:
            self.faults["engine_restarts"] += 1
            log.warning("BACK: %s, with the current weights", member.engine.name)
        else:
            member.restarts = 0
        member.down_since = member.error = None
        self.reports[self._members.index(member)] = report
        return report

    async def _restart_dead_engines(self) -> list[_PoolMember]:
        """Restart dead engines if possible; they count as running once they have the weights.

        Raises:
            EngineStoppedError: the run is stopping, and none is left.
        """
        if self._is_stopping():
            if not self._up():
                raise EngineStoppedError("the engines have ended with the run")
            return []
        started = []
        for member in self._members:
            if member.up or member.given_up or not await member.engine.comes_back():
                continue
            if member.restarts >= self._max_restarts:
                member.given_up = True
                log.warning("GIVEN UP: %s, after %d restarts", member.engine.name, member.restarts)
                await member.engine.close()  # what is left of it
                continue
            member.restarts += 1
            try:
                await member.engine.restart()
            except EngineError as error:  # the server answers, but not correctly
                member.error = EngineDeadError(str(error))
                continue
            member.probe = None  # it was the last process's: this one's logprobs are not known
            started.append(member)
        return started

    def _refuse_if_all_fail(self) -> None:
        """Raise the first engine's error if none died: the setup is wrong, a restart is no help."""
        first = self._members[0].error
        dead = (EngineDeadError, NoneType)
        if first is not None and not any(isinstance(m.error, dead) for m in self._members):
            raise first

    def _refuse_if_none_comes_back(self) -> None:
        if all(member.given_up for member in self._members):
            first = self._members[0].error
            raise EngineDeadError(f"no engine is left; the first one: {first}") from first

    def _refuse_long_wait(self) -> None:
        ends = [member.down_since for member in self._members if member.down_since is not None]
        limit = self._seconds.back
        if limit is None or len(ends) < len(self._members):
            return
        if time.monotonic() - max(ends) > limit:
            reasons = "; ".join(self.activity())
            raise EngineDeadError(f"no engine came back within {limit:g} s: {reasons}")

    async def _serve_waiting(self) -> None:
        # Caches of earlier turns are gone, and an engine that is back has no session.
        self._sessions.clear()
        async with self._changed:
            self._interrupting = False
            self._changed.notify_all()


def _not_cancelled() -> bool:
    """Return whether the current task, which waits for a call, was not cancelled itself."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def _first_line(error: BaseException | None) -> str:
    return str(error).partition("\n")[0]
