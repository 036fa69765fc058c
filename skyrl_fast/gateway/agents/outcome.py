"""What an agent returned, checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from skyrl_fast.gateway.messages import Outcome
from skyrl_fast.rollout.env.answers import LARGEST_REWARD
from skyrl_fast.system.printable import shorten

MAX_SHOWN = 100  # characters of a wrong value, in an error


class OutcomeError(ValueError):
    """An agent's reward or metrics are invalid."""


def outcome_of(value: Any) -> Outcome:
    """Return a reward with its metrics.

    Args:
        value: a number; a mapping with `reward` (a number or null), `call_rewards` (by completion
            id) and metrics; or None: what was posted.

    Raises:
        OutcomeError: it is something else, a number is not finite, or a reward not in float32.

    Example:
        >>> outcome_of({"reward": 1, "turns": 3})
        Outcome(reward=1.0, metrics={'turns': 3.0}, call_rewards={}, unless_posted=False)
    """
    if value is None:
        return Outcome()
    if not isinstance(value, Mapping):
        return Outcome(_number("the reward", value, largest=LARGEST_REWARD))
    rest = dict(value)
    reward, calls = rest.pop("reward", None), rest.pop("call_rewards", None)
    if not isinstance(calls, Mapping | None):
        raise OutcomeError(f"call_rewards: expected a mapping, got {_shown(calls)}")
    return Outcome(
        None if reward is None else _number("reward", reward, largest=LARGEST_REWARD),
        {str(name): _number(str(name), number) for name, number in rest.items()},
        {
            str(name): _number("call_rewards", number, largest=LARGEST_REWARD)
            for name, number in (calls or {}).items()
        },
    )


def _number(name: str, value: Any, *, largest: float = sys.float_info.max) -> float:
    try:
        number = float.__float__(float(value))
    except Exception:  # of any type
        number = math.nan
    if isinstance(value, str) or not abs(number) <= largest:
        kind = "float32 number" if largest == LARGEST_REWARD else "number"
        raise OutcomeError(f"{name}: expected a finite {kind}, got {_shown(value)}")
    return number


def _shown(value: Any) -> str:
    try:
        return shorten(repr(value), MAX_SHOWN)
    except Exception:  # of any type
        return f"a {type(value).__name__}"
