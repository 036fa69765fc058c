"""Event loop of the trainer, in a script or a notebook, with handling of signals to stop."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from skyrl_fast.system.event_loop import run_coroutine

T = TypeVar("T")

STANDARD_STREAMS = (0, 1, 2)


class StopSignals:
    """Forwards SIGINT, SIGTERM and SIGHUP to a coroutine, whatever thread its loop runs in.

    A process that was started with SIGHUP ignored, as by nohup, keeps ignoring it.

    Example:
        signals = StopSignals()
        with signals.install():
            ...  # a signal raises here
            signals.run(work())  # which calls signals.handle_by(...)
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None
        self._task: asyncio.Task[Any] | None = None
        self._handle: Callable[[int], None] | None = None
        self._early: int | None = None  # a signal received before there was a handler
        self._forwarded: int | None = None  # by another process before there was a handler
        self._terminals: list[int] = []
        self._received = False

    def is_stopping(self) -> bool:
        """Return whether a signal has been received, also one that is not handled yet."""
        return self._received

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in a new event loop and return its result.

        If this thread already runs an event loop, as in a notebook, the new one runs in another
        thread and this call blocks until it ends.

        Raises:
            KeyboardInterrupt, SystemExit: a signal was received before `handle_by`.
        """
        try:
            return run_coroutine(self._main(work))
        except BaseException:  # such as that of an engine that ended with the signal
            if self._early is None:
                raise
            # Not raised in the coroutine: asyncio would log an exception that was never retrieved.
            raise _stop(self._early) from None

    def handle_by(self, handle: Callable[[int], None]) -> None:
        """Call `handle(number)` in the event loop's thread from now on."""
        self._handle = handle
        if self._forwarded is not None:
            handle(self._forwarded)

    def forward(self, number: int) -> None:
        """Handle a signal that another process received, not before `handle_by` is called."""
        self._received = True
        if self._loop is not None and self._handle is not None:
            self._loop.call_soon_threadsafe(self._handle, number)
        else:
            self._forwarded = number

    async def _main(self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        try:
            return await work
        finally:
            self._loop = None

    @contextmanager
    def install(self) -> Iterator[None]:
        """Receive signals in the context; before `run` and after it they raise."""
        if threading.current_thread() is not threading.main_thread():  # only it may set handlers
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        # nohup: the run is to outlive its terminal.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._terminals = [stream for stream in STANDARD_STREAMS if os.isatty(stream)]
        before = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _frame: Any) -> None:
        self._received = True
        if number == signal.SIGHUP:
            discard_output(self._terminals)
        loop = self._loop
        if loop is not None and self._handle is not None:
            loop.call_soon_threadsafe(self._handle, number)
            return
        # Not only in the loop: an engine that starts blocks it for minutes.
        self._early = number
        if loop is not None:
            loop.call_soon_threadsafe(self._cancel)
            # The loop runs in another thread, where an exception raised here would not arrive.
            if self._thread != threading.get_ident():
                for child in multiprocessing.active_children():
                    child.kill()  # what the other thread waits for
                return
        raise _stop(number)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def discard_output(streams: Sequence[int]) -> None:
    """Discard further output to a terminal, which is closed: writing to it would fail.

    Args:
        streams: descriptors of the terminal.
    """
    for stream in streams:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, stream)
        os.close(nowhere)


def _stop(number: int) -> BaseException:
    """Return the exception that ends the process as the signal does."""
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return SystemExit(128 + number)
