"""Encoding of one JSON line: strict JSON, safe to print, one line to every JSON-lines reader."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from skyrl_fast.system.printable import INVISIBLE

DECIMALS = 6  # digits of log-probabilities and advantages: a float32's near -8
_MAX_INT = 2**53  # a reader that parses numbers as doubles rounds larger integers

# As JSON escapes they mean the same, and can neither break a line nor mislead a reader. Other
# control characters JSON escapes by itself; lone surrogates UTF-8 cannot encode.
_INVISIBLE = re.compile(f"[{INVISIBLE}]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
)


def encode_line(record: Mapping[str, Any]) -> str:
    r"""Return the record as one line of JSON, including the newline.

    A lone surrogate, which UTF-8 cannot encode, is written as six characters: `\udc80`.

    Args:
        record: any text, and numbers that JSON can represent; `json_value` converts others.

    Raises:
        ValueError: a number is not finite.
        TypeError: a value cannot be represented in JSON.

    Example:
        >>> encode_line({"text": "a\u2028b", "reward": json_value(float("nan"))})
        '{"text":"a\\u2028b","reward":null}\n'
    """
    text = _JSON.encode(record)
    if not text.isascii() or "\x7f" in text:
        text = _INVISIBLE.sub(_escape, text)
    return text + "\n"


def _escape(match: re.Match[str]) -> str:
    # escape_surrogates() first, so that the backslash it inserts is escaped in turn.
    return json.dumps(escape_surrogates(match[0]))[1:-1]


def escape_surrogates(text: str) -> str:
    r"""Return the text with each lone surrogate as six characters, such as `\udc80`."""
    if text.isascii():
        return text
    return _LONE_SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def round_decimals(values: np.ndarray | Sequence[float]) -> list[float | None]:
    """Return the numbers rounded to DECIMALS decimals; None for those that are not finite."""
    numbers = np.asarray(values, dtype=np.float64).round(DECIMALS) + 0.0  # no -0.0
    if math.isfinite(numbers.dot(numbers)):  # then all are: a fast path for the usual case
        return numbers.tolist()
    result: list[float | None] = []
    for x in numbers.tolist():
        result.append(x if math.isfinite(x) else None)
    return result


def json_value(value: Any) -> Any:
    """Convert a value from an environment to one that JSON can represent.

    A number that is not finite becomes None. An integer that a double cannot hold, and a value of
    any other type, become their `str`.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, np.floating):  # item() of a long double is a long double
        return json_value(float(value))
    if isinstance(value, np.generic):
        item = value.item()
        if isinstance(item, np.generic):
            return str(item)
        return json_value(item)
    if isinstance(value, int):
        if abs(value) <= _MAX_INT:
            return value
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return str(value)
