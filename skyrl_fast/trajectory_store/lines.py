"""One JSON line: strict, safe for a terminal, the same to every reader of JSON lines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DECIMALS = 6  # of log-probabilities and advantages: about what a float32 near -8 resolves
_MAX_INT = 2**53  # beyond it a reader with doubles only sees another number

# Control characters, line separators, what changes the direction of text, and what has no width:
# as JSON escapes they mean the same and can neither break a line nor deceive a reader's eye.
# Lone surrogates too: no UTF-8 file can hold one.
_UNSEEN = re.compile(
    "[\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
)


def encode_line(record: Mapping[str, Any]) -> str:
    r"""Return the record as one line of JSON, newline included.

    A lone surrogate, which no UTF-8 file can hold, is written as the six characters `\udc80`.

    Args:
        record: of any text, and of numbers that JSON has; `plain` makes others so.

    Raises:
        ValueError, TypeError: a number is not finite, a value has no form in JSON.

    Example:
        >>> encode_line({"text": "a\u2028b", "reward": plain(float("nan"))})
        '{"text":"a\\u2028b","reward":null}\n'
    """
    text = _JSON.encode(record)
    if not text.isascii() or "\x7f" in text:
        text = _UNSEEN.sub(_escape, text)
    return text + "\n"


def _escape(found: re.Match[str]) -> str:
    # storable() first: the backslash that it gives a lone surrogate is then escaped itself.
    return json.dumps(storable(found[0]))[1:-1]


def storable(text: str) -> str:
    """Return the text as a file can hold it: each lone surrogate as six characters."""
    if text.isascii():
        return text
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def rounded(values: np.ndarray | Sequence[float]) -> list[float | None]:
    """Return the numbers with DECIMALS decimals; None where one is not finite."""
    numbers = np.asarray(values, dtype=np.float64).round(DECIMALS) + 0.0  # no -0.0
    if math.isfinite(numbers.dot(numbers)):  # as all of them are then; the usual case, quickly
        return numbers.tolist()
    return [x if math.isfinite(x) else None for x in numbers.tolist()]


def plain(value: Any) -> Any:
    """Return what an environment gave as values that JSON has.

    A number that is not finite is None; what JSON has no form for, and an integer that a double
    cannot hold, are as `str` gives them.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, np.floating):  # a long double's item is a long double
        return plain(float(value))
    if isinstance(value, np.generic):
        item = value.item()
        return str(item) if isinstance(item, np.generic) else plain(item)
    if isinstance(value, int):
        return value if abs(value) <= _MAX_INT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)
