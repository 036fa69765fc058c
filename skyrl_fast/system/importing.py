"""Import modules, Python files and objects by the names given in settings."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from os.path import expanduser
from pathlib import Path
from types import ModuleType
from typing import Any

FILE_PREFIX = "skyrl_fast_file_"  # prefix of modules imported from files


def load_module(name: str) -> ModuleType:
    """Return a module by its import path or .py file, imported once; a ValueError says why not."""
    try:
        if name.endswith(".py"):
            return _load_file(name)
        return importlib.import_module(name)
    except Exception as error:
        is_file_here = isinstance(error, ModuleNotFoundError) and Path(f"{name}.py").is_file()
        if is_file_here:
            hint = f"; for the file of the current folder write {name}.py"
        else:
            hint = ""
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot import {name!r}: {cause}{hint}") from error


def load_object(name: str) -> Any:
    """Return the object named "package.module:name" or "path/to/file.py:name".

    Raises:
        ValueError: there is no such module or no such name in it; the module raises.

    Example:
        >>> load_object("math:sqrt")(4.0)
        2.0
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"expected module:name, got {name!r}")
    found: Any = load_module(place)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{place!r} has no {attribute!r}")
        found = getattr(found, part)
    return found


def absolute_name(name: str, folder: Path) -> str:
    """Return the name with an absolute path, if it names a .py file or an object in one.

    Args:
        folder: where a relative path begins; the current folder may have been changed.

    Example:
        >>> absolute_name("envs/guess.py:Guess", Path("/home/me"))
        '/home/me/envs/guess.py:Guess'
    """
    place, colon, attribute = name.rpartition(":")
    file = place if colon else name
    if not file.endswith(".py"):
        return name
    path = str(folder.absolute() / Path(expanduser(file)))
    if colon:
        return f"{path}{colon}{attribute}"
    return path


def name_of(module: ModuleType) -> str:
    """Return the name by which `load_module` finds a module: its import path or its file."""
    if module.__name__.startswith(FILE_PREFIX):
        return str(module.__file__)
    return module.__name__


def find_hidden_package(folder: str | Path, pattern: str) -> Path | None:
    """Return the folder of a package of this name that stands later on `sys.path`, or None.

    Args:
        folder: the imported package, such as that of a source tree.
        pattern: of a file that the other one has.
    """
    folder = Path(folder).resolve()
    for entry in sys.path:
        other = Path(entry, folder.name).resolve()
        # An editable installation has the compiled files alone.
        is_complete = (other / "__init__.py").is_file() and any(other.glob(pattern))
        if other != folder and is_complete:
            return other
    return None


def _load_file(name: str) -> ModuleType:
    path = Path(expanduser(name)).resolve()
    module_name = f"{FILE_PREFIX}{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"no Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def load_setting_function(setting: str, name: str | None) -> Any:
    """Return the function that a setting names, or None if it names none.

    Raises:
        ValueError: there is none of this name, or it is no function; the message names the setting.
    """
    if name is None:
        return None
    try:
        function = load_object(name)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error
    if not callable(function):
        raise ValueError(f"{setting}: expected a function, got {function!r:.100}")
    return function
