"""Installing and uninstalling the replacements of SkyRL's functions.

A function is replaced in every loaded module, class or registry of SkyRL's that refers to it;
modules loaded later find the replacement in the defining module.

Design: docs/design/017-skyrl-drop-in.md.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import platform
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

from skyrl_fast.config.loading import environment_setting
from skyrl_fast.integrations.calls import Counts, Report, Row, print_at_exit, summary
from skyrl_fast.integrations.on_import import ImportWatch
from skyrl_fast.integrations.skyrl import ray_workers, worker_calls
from skyrl_fast.integrations.skyrl.names import (
    BY_NAME,
    GYM_GENERATOR,
    HEAVY,
    KEPT,
    PACKAGE,
    PPO,
    TARGETS,
    TRAINER,
    Target,
)
from skyrl_fast.integrations.skyrl.replacement import (
    ORIGINALS,
    find,
    is_known_now,
    version_label,
)
from skyrl_fast.integrations.source import UNKNOWN_SOURCE, strip_decorators
from skyrl_fast.system.printable import printable

logger = logging.getLogger(__name__)
OURS = "skyrl_fast"
HOST = "SkyRL"
MODES = ("compat",)
REGISTRIES = ("AdvantageEstimatorRegistry", "PolicyLossRegistry")
# Loaded by `install`, so that what they bind is replaced: SkyRL's trainer and its generator.
ENTRY_MODULES = (TRAINER, GYM_GENERATOR)
OFF = ("", "0", "off", "false")  # values of the variable

_installed: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # original, replacement
_registered: dict[tuple[str, str], Callable[..., Any]] = {}  # original, by registry and entry
_held: set[tuple[str, str]] = set()  # names that referred to our function before the installation
_report = Report(HOST)
_watch: ImportWatch | None = None


class SkyRLFastWarning(UserWarning):
    """Some of SkyRL's functions could not be replaced; the message names them."""


def install(mode: str = "compat", *, ray_workers: bool = True) -> Report:
    """Replace SkyRL's functions by this package's, in this process and in its Ray workers.

    Installing again changes nothing; another `ray_workers` replaces the previous one.

    Args:
        mode: "compat", the only one: the same results as SkyRL's, including errors.
        ray_workers: whether a `ray.init` after this call makes each worker install too.

    Returns:
        The functions that were replaced, those that were not, and why.

    Raises:
        ImportError: there is no SkyRL, or its trainer or its generator fails to be imported, for
            example because this SkyRL needs another Python.
        ValueError: an unknown mode.

    Warns:
        SkyRLFastWarning: the source of one of SkyRL's functions is unknown; it is kept.
    """
    global _report
    _check_mode(mode)
    if _report.mode == mode:
        if _watch is None:  # a worker starts no workers
            _set_ray_workers(ray_workers, mode)
        return report()
    uninstall()
    version = _version()
    failures = _load_entry_modules(version)
    rows = _replace(TARGETS)
    rows += [Row(name, "kept", why) for name, why in KEPT.items()]
    _report = Report(f"{HOST} {version}", tuple(rows), mode)
    _set_ray_workers(ray_workers, mode)
    _warn(rows, version, failures)
    print_at_exit(_exit_line)
    return report()


def _exit_line() -> str:
    """Return the calls of this process and its Ray workers; "" where nothing is installed."""
    if not _report.mode:
        return ""
    workers, counts = ray_workers.calls_of_workers()
    for name, one in ORIGINALS.counts.items():
        worker_calls.add_calls(counts, name, one)
    replaced = {name: counts.get(name, Counts()) for name in _report.names("replaced")}
    if workers:
        where = f" ({workers} Ray workers included)"
    else:
        where = ""
    return summary(f"{_report.host}{where}", replaced)


def _set_ray_workers(wanted: bool, mode: str) -> None:
    if not wanted:
        ray_workers.remove_hook()
    elif not ray_workers.has_hook():
        ray_workers.add_hook(mode)


def install_on_import(mode: str = "compat") -> None:
    """Replace SkyRL's functions as soon as their modules are imported; import nothing now.

    For processes that may not import SkyRL yet, such as a Ray worker during setup: SkyRL's modules
    call Ray when they are imported. `report` shows what was replaced so far.
    """
    global _report, _watch
    _check_mode(mode)
    if _report.mode == mode:
        return
    uninstall()
    _report = Report(HOST, mode=mode)

    def replace_loaded(module_name: str) -> None:
        global _report
        rows = _replace([target for target in TARGETS if target.module == module_name])
        version = _version()
        _report = replace(_report, host=f"{HOST} {version}", rows=(*_report.rows, *rows))
        _warn(rows, version, [], complete=False)

    _watch = ImportWatch({target.module for target in TARGETS}, replace_loaded)
    _watch.start()


