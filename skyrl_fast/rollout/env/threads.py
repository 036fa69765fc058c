"""Threads for blocking calls: a deadline for each call, hung threads are replaced."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

from skyrl_fast.rollout.env.host import EnvHost, HostSettings, Outcome
from skyrl_fast.rollout.env.traces import trace_of_thread


class EnvThreads:
    """Runs each call in a daemon thread; a hung thread is replaced.

    A ThreadPoolExecutor would lose a worker to every call that never returns, and would wait for
    it when the process exits.
    """

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._idle: list[_Worker] = []

    async def place(self) -> ThreadPlace:
        """Return a place for one environment."""
        return ThreadPlace(self, EnvHost(self._settings))

    async def run(self, call: Callable[[], Any], timeout: float) -> Any:
        """Return the call's result; TimeoutError, with its trace, if it takes longer.

        Args:
            call: runs in a thread, and does not raise.
            timeout: in seconds.
        """
        loop = asyncio.get_running_loop()
        worker = self._idle.pop() if self._idle else _Worker()
        future = loop.create_future()
        worker.submit(call, loop, future)
        # Not asyncio.timeout: it may lose a result if the loop was busy at the deadline.
        deadline = loop.call_later(timeout, _give_up, future, worker)
        try:
            return await future
        finally:  # also if the caller is cancelled
            deadline.cancel()
            if future.done() and not future.cancelled() and future.exception() is None:
                self._idle.append(worker)
            else:
                worker.stop()

    async def close(self) -> None:
        """End idle threads; hanging threads are daemons and end with the process."""
        for worker in self._idle:
            worker.stop()
        self._idle.clear()


class ThreadPlace:
    """Where one environment lives: in this process, called in threads."""

    def __init__(self, threads: EnvThreads, host: EnvHost) -> None:
        self._threads = threads
        self._host = host
        self.usable = True

    async def call(self, what: str, argument: Any, timeout: float) -> Outcome:
        """Return the outcome of a call; TimeoutError if it takes longer than `timeout` seconds."""
        try:
            outcome: Outcome = await self._threads.run(
                lambda: self._host.call(what, argument), timeout
            )
        except BaseException:
            if what == "make":  # also if the caller is cancelled: no one else closes it
                self._host.give_up()
            raise
        return outcome

    def release(self) -> None:
        """Free the place."""


class _Worker:
    """A daemon thread that runs calls one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="environment", daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int | None:
        """The thread's identifier."""
        return self._thread.ident

    def submit(
        self,
        call: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        self._calls.put((call, loop, future))

    def stop(self) -> None:
        """End the thread after the running call, if any."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, loop, future = item
            result = call()
            try:
                loop.call_soon_threadsafe(_settle, future, result)
            except RuntimeError:  # the loop is closed: no one waits for the result
                return
            del item, call, future, result  # not until the next call


def _give_up(future: asyncio.Future[Any], worker: _Worker) -> None:
    if not future.done():
        future.set_exception(TimeoutError(trace_of_thread(worker.ident)))


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
