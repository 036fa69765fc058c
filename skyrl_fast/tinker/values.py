"""Numbers of a request, checked."""

from __future__ import annotations

import math
from typing import Any

from skyrl_fast.tinker.wire import RefusedCallError


def whole_number(name: str, value: Any, least: int | None, most: int | None) -> int:
    """Return a whole number of a request; RefusedCallError if it is none, or out of range."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    is_inside = is_whole and (least is None or value >= least) and (most is None or value <= most)
    if not is_inside:
        raise RefusedCallError(f"{name}: expected a whole number{_range(least, most)}, got {value}")
    return int(value)


def number(
    name: str, value: Any, least: float, most: float | None = None, *, below: float | None = None
) -> float:
    """Return a finite number of a request; RefusedCallError if it is none, or out of range.

    Args:
        most, below: the largest value, or what it must be smaller than; None: no limit.
    """
    is_number = isinstance(value, int | float) and math.isfinite(value)
    is_inside = is_number and value >= least and (most is None or value <= most)
    if not is_inside or (below is not None and value >= below):
        limits = _range(least, most) if below is None else f" from {least:g} to below {below:g}"
        raise RefusedCallError(f"{name}: expected a number{limits}, got {value}")
    return float(value)


def _range(least: float | None, most: float | None) -> str:
    if least is None:
        return ""
    if most is None:
        return f" of at least {least:g}"
    return f" from {least:g} to {most:g}"
