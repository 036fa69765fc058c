"""Callbacks after modules have been imported, without importing them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportWatch(MetaPathFinder):
    """Call back with the name of each of these modules after it has run; loaded ones at `start`."""

    def __init__(self, names: Collection[str], callback: Callable[[str], None]) -> None:
        self._names = frozenset(names)
        self._callback = callback

    def start(self) -> None:
        sys.meta_path.insert(0, self)
        for name in sorted(self._names & sys.modules.keys()):
            self._callback(name)

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _CallingLoader(spec.loader, self._callback)
                return spec
        return None


class _CallingLoader(Loader):
    """Wraps a module's own loader, and restores it before the callback is called."""

    def __init__(self, loader: Any, callback: Callable[[str], None]) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
