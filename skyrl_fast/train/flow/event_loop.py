"""Event loop of the trainer, in a script or a notebook, with handling of SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class StopSignals:
    """Forwards SIGINT and SIGTERM to a coroutine, whatever thread its event loop runs in."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._handle: Callable[[int], None] | None = None
        self._early: int | None = None  # a signal received before there was a handler

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in a new event loop and return its result.

        If this thread already runs an event loop, as in a notebook, the new one runs in another
        thread and this call blocks until it ends.

        Raises:
            KeyboardInterrupt, SystemExit: a signal was received before `handle_by`.
        """
        with self._installed():
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return asyncio.run(self._main(work))
            with ThreadPoolExecutor(1, thread_name_prefix="train") as thread:
                return thread.submit(asyncio.run, self._main(work)).result()

    def handle_by(self, handle: Callable[[int], None]) -> None:
        """Call `handle(number)` in the event loop's thread from now on."""
        self._handle = handle

    async def _main(self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        try:
            return await work
        except asyncio.CancelledError:
            if self._early is None:
                raise
            if self._early == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + self._early) from None
        finally:
            self._loop = None

    @contextmanager
    def _installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only it may set handlers
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _frame: Any) -> None:
        loop = self._loop
        if loop is None:  # not running yet, or over
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(self._take, number)

    def _take(self, number: int) -> None:
        if self._handle is not None:
            self._handle(number)
        elif self._task is not None:
            self._early = number
            self._task.cancel()
