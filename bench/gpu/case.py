"""A timed case: one contender's call, with its floor and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OURS = "skyrl_fast"


@dataclass(slots=True)
class Case:
    """One row of a table: a contender's call, and its untimed preparation."""

    group: str
    contender: str
    call: Callable[[], object]
    floor_bytes: float  # read and written in the device's memory
    prepare: Callable[[], object] = lambda: None
    check: Callable[[], float] | None = None  # returns the error of the result, before timing
    bus_bytes: float = 0.0  # sent to the device
    details: dict[str, Any] = field(default_factory=dict)


def within(error: float, tolerance: float) -> float:
    """Return the error; raise if it is too large or NaN."""
    if not error <= tolerance:
        raise ValueError(f"wrong by {error:.3g}")
    return error