def autoinstall() -> None:
    """Install on import as set by the variable SKYRL_FAST_AUTOINSTALL; this is Ray's setup hook.

    "1" or "compat"; unset, empty or "0" does nothing. An error is logged, and the worker
    continues with SkyRL's own functions.
    """
    setting = environment_setting(ray_workers.VARIABLE)
    if setting not in OFF:
        try:
            _install(setting)
        except Exception:  # a wrong setting must not end the worker
            logger.exception(
                "%s=%s: nothing was installed in this process", ray_workers.VARIABLE, setting
            )
    following = environment_setting(ray_workers.NEXT_HOOK)
    if following:
        module, _, name = following.rpartition(".")
        getattr(importlib.import_module(module), name)()


def _install(setting: str) -> None:
    install_on_import("compat" if setting == "1" else setting)
    worker_calls.start_publishing(lambda: ORIGINALS.counts)


def uninstall() -> None:
    """Restore SkyRL's own functions in this process. Without `install` this does nothing."""
    global _report, _watch
    if _watch is not None:
        _watch.stop()
        _watch = None
    _rebind([(replacement, original) for original, replacement in _installed.values()], but=_held)
    for original, replacement in _installed.values():
        _unregister(original, replacement)
    _installed.clear()
    _registered.clear()
    _held.clear()
    ORIGINALS.forget()
    _report = Report(HOST)
    ray_workers.remove_hook()


def report() -> Report:
    """Return the current replacements, with the number of calls so far."""
    counts = {row.name: ORIGINALS.counts.get(row.name, Counts()) for row in _report.rows}
    rows = [replace(row, counts=replace(counts[row.name])) for row in _report.rows]
    return replace(_report, rows=tuple(rows))


def _check_mode(mode: str) -> None:
    if mode.partition(":")[0] == "fixed":
        raise ValueError(
            f"install: expected mode 'compat', got {mode!r}, which was removed: results are always "
            "SkyRL's; docs/integrations/skyrl.md lists where they depart from the specification"
        )
    if mode not in MODES:
        raise ValueError(f"install: expected mode 'compat', got {mode!r}")


def _version() -> str:
    try:
        module = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ImportError(
            "install: SkyRL cannot be imported; install `skyrl`, or put it on the path"
        ) from error
    except Exception as error:  # any error of an import
        raise _import_error(PACKAGE, "", error) from error
    version = getattr(module, "__version__", None)
    if version is not None:
        return str(version)
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _load_entry_modules(version: str) -> list[str]:
    """Return which modules are missing or lack a package; one that fails otherwise is an error."""
    failures = []
    for name in ENTRY_MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
        except Exception as error:  # any error of an import
            raise _import_error(name, version, error) from error
    return failures


def _import_error(module: str, version: str, error: Exception) -> ImportError:
    reason = f"{type(error).__name__}: {printable(str(error).partition(chr(10))[0])}"
    if "TypedDict" in reason and sys.version_info < (3, 12):  # pydantic's, whatever SkyRL declares
        reason += " Run SkyRL with Python 3.12 or newer."
    try:
        needed = f" (SkyRL's package needs Python {metadata.metadata(PACKAGE)['Requires-Python']})"
    except (metadata.PackageNotFoundError, KeyError):
        needed = ""
    return ImportError(
        f"install: {module} of SkyRL {version or 'of unknown version'} cannot be imported in "
        f"Python {platform.python_version()}{needed}: {reason}"
    )


def _replace(targets: Iterable[Target]) -> list[Row]:
    rows = [_choose_replacement(target) for target in targets]
    replaced = [row.name for row in rows if row.state == "replaced"]
    _held.update(_places({id(_installed[name][1]) for name in replaced}))
    places = _rebind([_installed[name] for name in replaced])
    for name, found in zip(replaced, places, strict=True):
        found += _register(*_installed[name])
    places_by_name = dict(zip(replaced, places, strict=True))
    return [replace(row, places=tuple(places_by_name.get(row.name, ()))) for row in rows]


def _choose_replacement(target: Target) -> Row:
    found = find(target)
    if found is None:
        return Row(target.name, "absent")
    _, original = found
    label = version_label(target, original)
    if label is None:
        return Row(target.name, "kept", UNKNOWN_SOURCE)
    unknown = [name for name in target.calls if not is_known_now(name)]
    if unknown:
        return Row(target.name, "kept", f"calls {', '.join(unknown)}, of unknown source")
    ORIGINALS.keep(target.name, original, label)
    home, _, name = target.replacement.rpartition(".")
    replacement = getattr(importlib.import_module(f"{__package__}.{home}"), name)
    _installed[target.name] = (original, replacement)
    return Row(target.name, "replaced", version=label)


