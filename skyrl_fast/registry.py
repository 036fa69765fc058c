"""Tables by name that users add to: built-in entries, registered ones, and `module:function`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from skyrl_fast.importing import load_object, name_of
from skyrl_fast.setting import did_you_mean


class Custom(Protocol):
    """An entry that is a user's function."""

    @property
    def function(self) -> Callable[..., object]:
        """The user's."""
        ...


BuiltIn = TypeVar("BuiltIn")
Added = TypeVar("Added", bound=Custom)


class Registry(Generic[BuiltIn, Added]):
    """Entries of one kind by their names.

    Args:
        what: names the kind in errors, such as "policy loss".
        built_in: the package's own entries; their names cannot be taken.
        wrap: makes an entry of a name and a function that declares nothing.
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
        """All names but those of `module:function`."""
        return (*self._built_in, *self._added)

    def add(
        self, function: Callable[..., Any], name: str | None, make: Callable[[str], Added]
    ) -> str:
        """Let a name mean a user's function; return the name by which most processes find it.

        Args:
            name: None: `module:function`, or the function's own name where nothing can import it.
                The last function under a name counts.
            make: makes the entry of a name.

        Raises:
            ValueError: the name is a built-in one, or has a colon.
        """
        reached = importable_name(function)
        chosen = name or reached or str(getattr(function, "__name__", type(function).__name__))
        if chosen in self._built_in or (":" in chosen and chosen != reached):
            wanted = f"a name without a colon other than {', '.join(self._built_in)}"
            raise ValueError(f"{self._what}: wanted {wanted}, got {chosen!r}")
        self._added[chosen] = make(chosen)
        return reached or chosen

    def find(self, name: str) -> BuiltIn | Added:
        """Return the entry of a name, or that of the function that `module:function` names.

        Raises:
            ValueError: an unknown name, a module that cannot be imported, or no function there.
        """
        if name in self._built_in:
            return self._built_in[name]
        if name in self._added:
            return self._added[name]
        if ":" not in name:
            raise ValueError(
                f"wanted one of {', '.join(self.names)}, or module:function, got {name!r}"
                f"{did_you_mean(name, self.names)}"
            )
        function = load_object(name)
        if not callable(function):
            raise ValueError(f"wanted a function, {name} is {type(function).__name__}")
        declared = [entry for entry in self._added.values() if entry.function is function]
        return declared[-1] if declared else self._wrap(name, function)


def importable_name(function: Callable[..., object]) -> str | None:
    """Return the `module:function` by which any process finds a function; None if there is none.

    A function of the main script, of a notebook or inside another function has none.
    """
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not _reaches(module, qualname.split("."), function):
        return None
    return f"{name_of(sys.modules[module])}:{qualname}"


def _reaches(module: str, path: Iterable[str], function: object) -> bool:
    found: object = sys.modules.get(module)
    for part in path:
        found = getattr(found, part, None)
    return found is function
