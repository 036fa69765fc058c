"""Replacements of SkyRL's functions, with SkyRL's own function as the fallback.

A replacement handles an input exactly as SkyRL does, or not at all. For unsupported input (another
type, a broken rule, another device) SkyRL's own function is called, so that the caller gets its
result or its error. `report()` counts these calls.

Design: docs/design/017-skyrl-drop-in.md.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from skyrl_fast.integrations.calls import Counts
from skyrl_fast.integrations.skyrl.names import BY_NAME, NEWEST, PACKAGE, Target
from skyrl_fast.integrations.source import fingerprint_with_calls

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])

# What an op raises for input that breaks its rules. SkyRL's function is called, and usually raises.
REFUSALS = (TypeError, ValueError, LookupError, AttributeError, OverflowError)


class UnsupportedInputError(Exception):
    """SkyRL's own function must handle this input; the message says why."""


class Originals:
    """SkyRL's own functions by their names in the table, with the versions of their sources."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._labels: dict[str, str | None] = {}
        self.counts: dict[str, Counts] = {}

    def keep(self, name: str, function: Callable[..., Any], label: str | None) -> None:
        self._functions[name] = function
        self._labels[name] = label

    def forget(self) -> None:
        self._functions.clear()
        self._labels.clear()

    def function(self, name: str) -> Callable[..., Any] | None:
        """Return SkyRL's function, importing it if needed; None without SkyRL."""
        if name not in self._functions:
            found = find(BY_NAME[name])
            if found is None:
                return None
            self.keep(name, found[1], version_label(BY_NAME[name], found[1]))
        return self._functions[name]

    def require(self, name: str) -> Callable[..., Any]:
        """Return SkyRL's function; raise UnsupportedInputError without SkyRL."""
        original = self.function(name)
        if original is None:
            raise UnsupportedInputError(f"SkyRL, whose {name} is called, is not installed")
        return original

    def namespace(self, name: str) -> dict[str, Any]:
        """Return the globals of SkyRL's function; raise as `require`."""
        found: dict[str, Any] = inspect.unwrap(self.require(name)).__globals__
        return found

    def is_known(self, name: str, function: Any) -> bool:
        """Return whether the function is a replacement, or SkyRL's own with a known source."""
        original = self.function(name)
        if original is None or self._labels[name] is None:
            return False
        home = getattr(function, "__module__", None) or ""
        return function is original or home.startswith(f"{__package__}.")

    def label(self, name: str) -> str:
        """Return the first version with this source of SkyRL's function; NEWEST without SkyRL."""
        return (self._labels.get(name) if self.function(name) else None) or NEWEST


ORIGINALS = Originals()


def find(target: Target) -> tuple[Any, Callable[..., Any]] | None:
    try:
        module = importlib.import_module(target.module)
    except Exception as error:  # any error of an import, such as pydantic's on an older Python
        logger.debug("%s: %s: %s", target.module, type(error).__name__, error)
        return None
    owner: Any = module
    for part in target.name.split(".")[:-1]:
        owner = getattr(owner, part, None)
    if owner is not None:
        function = vars(owner).get(target.short_name)
    else:
        function = None
    if function is None:
        return None
    return (module, function)


def version_label(target: Target, function: Callable[..., Any]) -> str | None:
    """Return the first version with the function's source, None if the source is unknown."""
    return target.fingerprints.get(target_fingerprint(function))


def target_fingerprint(function: Callable[..., Any]) -> str:
    """Return the fingerprint of a function with those of SkyRL's that it calls.

    Other functions of the table are left out: `Target.calls` names those that matter.
    """
    return fingerprint_with_calls([function], PACKAGE, skip=BY_NAME)


def replaces(name: str, *, renamed: Mapping[str, str] | None = None) -> Callable[..., Any]:
    """Make a function replace SkyRL's `name`; `renamed` maps older versions' keywords to ours."""

    def decorate(function: Function) -> Function:
        counts = ORIGINALS.counts.setdefault(name, Counts())

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts.calls += 1
            current = {}
            for key, value in kwargs.items():
                current[(renamed or {}).get(key, key)] = value
            try:
                _require_known_calls(name)
                return function(*args, **current)
            except (UnsupportedInputError, *REFUSALS) as reason:
                original = ORIGINALS.function(name)
                if original is None:
                    raise
                counts.hand_back(f"{type(reason).__name__}: {reason}")
                logger.debug("%s: passed to SkyRL: %s", name, counts.last_reason)
            return original(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _require_known_calls(name: str) -> None:
    """Raise if a function that SkyRL's `name` calls is of unknown source now, or a user's."""
    for callee in BY_NAME[name].calls if name in BY_NAME else ():
        require(is_known_now(callee), f"another {callee}")


def is_known_now(name: str) -> bool:
    """Return whether SkyRL's module has no other function of this name than a known one."""
    found = find(BY_NAME[name])
    return found is None or ORIGINALS.is_known(name, found[1])


def require(condition: bool, reason: str) -> None:
    """Raise `UnsupportedInputError` with the reason unless the condition holds."""
    if not condition:
        raise UnsupportedInputError(reason)
