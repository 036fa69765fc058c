"""How a setting is declared: a dataclass field that carries its limits and a line of help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")


class ConfigError(ValueError):
    """A setting that is unknown, mistyped or out of range; the message names its dotted key."""


def setting(
    default: Any,
    help: str = "",
    *,
    choices: Sequence[str] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A dataclass field with limits in its metadata. Lists, dicts and classes become factories."""
    metadata = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
    }
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
