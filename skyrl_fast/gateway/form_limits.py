"""Limits of the form that a request may ask for, before its compiler's process gets it.

A form is a schema, a pattern, choices, a grammar or a structural tag. Three caps: its size, its
depth and its counts. How long it takes to compile is measured in that process, which also refuses
what the compiler cannot read; here is refused only what it would read as something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_CHARACTERS = 100_000  # of all keys and texts, and 1 for each value
MAX_DEPTH = 48  # levels of a schema
MAX_COUNT = 10_000  # of characters, items, properties or repetitions
MAX_INTEGER = (1 << 63) - 1  # of the messages to vLLM's engine
REPETITION = re.compile(r"\{(\d*)(?:,(\d*))?\}")
LOOK_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")
_COUNTS = {
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
}
_DATA = {"const", "default", "enum", "examples"}  # keys of a schema whose values are no schemas


class FormError(ValueError):
    """A form is beyond the limits, or cannot be compiled within them."""


def check_form(form: Mapping[str, Any]) -> None:
    """Raise FormError for a form beyond the caps, or that the compiler would misread."""
    for kind, value in form.items():
        _Walk(kind).check(kind, value, depth=0)
        if kind in ("json", "structural_tag") and isinstance(value, str):
            _Walk(kind).check(kind, _parse_json(kind, value), depth=0)
        if kind in ("regex", "grammar"):
            _check_pattern(kind, value)


def _parse_json(kind: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormError(f"{kind}: expected JSON, got {error}") from error


class _Walk:
    """Visits the values of one form, and counts its characters."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._left = MAX_CHARACTERS

    def check(self, place: str, value: Any, *, depth: int, is_data: bool = False) -> None:
        if depth > MAX_DEPTH:
            raise FormError(f"{place:.200}: expected at most {MAX_DEPTH} levels, got more")
        if isinstance(value, str):
            self._count(len(value))
        else:
            self._count(1)
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            got = f"got one of {value.bit_length():,}"
            raise FormError(f"{place:.200}: expected an integer of 64 bits, {got}")
        if isinstance(value, list):
            for number, item in enumerate(value):
                self.check(f"{place}[{number}]", item, depth=depth + 1, is_data=is_data)
        if isinstance(value, Mapping):
            for key, item in value.items():
                self._count(len(key))
                inner = f"{place}.{key}"
                if not is_data:
                    _check_keyword(inner, key, item)
                self.check(inner, item, depth=depth + 1, is_data=is_data or key in _DATA)

    def _count(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            expected = f"expected at most {MAX_CHARACTERS:,} characters"
            raise FormError(f"{self._kind}: {expected}, got more")


def _check_keyword(place: str, key: str, value: Any) -> None:
    """Check what a schema says by this keyword, or a property of that name, which is a schema."""
    if key in _COUNTS and isinstance(value, int | float):
        _check_count(place, value)
    if key == "pattern" and isinstance(value, str):
        _check_pattern(place, value)
    if key == "patternProperties" and isinstance(value, Mapping):
        for pattern in value:
            _check_pattern(place, pattern)
    if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
        raise FormError(f"{place:.200}: expected a place in the schema, got {value!r:.80}")


def _check_pattern(place: str, pattern: Any) -> None:
    if not isinstance(pattern, str):
        raise FormError(f"{place:.200}: expected text, got {type(pattern).__name__}")
    if LOOK_AROUND.search(pattern):
        raise FormError(f"{place:.200}: expected a pattern without look-around")
    for repetition in REPETITION.finditer(pattern):
        for count in repetition.groups():
            if count:
                _check_count(place, float(count))


def _check_count(place: str, count: float) -> None:
    if not 0 <= count <= MAX_COUNT:
        raise FormError(f"{place:.200}: expected at most {MAX_COUNT:,}, got {count:,.0f}")
