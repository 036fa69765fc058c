"""What the commands share: their configuration arguments, and how they fail."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from skyrl_fast.errors import RunError
from skyrl_fast.system.printable import PrintableFormatter

EXIT_USAGE = 2  # the settings, or what is installed, must be changed first


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


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Raise UsageError where an import in the block fails, with the extra that has the package."""
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"a package is missing: {error}; pip install 'skyrl-fast[{name}]'"
        ) from error


@contextmanager
def as_usage_error(*kinds: type[Exception]) -> Iterator[None]:
    """Raise UsageError for these errors in the block."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error


def log_to_stderr(level: int = logging.WARNING, form: str = "%(message)s") -> None:
    """Log to standard error, without control characters."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
