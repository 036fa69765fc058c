"""One JSON line: strict, safe for a terminal, the same to every reader of JSON lines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DECIMALS = 6  # of log-probabilities and advantages: about what a float32 near -8 resolves
_NUMBERS = {int, float, type(None)}
_MAX_INT = 2**53  # beyond it a reader with doubles only sees another number

# Control characters, line separators, what changes the direction of text, and what has no width:
# as JSON escapes they mean the same and can neither break a line nor deceive a reader's eye.
_UNSEEN = re.compile(
    "[\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def encode_line(record: Mapping[str, Any]) -> str:
    r"""Return the record as one line of JSON, newline included.

    A lone surrogate, which no UTF-8 file can hold, is written as the six characters `\udc80`.
    A number that is not finite is null. What JSON has no form for is written as `str` gives it.

    Example:
        >>> encode_line({"text": "a\u2028b", "reward": float("nan")})
        '{"text":"a\\u2028b","reward":null}\n'
    """
    text = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSEEN.sub(lambda found: json.dumps(found[0])[1:-1], text) + "\n"


def storable(text: str) -> str:
    """Return the text as a file can hold it: each lone surrogate as six characters."""
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def rounded(values: np.ndarray | Sequence[float]) -> list[float | None]:
    """Return the numbers with DECIMALS decimals; None where one is not finite."""
    numbers = np.round(np.asarray(values, dtype=np.float64), DECIMALS) + 0.0  # no -0.0
    finite = np.isfinite(numbers)
    if finite.all():
        return numbers.tolist()
    return [x if good else None for x, good in zip(numbers.tolist(), finite, strict=True)]


def _is_plain(values: Sequence[Any]) -> bool:
    """Whether these are numbers that JSON takes as they are; quick, for the long lists."""
    return set(map(type, values)) <= _NUMBERS and all(
        value is None or -_MAX_INT <= value <= _MAX_INT for value in values
    )


def _plain(value: Any) -> Any:
    """The value in JSON's own types."""
    if isinstance(value, str):
        return storable(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, int):
        return value if abs(value) <= _MAX_INT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {storable(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if _is_plain(value):
            return list(value)
        return [_plain(item) for item in value]
    return storable(str(value))
