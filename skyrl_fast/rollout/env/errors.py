"""Errors of environments and agents."""

from __future__ import annotations


class EnvError(RuntimeError):
    """An environment or agent raised, or returned an invalid answer."""


class EnvLostError(EnvError):
    """The process or node of an agent was lost."""


class EnvTimeoutError(EnvError):
    """An environment's call did not return in time: its thread is abandoned, its process killed."""
