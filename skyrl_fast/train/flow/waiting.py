"""Waiting of the trainer: timed, interruptible, with engine repair; compute and writer threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from skyrl_fast.system.torch_threads import end_torch_threads

T = TypeVar("T")


class StopRequested(Exception):  # noqa: N818 - not an error
    """A stop was requested while a phase was running; its result is dropped."""


class Compute:
    """Runs functions in one thread, so that the event loop can serve the engine and signals."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        # Ends torch's OpenMP threads of the calling thread, which would slow the function down.
        end_torch_threads()
        # One thread: torch's calls of one step never overlap.
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=True)


class BackgroundWriter:
    """Runs one call at a time in a background thread; a new call waits for the last one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._last: Future[None] | None = None
        self._seconds = 0.0

    async def start(self, function: Callable[[], Any]) -> None:
        """Start a call as soon as the previous one is done, or raise what that one raised."""
        if self._last is not None:
            # One call at a time bounds what waits in memory, and an error shows at the next step.
            await asyncio.wrap_future(self._last)
        self._last = self._thread.submit(self._run, function)

    def wait(self) -> None:
        """Block until the last call is done; raise what it raised, each time."""
        if self._last is not None:
            self._last.result()

    def take_elapsed(self) -> float:
        """Return the seconds of all calls that ended since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def close(self) -> None:
        """Wait for the last call, and end the thread; only `wait` raises the call's error."""
        self._thread.shutdown(wait=True)

    def _run(self, function: Callable[[], Any]) -> None:
        started = self._clock()
        try:
            function()
        finally:
            end_torch_threads()
        self._seconds += self._clock() - started


class Stopwatch:
    """Adds up the seconds of a step's phases, and displays the current one.

    Args:
        show: called with the name of a phase that begins.
        record: called with the name, begin and end of a phase.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        show: Callable[[str], None],
        record: Callable[[str, float, float], None],
    ) -> None:
        self._clock = clock
        self._show = show
        self._record = record

    async def __call__(self, name: str, times: dict[str, float], work: Awaitable[T]) -> T:
        """Await the work and return its result; add its seconds to `times[name]`."""
        self._show(name.replace("_", "-"))
        started = self._clock()
        try:
            return await work
        finally:
            ended = self._clock()
            times[name] = times.get(name, 0.0) + ended - started
            self._record(name, started, ended)


async def until_stopped(
    work: Coroutine[Any, Any, T],
    *,
    stop: asyncio.Event,
    wait_for_fault: Callable[[], Coroutine[Any, Any, None]],
    repair: Callable[[], Awaitable[None]],
) -> T:
    """Await the work and return its result; cancel it and raise StopRequested if `stop` is set."""
    # The policy does not change while we wait, so a dead engine can be restarted with its weights.
    # Requests to that engine then continue.
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
            # raises what the watch raised
            fault.result()
            await repair()
            fault = asyncio.ensure_future(wait_for_fault())
    finally:
        for pending in (task, stopped, fault):
            pending.cancel()
        # Nothing of the work may run on after the caller has continued.
        await asyncio.gather(task, stopped, fault, return_exceptions=True)
