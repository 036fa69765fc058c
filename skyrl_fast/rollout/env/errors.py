"""Errors of environments and agents."""

from __future__ import annotations


class EnvError(RuntimeError):
    """An environment or agent raised, or returned an invalid answer.

    Args:
        trace: the calls in the user's code, as of `trace_of_error`; "" for none.
    """

    def __init__(self, message: object, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class EnvLostError(EnvError):
    """The process or node of an agent was lost."""


class EnvTimeoutError(EnvError):
    """An environment's call did not return in time: its thread is abandoned, its process killed."""
