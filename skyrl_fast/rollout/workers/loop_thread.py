"""One event loop for all asynchronous code of environments and rewards in a process.

Clients and semaphores that user code keeps at module level belong to the loop of their first use,
so there is one loop, which runs as long as the process. It has its own thread: code that blocks it
stops neither the trainer nor its deadlines.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from skyrl_fast.rollout.workers.traces import trace_of_task, trace_of_thread

T = TypeVar("T")

BLOCKED_SECONDS = 0.2  # without a reaction: code in the loop blocks it
_lock = threading.Lock()
_current: LoopThread | None = None


def loop_thread() -> LoopThread:
    """Return the loop of this process; a new one after a fork, or if code blocks the last one."""
    global _current
    with _lock:
        if _current is None or not _current.usable:
            _current = LoopThread()
        return _current


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._is_blocked = False
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="asynchronous environments", daemon=True
        )
        self._thread.start()

    @property
    def usable(self) -> bool:
        return not self._is_blocked and self._pid == os.getpid()

    async def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Return the coroutine's result, from another event loop.

        Raises:
            TimeoutError: it takes longer than `timeout` seconds; its text is the calls that it is
                in, as in `CallResult.trace`, or those of the code that blocks the loop.
        """
        tasks: list[asyncio.Task[T]] = []
        running = asyncio.run_coroutine_threadsafe(_as_task(work, tasks), self.loop)
        result = asyncio.wrap_future(running)
        try:
            done, _ = await asyncio.wait({result}, timeout=timeout)
            if not done:
                raise TimeoutError(await self._trace(tasks))
            return result.result()
        finally:  # also if the caller is cancelled
            running.cancel()

    def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result; the calling thread waits."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _trace(self, tasks: list[asyncio.Task[T]]) -> str:
        """Return where the late task waits, or what blocks the loop."""
        reacted = threading.Event()
        self.loop.call_soon_threadsafe(reacted.set)
        end = time.monotonic() + BLOCKED_SECONDS
        while not reacted.is_set() and time.monotonic() < end:
            await asyncio.sleep(BLOCKED_SECONDS / 20)
        if reacted.is_set():
            if tasks:
                return trace_of_task(tasks[0])
            return ""
        self._is_blocked = True
        return trace_of_thread(self._thread.ident)


async def _as_task(work: Coroutine[Any, Any, T], tasks: list[asyncio.Task[T]]) -> T:
    task = asyncio.current_task()
    assert task is not None
    tasks.append(task)
    return await work
