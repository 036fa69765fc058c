"""Threads for blocking calls: a deadline for each call, hung threads are replaced."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from skyrl_fast.rollout.env.handler import EnvHandler, EnvSettings
from skyrl_fast.rollout.workers.protocol import CallResult
from skyrl_fast.rollout.workers.traces import trace_of_thread

# How long calls wait for the threads that work before as many join them. A call of a quick
# environment takes 0.1 ms, but to change threads takes up to 5 ms while the event loop is busy.
JOIN_SECONDS = 0.002


class ThreadWorkers:
    """Runs calls in daemon threads; a hung thread is replaced.

    One thread makes the calls that arrive together, if they are quick, and the event loop is
    woken once for all that have returned. Calls that block get a thread each, twice as many
    after every `join_seconds`. A ThreadPoolExecutor would change threads for each call, lose a
    thread to every call that never returns, and wait for it when the process exits.
    """

    def __init__(self, settings: EnvSettings, *, join_seconds: float = JOIN_SECONDS) -> None:
        self._settings = settings
        self._join_seconds = join_seconds
        self._lock = threading.Lock()  # guards all below
        self._waiting: deque[_ThreadCall] = deque()
        self._idle: list[_Thread] = []
        self._num_working = 0
        self._returned: list[tuple[_ThreadCall, Any]] = []  # for the event loop
        self._joining: asyncio.TimerHandle | None = None
        self._closed = False

    async def acquire(self) -> ThreadWorker:
        return ThreadWorker(self, EnvHandler(self._settings))

    async def run(self, function: Callable[[], Any], timeout: float) -> Any:
        """Return the result of `function`, which never raises; TimeoutError with trace if late."""
        loop = asyncio.get_running_loop()
        call = _ThreadCall(function, loop)
        with self._lock:
            self._waiting.append(call)
            if self._num_working == 0:
                self._wake(1)
        if self._joining is None:
            self._joining = loop.call_later(self._join_seconds, self._join, loop)
        # Not asyncio.timeout: it may lose a result if the loop was busy at the deadline.
        deadline = loop.call_later(timeout, call.expire)
        try:
            return await call.future
        finally:  # also if the caller is cancelled
            deadline.cancel()
            if not call.returned:
                self._give_up(call)

    async def close(self) -> None:
        """End idle threads; hanging threads are daemons and end with the process."""
        if self._joining is not None:
            self._joining.cancel()
        with self._lock:
            self._closed = True
            for worker in self._idle:
                worker.wake(None)
            self._idle.clear()

    def _wake(self, number: int) -> None:
        """Let so many more threads work; with the lock."""
        for _ in range(number):
            if self._idle:
                worker = self._idle.pop()
            else:
                worker = _Thread()
            self._num_working += 1
            worker.wake(self)

    def _join(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let more threads work if calls have waited, until none do."""
        with self._lock:
            waiting = len(self._waiting)
            self._wake(min(waiting, max(1, self._num_working)))
        if waiting:
            self._joining = loop.call_later(self._join_seconds, self._join, loop)
        else:
            self._joining = None

    def _give_up(self, call: _ThreadCall) -> None:
        """Forget a call whose caller has left; its thread ends after it."""
        with self._lock:
            if call.worker is None:
                self._waiting.remove(call)
            elif not call.returned and not call.worker.lost:
                call.worker.lost = True
                self._num_working -= 1

    def work(self, worker: _Thread) -> bool:
        """Make the calls that wait, in a thread; return whether the thread is still wanted."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_working -= 1
                    if not self._closed:
                        self._idle.append(worker)
                    return not self._closed
                call = self._waiting.popleft()
                call.worker = worker
            result = call.function()
            with self._lock:
                call.returned = True
                self._returned.append((call, result))
                first = len(self._returned) == 1
            if first:
                try:
                    call.loop.call_soon_threadsafe(self._settle)
                except RuntimeError:  # the loop is closed: no one waits for the result
                    return False
            if worker.lost:
                return False
            del call, result  # not until the next call

    def _settle(self) -> None:
        """Hand results to those who wait for them, in the event loop."""
        with self._lock:
            returned = self._returned
            self._returned = []
        for call, result in returned:
            if not call.future.done():
                call.future.set_result(result)


class _ThreadCall:
    def __init__(self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.function = function
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.worker: _Thread | None = None
        self.returned = False

    def expire(self) -> None:
        """Raise TimeoutError for the caller, unless the result is on its way."""
        if not self.returned and not self.future.done():
            if self.worker is None:
                ident = None
            else:
                ident = self.worker.ident
            self.future.set_exception(TimeoutError(trace_of_thread(ident)))


class ThreadWorker:
    """Runs one environment in threads of this process."""

    def __init__(self, threads: ThreadWorkers, handler: EnvHandler) -> None:
        self._threads = threads
        self._handler = handler
        self.usable = True

    async def call(
        self, what: str, argument: Any, timeout: float
    ) -> CallResult | Coroutine[Any, Any, CallResult]:
        try:
            outcome: CallResult | Coroutine[Any, Any, CallResult] = await self._threads.run(
                lambda: self._handler.begin(what, argument), timeout
            )
        except BaseException:
            if what == "make":  # also if the caller is cancelled: no one else closes it
                self._handler.give_up()
            raise
        return outcome

    def release(self) -> None:
        """See `Worker.release`."""


class _Thread:
    """A daemon thread that works when it is woken; it ends after a call that is late (`lost`)."""

    def __init__(self) -> None:
        self.lost = False
        self._threads: queue.SimpleQueue[ThreadWorkers | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="environment", daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def wake(self, threads: ThreadWorkers | None) -> None:
        self._threads.put(threads)

    def _work(self) -> None:
        while (threads := self._threads.get()) is not None and threads.work(self):
            pass
