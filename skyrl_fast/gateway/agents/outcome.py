"""What an agent returned, checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from skyrl_fast.gateway.messages import Outcome
from skyrl_fast.rollout.env.answers import LARGEST_REWARD
from skyrl_fast.system.printable import shorten

_BY_NAME = ("call_rewards", "policy_rewards")
MAX_SHOWN = 100  # characters of a wrong value, in an error


class OutcomeError(ValueError):
    """An agent's reward or metrics are invalid."""


def outcome_of(value: Any) -> Outcome:
    """Return a reward with its metrics.

    Args:
        value: a number; a mapping with `reward` (a number or null), `call_rewards` (by completion
            id), `policy_rewards` (by policy) and metrics; or None: what was posted.

    Raises:
        OutcomeError: it is something else, a number is not finite, or a reward not in float32.

    Example:
        >>> outcome_of({"reward": 1, "turns": 3}).metrics
        {'turns': 3.0}
    """
    if value is None:
        return Outcome()
    if not isinstance(value, Mapping):
        return Outcome(_number("the reward", value, largest=LARGEST_REWARD))
    rest = dict(value)
    reward = rest.pop("reward", None)
    calls, policies = (_rewards(name, rest.pop(name, None)) for name in _BY_NAME)
    return Outcome(
        None if reward is None else _number("reward", reward, largest=LARGEST_REWARD),
        {str(name): _number(str(name), number) for name, number in rest.items()},
        calls,
        policy_rewards=policies,
    )


def _rewards(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping | None):
        raise OutcomeError(f"{name}: expected a mapping, got {_shown(value)}")
    items = (value or {}).items()
    result: dict[str, float] = {}
    for key, number in items:
        result[str(key)] = _number(name, number, largest=LARGEST_REWARD)
    return result


def _number(name: str, value: Any, *, largest: float = sys.float_info.max) -> float:
    try:
        number = float.__float__(float(value))
    except Exception:  # the value may be of any type
        number = math.nan
    if isinstance(value, str) or not abs(number) <= largest:
        kind = "float32 number" if largest == LARGEST_REWARD else "number"
        text = f"{name}: expected a finite {kind}, got {_shown(value)}"
        if name == "metrics":
            text += '; each metric is a key of its own: {"reward": 1.0, "turns": 3}'
        raise OutcomeError(text)
    return number


def _shown(value: Any) -> str:
    try:
        return shorten(repr(value), MAX_SHOWN)
    except Exception:  # the value may be of any type
        return f"a {type(value).__name__}"
