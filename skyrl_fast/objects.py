"""Python objects that settings name: `module:name`, or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def is_object_name(text: str) -> bool:
    """Return whether a setting names a Python object.

    Example:
        >>> is_object_name("my_package.my_module:MyLogger"), is_object_name("wandb")
        (True, False)
    """
    return ":" in text


def import_object(name: str, *, key: str) -> Any:
    """Return the object that `module:name` or `file.py:name` stands for.

    Args:
        name: import path or file of a module, a colon, and a name in it.
        key: the setting, for the error.

    Raises:
        ValueError: the module cannot be imported, or lacks the name.
    """
    module_name, _, attribute = name.rpartition(":")
    module = import_module(module_name, key=key)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"{key}: {module_name} has no {attribute!r}") from None


def import_module(name: str, *, key: str) -> ModuleType:
    """Return a module by its import path, or by its .py file; a file is run once per process.

    Raises:
        ValueError: it is missing or raises; names setting, module and error.
    """
    try:
        return _file_module(name) if name.endswith(".py") else importlib.import_module(name)
    except Exception as error:
        raise ValueError(
            f"{key}: cannot import {name!r}: {type(error).__name__}: {error}"
        ) from error


def _file_module(name: str) -> ModuleType:
    path = Path(name).expanduser().resolve()
    module_name = f"skyrl_fast_file_{path.stem}_{abs(hash(str(path)))}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
