"""How the trainer waits: timed, in a thread, until it is stopped, and mending engines meanwhile.

And where it does not wait: what one thread writes beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class StopRequested(Exception):  # noqa: N818 - not an error
    """Someone asked for the end while a phase was running; what it had done is dropped."""


class Compute:
    """One thread computes, so that the event loop stays alive for the engine and for signals."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result, computed in the thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        """Wait for what is computed, and end."""
        self._threads.shutdown(wait=True)


class Beside:
    """One thread that works beside the trainer, one call at a time, and none waiting behind it.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="beside")
        self._last: Future[None] | None = None
        self._seconds = 0.0

    async def start(self, function: Callable[[], Any]) -> None:
        """Begin a call, as soon as the one before is over.

        Raises:
            Whatever the call before raised; nothing new is begun then.
        """
        if self._last is not None:
            await asyncio.wrap_future(self._last)
        self._last = self._thread.submit(self._run, function)

    def wait(self) -> None:
        """Block until the last call is over; raise what it raised, each time."""
        if self._last is not None:
            self._last.result()

    def took(self) -> float:
        """Return the seconds of the calls that ended since it was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Wait for the last call, and end; only `wait` says how it went."""
        self._thread.shutdown(wait=True)

    def _run(self, function: Callable[[], Any]) -> None:
        started = self._clock()
        function()
        self._seconds += self._clock() - started


class Stopwatch:
    """Adds up the seconds of a step's phases, and shows which one it is."""

    def __init__(self, clock: Callable[[], float], show: Callable[[str], None]) -> None:
        self._clock = clock
        self._show = show

    async def __call__(self, name: str, times: dict[str, float], work: Awaitable[T]) -> T:
        """The work's result; its seconds are added to `times[name]`."""
        self._show(name.replace("_", "-"))
        started = self._clock()
        try:
            return await work
        finally:
            times[name] = times.get(name, 0.0) + self._clock() - started


async def until_stopped(
    work: Coroutine[Any, Any, T],
    *,
    stop: asyncio.Event,
    wait_for_fault: Callable[[], Coroutine[Any, Any, None]],
    repair: Callable[[], Awaitable[None]],
) -> T:
    """The work's result, or StopRequested with the work cancelled.

    The trainer computes nothing meanwhile, so the policy stands still: the moment to give its
    weights to an engine that died. What waits for that engine goes on then.

    Args:
        stop: set by whoever asks for the end.
        wait_for_fault: returns when something can be repaired.
        repair: repairs it.
    """
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    fault = asyncio.ensure_future(wait_for_fault())
    try:
        while True:
            await asyncio.wait({task, stopped, fault}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if stopped.done():
                raise StopRequested
            fault.result()
            await repair()
            fault = asyncio.ensure_future(wait_for_fault())
    finally:
        for pending in (task, stopped, fault):
            pending.cancel()
        await asyncio.gather(task, stopped, fault, return_exceptions=True)
