"""Threads for blocking calls: a bounded number, a deadline for each call, hung ones replaced."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any


class EnvThreads:
    """Run at most `limit` calls at once, each in a daemon thread; a hung thread is replaced.

    A ThreadPoolExecutor would lose a worker to every call that never returns, and would wait for
    it when the process exits.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: list[_Worker] = []
        self.num_abandoned = 0

    async def run(self, call: Callable[[], Any], timeout: float) -> Any:
        """Return the call's result; TimeoutError if it takes longer, without the wait for a slot.

        Args:
            call: runs in a thread.
            timeout: in seconds.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a semaphore belongs to one loop
            self._loop, self._slots = loop, asyncio.Semaphore(self._limit)
        assert self._slots is not None
        async with self._slots:
            worker = self._idle.pop() if self._idle else _Worker()
            future = loop.create_future()
            worker.submit(call, loop, future)
            try:
                # Not wait_for: it may lose a result if the loop was busy at the deadline.
                await asyncio.wait({future}, timeout=timeout)
            finally:  # also if the caller is cancelled
                if future.done():
                    self._idle.append(worker)
                else:
                    future.cancel()
                    worker.stop()
            if future.cancelled():
                self.num_abandoned += 1
                raise TimeoutError
            return future.result()

    def close(self) -> None:
        """End idle threads."""
        for worker in self._idle:
            worker.stop()
        self._idle.clear()


class _Worker:
    """A daemon thread that runs calls one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="environment", daemon=True).start()

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
            result: Any = None
            error: Exception | None = None
            try:
                result = call()
            except TimeoutError as caught:  # raised by the environment, not our deadline
                error = RuntimeError(f"TimeoutError: {caught}")
            except StopIteration as caught:  # a future cannot hold it
                error = RuntimeError(f"StopIteration: {caught}")
            except Exception as caught:
                error = caught
            except BaseException as caught:  # sys.exit in an environment ends only its call
                error = RuntimeError(f"{type(caught).__name__}: {caught}")
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed: no one waits for the result
                return


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
