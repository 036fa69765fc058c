"""Calls that are answered later: their order, their repetition, and their answers.

A client sends a call, gets the id of a future, and asks for the future's answer until it is there.
The calls of a model run one at a time in the order of their numbers, whatever order they arrive in.
A number that arrives again is the same call: it runs once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from skyrl_fast.errors import RunError
from skyrl_fast.rollout.engine.protocol import EngineError, RefusedRequestError
from skyrl_fast.tinker.wire import PROTOBUF, RefusedCallError

log = logging.getLogger(__name__)

JSON = "application/json"
KEPT_SECONDS = 600.0  # of a fetched answer: the client repeats a lost one for five minutes
ABANDONED_SECONDS = 3600.0  # of an answer that was never fetched
TRAINING = "train"
SAMPLING = "sample"


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """The body of an answer and its media type."""

    content: bytes
    media_type: str

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> CallAnswer:
        return cls(json.dumps(value).encode(), JSON)

    @classmethod
    def of_message(cls, content: bytes) -> CallAnswer:
        return cls(content, PROTOBUF)

    @classmethod
    def of_failure(cls, error: BaseException) -> CallAnswer:
        """Return what the client raises as RequestFailedError, with words that help."""
        is_user = isinstance(error, RefusedCallError | RefusedRequestError)
        category = "user" if is_user else "server"
        if not is_user and not isinstance(error, RunError | EngineError):
            log.error("a call failed", exc_info=error)
        text = str(error) or repr(error)
        return cls.of_json({"error": text, "category": category})


@dataclass(slots=True)
class CallFuture:
    """A call that was accepted.

    Args:
        request_id: its name, which says whether it trains or samples.
        digest: of the call's content, as a repeated call must be the same one.
        finished_at, fetched_at: by the clock of the futures; None: not yet.
        is_dropped: whether its answer is not kept any more.
    """

    request_id: str
    digest: bytes = b""
    answer: CallAnswer | None = None
    finished_at: float | None = None
    fetched_at: float | None = None
    is_dropped: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)
    extra: dict[str, Any] = field(default_factory=dict)

    def accepted(self) -> dict[str, Any]:
        """Return what the client gets at once."""
        return {"request_id": self.request_id, **self.extra}


class GoneError(Exception):
    """The answer of a future was dropped, or the server does not know it."""


class Futures:
    """The futures of a server.

    Args:
        epoch: part of every id, another one for each start of the server.
        clock: returns seconds.
    """

    def __init__(self, epoch: str, clock: Callable[[], float]) -> None:
        self._epoch = epoch
        self._clock = clock
        self._futures: dict[str, CallFuture] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._futures)

    def new(self, kind: str, digest: bytes = b"") -> CallFuture:
        self._count += 1
        future = CallFuture(f"{kind}-{self._epoch}-{self._count}", digest)
        self._futures[future.request_id] = future
        return future

    def finish(self, future: CallFuture, answer: CallAnswer) -> None:
        future.answer = answer
        future.finished_at = self._clock()
        future.done.set()

    async def fetch(self, request_id: str, seconds: float) -> CallAnswer | None:
        """Return the answer of a future, None if it is not there within these seconds.

        Raises:
            GoneError: there is no such future. A client repeats a sample then.
        """
        future = self._futures.get(request_id)
        if future is None:
            if request_id.startswith(f"{TRAINING}-") and self._epoch not in request_id:
                return CallAnswer.of_failure(RefusedCallError(RESTARTED))
            raise GoneError(request_id)
        if not future.done.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await future.done.wait()
            except TimeoutError:
                return None
        future.fetched_at = self._clock()
        return future.answer

    def drop_old(self) -> None:
        """Drop answers that were fetched, or are waiting, for long."""
        now = self._clock()
        for name, future in list(self._futures.items()):
            if future.finished_at is None:
                continue
            is_fetched = future.fetched_at is not None
            since = future.fetched_at if future.fetched_at is not None else future.finished_at
            if now - since > (KEPT_SECONDS if is_fetched else ABANDONED_SECONDS):
                del self._futures[name]
                future.answer = None
                future.is_dropped = True

    def drop(self, futures: list[CallFuture], why: str) -> None:
        """Fail futures that are still open."""
        for future in futures:
            if not future.done.is_set():
                self.finish(future, CallAnswer.of_failure(RefusedCallError(why)))


RESTARTED = (
    "the server was started again since this call: what it held in memory is lost, and whether the "
    "call had run is not known. Create the training client again from its last checkpoint: "
    "create_training_client_from_state_with_optimizer"
)


class AcceptedCalls:
    """The futures of calls by the numbers of a client, as long as their answers are kept."""

    def __init__(self) -> None:
        self._futures: dict[int, CallFuture] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def __iter__(self) -> Iterator[CallFuture]:
        return iter(self._futures.values())

    def largest(self) -> int:
        """Return the largest number, -1 if there is none."""
        return max(self._futures, default=-1)

    def find(self, number: int, digest: bytes) -> CallFuture | None:
        """Return the future of a call that has arrived before, None if it has not.

        Raises:
            RefusedCallError: another call had this number.
        """
        future = self._futures.get(number)
        if future is not None and future.digest != digest:
            raise RefusedCallError(
                f"seq_id: {number} was another call; a call that is sent again must be the same"
            )
        return future

    def add(self, number: int, future: CallFuture) -> None:
        """Remember a call, and forget the oldest ones whose answers were dropped."""
        self._futures[number] = future
        dropped = itertools.takewhile(lambda item: item[1].is_dropped, self._futures.items())
        for old, _ in list(dropped):
            del self._futures[old]


Run = Callable[[], Awaitable[CallAnswer]]


class OrderedCalls:
    """Runs the calls of one model, one at a time, in the order of their numbers.

    Args:
        first: number of the first call.
    """

    def __init__(self, futures: Futures, *, first: int = 1) -> None:
        self._futures = futures
        self._next = first
        self._accepted = AcceptedCalls()
        self._waiting: dict[int, tuple[CallFuture, Run]] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def submit(self, number: int | None, digest: bytes, run: Run) -> CallFuture:
        """Return the future of a call, which runs after those of smaller numbers.

        Args:
            number: None: the one after all that have arrived.
            digest: of its content.

        Raises:
            RefusedCallError: the number is impossible, or was that of another call.
        """
        if number is None:
            number = max(self._next - 1, self._accepted.largest()) + 1
        known = self._accepted.find(number, digest)
        if known is not None:
            return known
        if number < self._next:
            raise RefusedCallError(f"seq_id: expected {self._next} or more, got {number}")
        future = self._futures.new(TRAINING, digest)
        self._accepted.add(number, future)
        self._waiting[number] = (future, run)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run_waiting())
        return future

    async def _run_waiting(self) -> None:
        while self._next in self._waiting and not self._is_closed:
            future, run = self._waiting.pop(self._next)
            try:
                answer = await run()
            except Exception as error:
                answer = CallAnswer.of_failure(error)
            self._futures.finish(future, answer)
            self._next += 1

    async def close(self, why: str) -> None:
        """Finish the call that runs, and fail those that wait."""
        self._is_closed = True
        waiting = [future for future, _ in self._waiting.values()]
        self._waiting.clear()
        self._futures.drop(waiting, why)
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait([self._task])
