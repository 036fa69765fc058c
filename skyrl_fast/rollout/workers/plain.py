"""Plain data from what an environment returns, without trusting its objects.

The code of an environment's objects (`__float__`, `__str__`, `keys`, ...) runs only here, in the
environment's thread or process. What comes out are new objects of exactly the types None, bool,
int, float, str, list and dict with str keys: JSON can hold them, and no code of the environment
runs when they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64  # levels of lists in lists; more is an error, as is a list within itself
MAX_VALUES = 100_000  # values of one answer, with its keys
MAX_BITS = 1_024  # bits of an integer, as of the largest float


class PlainData:
    """Converts the values of one answer.

    Args:
        longest_text: characters of all its texts together; what is longer is cut.
        unknown_as_text: whether an object of another type becomes its `str`; else it is an error.
    """

    def __init__(self, longest_text: int, *, unknown_as_text: bool = False) -> None:
        self._characters_left = longest_text
        self._values_left = MAX_VALUES
        self._unknown_as_text = unknown_as_text

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return the value as plain data.

        Raises:
            TypeError: it holds an object of another type.
            ValueError: it is nested too deeply, has too many values, or too large an integer.
        """
        self._values_left -= 1
        if depth > MAX_DEPTH or self._values_left < 0:
            raise ValueError(
                f"expected at most {MAX_DEPTH} levels and {MAX_VALUES:,} values, got more"
            )
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, int):
            if int.bit_length(value) > MAX_BITS:
                raise ValueError(f"expected integers of at most {MAX_BITS} bits, got a larger one")
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, Mapping):
            return {
                self.text(key if isinstance(key, str) else str(key)): self.of(item, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.of(item, depth + 1) for item in value]
        if callable(getattr(value, "tolist", None)):  # numbers of NumPy and torch
            return self.of(value.tolist(), depth + 1)
        if self._unknown_as_text:
            return self.text(str(value))
        raise TypeError(
            "expected texts, numbers, truth values, None, lists and mappings, got "
            f"{type(value).__name__}"
        )

    def text(self, value: str) -> str:
        """Return the text as a `str`, cut where the answer's texts are too long together."""
        cut = str.__getitem__(value, slice(self._characters_left))
        self._characters_left -= len(cut)
        return str.__str__(cut)


def type_name(value: Any) -> str:
    return plain_text(type(value).__name__)


def plain_text(value: Any, limit: int = 200) -> str:
    """Return the value's `str`, cut, or a note if it has none."""
    try:
        return str.__str__(str.__getitem__(str(value), slice(limit)))
    except BaseException:
        return "(its text cannot be read)"


def plain_repr(value: Any, limit: int = 200) -> str:
    """Return the value's `repr`, cut, or the name of its type if it has none."""
    try:
        return str.__str__(str.__getitem__(repr(value), slice(limit)))
    except BaseException:
        return f"a {type_name(value)}"
