"""Whether the main script runs code that the processes it starts would run again."""

from __future__ import annotations

import ast
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

# A script that asks for one of these may know that it is imported by a process.
_QUESTIONS = frozenset(("__name__", "parent_process", "current_process"))


class Place(NamedTuple):
    """A line of a file."""

    file: str
    line: int


def find_unguarded_call(main: ModuleType | None = None) -> Place | None:
    """Return the line of the main script that led here, if its import would lead here, too.

    Processes that are spawned import the main script under another `__name__`. None: no line at its
    top level is running, it is below an `if __name__ == "__main__":`, or the script is never
    imported, as that of a notebook or of `python -m package`.

    Args:
        main: None: the main module of this process.
    """
    main = main or sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    name = getattr(spec, "name", "")
    if file is None or name.rpartition(".")[2] == "__main__":
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is vars(main) and frame.f_code.co_name == "<module>":
            if runs_on_import(Path(file), frame.f_lineno):
                return Place(file, frame.f_lineno)
            return None
        frame = frame.f_back
    return None


def runs_on_import(file: Path, line: int) -> bool:
    """Return whether a line at the top level of a script runs also where it is imported."""
    with suppress(OSError, SyntaxError, ValueError):
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.If | ast.Match) and _asks(statement):
                # Of a guard, or one that leaves the script before the line.
                return False
            if statement.lineno <= line <= (statement.end_lineno or line):
                return True
    return False


def _asks(statement: ast.If | ast.Match) -> bool:
    """Return whether the branch of a statement depends on how the script was started."""
    if isinstance(statement, ast.If):
        condition: ast.expr = statement.test
    else:
        condition = statement.subject
    for node in ast.walk(condition):
        if getattr(node, "id", None) in _QUESTIONS:
            return True
        if getattr(node, "attr", None) in _QUESTIONS:
            return True
    return False
