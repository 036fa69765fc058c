"""Where an environment failed or hangs: the calls in it, with file, line and source."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from skyrl_fast.system.printable import MAX_FAILURE, shorten

MAX_FRAMES = 20  # frames of a trace, the innermost ones
_CALLER = Path(__file__).parents[1]  # `rollout`: its handlers and workers call environments

_LIBRARIES = tuple(f'File "{sysconfig.get_path(name)}/' for name in ("stdlib", "platlib"))


def trace_of_error(error: BaseException, *, caller: Path = _CALLER) -> str:
    """Return the calls of the environment's code that ended in the error, the innermost last.

    The lines are those of a Python traceback; "" if the environment's code was not reached.

    Args:
        caller: file or folder of the code that calls the environment.
    """
    # Not error.__traceback__, which a class of the environment may define.
    found: TracebackType | None = BaseException.__dict__["__traceback__"].__get__(error)
    return _text(traceback.extract_tb(found, limit=-MAX_FRAMES), caller)


def trace_of_thread(ident: int | None) -> str:
    """Return the calls of the environment's code that a thread is in now, the innermost last."""
    if ident is None:
        frame = None
    else:
        frame = sys._current_frames().get(ident)
    if frame is None:
        return ""
    return _text(traceback.extract_stack(frame, limit=MAX_FRAMES))


def trace_of_task(task: asyncio.Task[Any]) -> str:
    """Return the calls of the environment's code in which a task waits, the innermost last."""
    frames: list[traceback.FrameSummary] = []
    waiting: Any = task.get_coro()
    while getattr(waiting, "cr_frame", None) is not None:
        frames += traceback.extract_stack(waiting.cr_frame, limit=1)
        waiting = waiting.cr_await
    return _text(traceback.StackSummary.from_list(frames[-MAX_FRAMES:]))


def innermost_place(trace: str) -> str:
    """Return file, line and function of a trace's innermost call that is not in a library.

    Example:
        >>> innermost_place('  File "guess.py", line 7, in step\\n    return 1 / 0\\n')
        'File "guess.py", line 7, in step'
    """
    lines = [line.strip() for line in trace.splitlines()]
    places = [line for line in reversed(lines) if line.startswith('File "')]
    outside = (place for place in places if not place.startswith(_LIBRARIES))
    return next(outside, places[0] if places else "")


def _text(calls: traceback.StackSummary, caller: Path = _CALLER) -> str:
    """Return the calls after the last one of the code that calls environments."""
    files = [Path(call.filename) for call in calls]
    callers = []
    for number, file in enumerate(files):
        if caller in (file, *file.parents):
            callers.append(number)
    if callers:
        inner = calls[callers[-1] + 1 :]
    else:
        inner = calls
    return shorten("".join(traceback.format_list(inner)), MAX_FAILURE)
