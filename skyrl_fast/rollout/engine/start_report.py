"""Lines that show that an engine which starts is alive: its start takes up to minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_fast.system.log_tail import log_tail
from skyrl_fast.system.printable import printable

REPORT_SECONDS = 15.0  # between two lines
MAX_LINE = 120  # characters of a line of the log that are quoted


@contextmanager
def report_start(
    begin: str,
    log: Path | None,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], bool] | None = None,
) -> Iterator[None]:
    """Say what starts in the block, every REPORT_SECONDS that it still does, and when it is ready.

    A thread reports, as a start may block the event loop.

    Args:
        begin: the first line, without "engine: ".
        log: file that the engine writes, of which the last line is quoted if it is new; None: there
            is none.
        say: called with each line, also by the thread.
        clock: seconds.
        wait: waits for so many seconds or for the end of the block, and returns whether that came;
            None: in real time.
    """
    started = clock()
    ended = threading.Event()
    until_ended = wait or ended.wait
    old_bytes = _size(log)  # a resumed run appends to the log

    def report() -> None:
        quoted = ""
        while not until_ended(REPORT_SECONDS):
            line = f"engine: still starting, {clock() - started:.0f} s"
            last = _last_line(log, old_bytes)
            if last != quoted:
                line += f", last line of its log: {last}"
            quoted = last
            say(line)

    say(f"engine: {begin}")
    thread = threading.Thread(target=report, name="engine start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    say(f"engine: ready after {clock() - started:.0f} s")


def _size(log: Path | None) -> int:
    if log is None or not log.is_file():
        return 0
    return log.stat().st_size


def _last_line(log: Path | None, old_bytes: int) -> str:
    """Return the last line that was written after the first `old_bytes`, or ""."""
    if log is None or _size(log) <= old_bytes:
        return ""
    lines = log_tail(log).split("\n")
    written = [line.strip() for line in lines if line.strip()]
    if not written:
        return ""
    return printable(written[-1], MAX_LINE)
