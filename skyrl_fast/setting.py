"""Declaration of settings: dataclass fields with limits and a line of help.

Used by the configuration and the ops, so it imports neither.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from skyrl_fast.errors import RunError
from skyrl_fast.system.printable import shorten

MAX_MESSAGE = 800  # characters of an error; the values of a setting may be of any length
TRAINED_DTYPES = ("auto", "float32", "bfloat16")  # float16 would round gradients to 0
DTYPES = (*TRAINED_DTYPES, "float16")


class EnvironmentValue(str):
    """A string from an environment variable, which may be secret: not written to any file.

    Args:
        written: its text in the settings, such as "${oc.env:API_KEY}".
    """

    written: str

    def __new__(cls, value: str, written: str) -> EnvironmentValue:
        result = super().__new__(cls, value)
        result.written = written
        return result

    def __reduce__(self) -> tuple[type[EnvironmentValue], tuple[str, str]]:
        return EnvironmentValue, (str(self), self.written)

    def __repr__(self) -> str:
        return repr(self.written)


class ConfigError(RunError, ValueError):
    """A setting that is unknown, mistyped or out of range; the message names its dotted key.

    The message is one line, and cut if it is very long.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        line = " ".join(part.strip() for part in message.splitlines())
        super().__init__(shorten(line, MAX_MESSAGE))


def setting(
    default: Any,
    help: str = "",
    *,
    choices: Sequence[str] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    finite: bool = False,
) -> Any:
    """Return a dataclass field with help and limits in its metadata.

    Lists, dicts and classes become default factories.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "finite": finite,
    }
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def limit_error(limits: Mapping[str, Any], value: Any) -> str | None:
    """Return the error of a value, such as "expected at least 0, got -1"; None if it is valid.

    Args:
        limits: the metadata of a field from `setting`.
        value: None is always valid.
    """
    if value is None:
        return None
    choices = limits.get("choices")
    if choices is not None:
        for item in value if isinstance(value, list) else [value]:
            if item not in choices:
                meant = did_you_mean(item, choices)
                return f"expected one of {', '.join(choices)}, got {item!r}{meant}"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    at_least = limits.get("at_least")
    above = limits.get("above")
    at_most = limits.get("at_most")
    if value != value:
        return "expected a number, got nan"
    if limits.get("finite") and value in (math.inf, -math.inf):
        return f"expected a finite number, got {value}"
    if at_least is not None and value < at_least:
        return f"expected at least {at_least}, got {value}"
    if above is not None and value <= above:
        return f"expected more than {above}, got {value}"
    if at_most is not None and value > at_most:
        return f"expected at most {at_most}, got {value}"
    return None


def tools_error(tools: Any) -> str | None:
    """Return what is wrong with the tools of a chat template, or None."""
    is_list = isinstance(tools, list | tuple) and all(isinstance(t, Mapping) for t in tools)
    if tools is None or is_list:
        return None
    return f"expected a list of mappings (JSON schemas of functions), got {tools!r}"


_MEANT = {"gpu": "cuda", "ppo": "regular"}  # names of other trainers, whose nearest one misleads


def did_you_mean(given: Any, known: Sequence[str]) -> str:
    """Return a hint with the closest known name, or "".

    Example:
        >>> did_you_mean("gropo", ["grpo", "rloo"])
        " (did you mean 'grpo'?)"
    """
    meant = _MEANT.get(str(given))
    near = [meant] if meant in known else difflib.get_close_matches(str(given), known, n=1)
    if near:
        return f" (did you mean {near[0]!r}?)"
    return ""
