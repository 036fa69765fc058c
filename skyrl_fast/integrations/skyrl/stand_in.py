"""Functions that stand in for SkyRL's, and hand back to SkyRL what is not theirs to decide.

A stand-in treats the inputs that it treats exactly as SkyRL does. For any other (an odd type, a
broken rule, another device) SkyRL's own function is called, so that its result or its error is what
the caller gets. `report()` shows how often that was.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from skyrl_fast.integrations.skyrl.names import BY_NAME, NEWEST, Target
from skyrl_fast.integrations.skyrl.source import fingerprint, used_functions

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])

# What an op raises for input that breaks its rules. SkyRL decides then, usually by an error too.
REFUSALS = (TypeError, ValueError, LookupError, AttributeError, OverflowError)


STANDS_IN_FOR = "_skyrl_fast_stands_in_for"


class NotOursError(Exception):
    """SkyRL's own function must treat this input; the message says why."""


@dataclass(slots=True)
class Counts:
    """How often a stand-in was called, and how often it handed back."""

    calls: int = 0
    handed_back: int = 0
    last_reason: str = ""


class Originals:
    """SkyRL's own functions, by the names of the table, with the labels of their texts."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._labels: dict[str, str | None] = {}
        self.counts: dict[str, Counts] = {}
        self.rules: frozenset[str] = frozenset()  # of mode "fixed", those that are on

    def keep(self, name: str, function: Callable[..., Any], label: str | None) -> None:
        """Remember a function that is about to be replaced."""
        self._functions[name], self._labels[name] = function, label

    def forget(self) -> None:
        """Forget all: they are in their places again."""
        self._functions.clear()
        self._labels.clear()
        self.rules = frozenset()

    def function(self, name: str) -> Callable[..., Any] | None:
        """Return SkyRL's function, imported where it was not yet; None without SkyRL."""
        if name not in self._functions:
            found = find(BY_NAME[name])
            if found is None:
                return None
            self.keep(name, found[1], known_label(BY_NAME[name], found[0], found[1]))
        return self._functions[name]

    def is_known(self, name: str, function: Any) -> bool:
        """Return whether the function is the stand-in, or SkyRL's own of a known text."""
        theirs = self.function(name)
        if theirs is None or self._labels[name] is None:
            return False
        return function is theirs or getattr(function, STANDS_IN_FOR, "") == name

    def label(self, name: str) -> str:
        """Return the label of the text of SkyRL's function, the newest without SkyRL."""
        return (self._labels.get(name) if self.function(name) else None) or NEWEST


ORIGINALS = Originals()


def find(target: Target) -> tuple[Any, Callable[..., Any]] | None:
    """Return the module and SkyRL's function, or None where either is missing."""
    try:
        module = importlib.import_module(target.module)
    except ImportError:
        return None
    owner: Any = module
    for part in target.name.split(".")[:-1]:
        owner = getattr(owner, part, None)
    function = vars(owner).get(target.short_name) if owner is not None else None
    return None if function is None else (module, function)


def known_label(target: Target, module: Any, function: Callable[..., Any]) -> str | None:
    """Return the label of the function's text, None where the text is unknown."""
    try:
        text = fingerprint([function, *used_functions(module, target.uses)])
    except (OSError, TypeError, SyntaxError):
        return None  # no source at hand, as with a function made at run time
    return target.texts.get(text)


def stand_in(name: str, *, renamed: Mapping[str, str] | None = None) -> Callable[..., Any]:
    """Make a function stand in for SkyRL's `name`.

    Args:
        name: of the table.
        renamed: keywords of older texts, and what they are called now.
    """

    def decorate(function: Function) -> Function:
        counts = ORIGINALS.counts.setdefault(name, Counts())

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts.calls += 1
            ours = {(renamed or {}).get(key, key): value for key, value in kwargs.items()}
            try:
                return function(*args, **ours)
            except (NotOursError, *REFUSALS) as reason:
                theirs = ORIGINALS.function(name)
                if theirs is None:
                    raise
                counts.handed_back += 1
                counts.last_reason = f"{type(reason).__name__}: {reason}"
                logger.debug("%s: left to SkyRL: %s", name, counts.last_reason)
            return theirs(*args, **kwargs)

        setattr(call, STANDS_IN_FOR, name)
        return call  # type: ignore[return-value]

    return decorate


def require(condition: bool, reason: str) -> None:
    """Raise `NotOursError` with the reason where the condition does not hold."""
    if not condition:
        raise NotOursError(reason)