def _places(functions: set[int]) -> Iterator[tuple[str, str]]:
    """Yield modules or classes, and the names in them, that refer to functions of these ids."""
    for where, namespace, _ in _namespaces():
        for name, value in list(namespace.items()):
            if id(value) in functions:
                yield where, name


def _rebind(
    pairs: list[tuple[Callable[..., Any], Callable[..., Any]]],
    but: Collection[tuple[str, str]] = (),
) -> list[list[str]]:
    """Rebind every reference to a pair's first function to its second; return the places."""
    new_by_id = {}
    for index, (old, new) in enumerate(pairs):
        new_by_id[id(old)] = (index, new)
    places: list[list[str]] = [[] for _ in pairs]
    for where, namespace, setter in _namespaces():
        for name, value in list(namespace.items()):
            found = new_by_id.get(id(value))
            if found is not None and (where, name) not in but:
                setter(name, found[1])
                places[found[0]].append(f"{where}.{name}")
    return places


def _register(original: Callable[..., Any], replacement: Callable[..., Any]) -> list[str]:
    """Replace SkyRL's function in every registry, also under SkyRL's decorators."""
    places = []
    bare = strip_decorators(original)
    for where, functions in _registries():
        for name, value in list(functions.items()):
            if strip_decorators(value) is bare:
                _registered[where, name] = value
                functions[name] = replacement
                places.append(f"{where}[{name!r}]")
    return places


def _unregister(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    for where, functions in _registries():
        for name, value in list(functions.items()):
            if value is replacement:
                functions[name] = _registered.pop((where, name), original)


def _namespaces() -> Iterator[tuple[str, dict[str, Any], Callable[[str, Any], None]]]:
    """Yield (name, contents, setter) of all loaded modules but ours, and of SkyRL's classes."""
    for module_name, module in list(sys.modules.items()):
        package = module_name.partition(".")[0]
        if (
            module is None
            or package == OURS
            or not isinstance(getattr(module, "__dict__", 0), dict)
        ):
            continue
        yield module_name, module.__dict__, module.__dict__.__setitem__
        if package == PACKAGE:
            for name, value in list(module.__dict__.items()):
                if inspect.isclass(value) and value.__module__ == module_name:
                    yield f"{module_name}.{name}", dict(vars(value)), _class_setter(value)


def _class_setter(owner: type) -> Callable[[str, Any], None]:
    return lambda name, value: setattr(owner, name, value)


def _registries() -> Iterator[tuple[str, dict[str, Callable[..., Any]]]]:
    module = sys.modules.get(PPO)
    for name in REGISTRIES:
        registry = getattr(module, name, None)
        if registry is not None:
            yield name, registry._functions


def _warn(rows: list[Row], version: str, failures: list[str], *, complete: bool = True) -> None:
    text = describe_kept(rows, version, failures, complete=complete)
    if text:
        warnings.warn(text, SkyRLFastWarning, stacklevel=3)


def describe_kept(
    rows: list[Row], version: str, failures: list[str], *, complete: bool = True
) -> str:
    """Return what is not replaced, in the loudest words where nothing gets faster; "" if all is.

    Args:
        rows: all functions.
        version: of SkyRL.
        failures: of the modules that could not be imported.
        complete: whether all of SkyRL's modules have been imported.
    """
    kept = [row for row in rows if row.state == "kept" and row.name in BY_NAME]
    if not kept and not failures:
        return ""
    replaced = {row.name for row in rows if row.state == "replaced"}
    absent = [row.name for row in rows if row.state == "absent"]
    parts = [f"SkyRL {version}: not everything could be replaced."]
    if complete and not replaced:
        parts = [f"SkyRL {version}: NOTHING IS REPLACED; SkyRL runs as without skyrl_fast."]
    elif complete and not replaced & set(HEAVY):
        parts = [
            f"SkyRL {version}: ALMOST NOTHING BECOMES FASTER: the functions that take most of the "
            "time are kept."
        ]
    if kept:
        reasons = (f"{row.name} ({row.why})" for row in kept if row.why != UNKNOWN_SOURCE)
        unknown = (row.name for row in kept if row.why == UNKNOWN_SOURCE)
        parts += [f"Kept, because the source is unknown: {', '.join((*unknown, *reasons))}."]
    if absent:
        parts.append(f"Missing in this version: {', '.join(absent)}.")
    if failures:
        parts.append(f"Not importable: {'; '.join(failures)}.")
    return " ".join(parts)
