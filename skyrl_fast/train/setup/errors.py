"""The error of a run that cannot start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from skyrl_fast.errors import RunError


class SetupError(RunError, ValueError):
    """Data, model, packages or engine are not usable; the message says what to fix."""

    exit_code = 2


@contextmanager
def as_setup_error() -> Iterator[None]:
    """Raise SetupError for what checks of settings, files and packages raise."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise SetupError(str(error)) from error
