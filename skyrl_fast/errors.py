"""The base of errors that end a run or a command."""

from __future__ import annotations


class RunError(RuntimeError):
    """A run or a command ends; the message says why, without a traceback.

    `exit_code` is the command line's: 1 where it failed, 2 where it could not begin.
    """

    exit_code = 1
