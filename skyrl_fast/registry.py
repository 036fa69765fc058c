"""Registries: built-in entries by name, registered ones, and `module:function`.

Settings are checked by them, so torch is imported only where a user's function is called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from skyrl_fast.setting import did_you_mean
from skyrl_fast.system.importing import load_object, name_of


class Custom(Protocol):
    """An entry with a user's function."""

    @property
    def function(self) -> Callable[..., object]: ...


BuiltIn = TypeVar("BuiltIn")
Added = TypeVar("Added", bound=Custom)
Function = TypeVar("Function", bound=Callable[..., Any])
Output = TypeVar("Output")


class Registry(Generic[BuiltIn, Added]):
    """Entries of one kind, by name.

    Args:
        what: the kind, for error messages, such as "policy loss".
        built_in: the package's entries, whose names are reserved.
        wrap: returns the entry for a name and a function without declared properties.
    """

    def __init__(
        self,
        what: str,
        built_in: Mapping[str, BuiltIn],
        wrap: Callable[[str, Callable[..., Any]], Added],
    ) -> None:
        self._what = what
        self._built_in = built_in
        self._wrap = wrap
        self._added: dict[str, Added] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All names except `module:function`."""
        return (*self._built_in, *self._added)

    def register(
        self,
        function: Callable[..., Any] | str,
        name: str | None,
        make: Callable[[str, Callable[..., Any]], Added],
    ) -> str | Callable[[Function], Function]:
        """Register a user's function; return the name by which the most processes can find it.

        Args:
            function: or its name: then return a decorator.
            name: None: `module:function`, or the function's name if it cannot be imported. A later
                function of the same name replaces an earlier one.
            make: returns the entry for a name and a function.

        Raises:
            ValueError: the name is that of a built-in entry, or has a colon.
        """
        if not isinstance(function, str):
            return self._add(function, name, make)
        given = function

        def decorate(function: Function) -> Function:
            self._add(function, given, make)
            return function

        return decorate

    def _add(
        self,
        function: Callable[..., Any],
        name: str | None,
        make: Callable[[str, Callable[..., Any]], Added],
    ) -> str:
        importable = importable_name(function)
        type_name = type(function).__name__
        own_name = str(getattr(function, "__name__", type_name))
        chosen = name or importable or own_name
        if chosen in self._built_in or (":" in chosen and chosen != importable):
            wanted = f"a name without a colon other than {', '.join(self._built_in)}"
            raise ValueError(f"{self._what}: expected {wanted}, got {chosen!r}")
        self._added[chosen] = make(chosen, function)
        return importable or chosen

    def find(self, name: str) -> BuiltIn | Added:
        """Return the entry of a name, or of the function named by `module:function`.

        Raises:
            ValueError: an unknown name, a module that cannot be imported, or not a function.
        """
        if name in self._built_in:
            return self._built_in[name]
        if name in self._added:
            return self._added[name]
        if ":" not in name:
            raise ValueError(
                f"expected one of {', '.join(self.names)}, or module:function, got {name!r}"
                f"{did_you_mean(name, self.names)}"
            )
        function = load_object(name)
        if not callable(function):
            raise ValueError(f"expected a function, {name} is {type(function).__name__}")
        declared = []
        for entry in self._added.values():
            if entry.function is function:
                declared.append(entry)
        if declared:
            return declared[-1]
        return self._wrap(name, function)


def importable_name(function: Callable[..., object]) -> str | None:
    """Return the `module:function` name of a function that any process can import, else None.

    Functions of the main script, of a notebook or inside another function have none.
    """
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not _reaches(module, qualname.split("."), function):
        return None
    return f"{name_of(sys.modules[module])}:{qualname}"


def _reaches(module: str, path: Iterable[str], function: object) -> bool:
    found: object = sys.modules.get(module)
    for part in path:
        found = getattr(found, part, None)
    return found is function


def check_settings(name: str, function: Callable[..., object], settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a keyword argument that a user's function does not take."""
    try:
        inspect.signature(function).bind(None, **settings)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def call_function(
    op: str,
    function: Callable[..., Any],
    inputs: object,
    settings: Mapping[str, Any],
    output: type[Output],
) -> Output:
    """Return the output of a user's function, of this type; a tensor counts as its first field.

    Raises:
        RuntimeError: the function raised.
        TypeError: it returned something else.
    """
    import torch

    try:
        result = function(inputs, **settings)
    # Whatever it is: a run must say whose code failed.
    except Exception as error:
        raise RuntimeError(f"{op} raised {type(error).__name__}: {error}") from error
    if isinstance(result, torch.Tensor):
        result = output(result)  # type: ignore[call-arg]
    if not isinstance(result, output):
        got = type(result).__name__
        raise TypeError(f"{op} must return {output.__name__} or a tensor, got {got}")
    return result


def check_result(op: str, name: str, values: object, *shapes: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless a user's values are floats of one of these shapes."""
    import torch

    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        if isinstance(values, torch.Tensor):
            got = str(values.dtype)
        else:
            got = type(values).__name__
        raise TypeError(f"{op}: {name}: expected a floating-point tensor, got {got}")
    if tuple(values.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"{op}: {name}: expected shape {wanted}, got {tuple(values.shape)}")
