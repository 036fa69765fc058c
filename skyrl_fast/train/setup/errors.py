"""The error of a run that cannot start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from skyrl_fast.errors import RunError
from skyrl_fast.rollout.env.signatures import SignatureError
from skyrl_fast.setting import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class SetupError(RunError, ValueError):
    """Data, model, packages or engine are not usable; the message says what to fix."""

    exit_code = 2


@contextmanager
def as_setup_error() -> Iterator[None]:
    """Raise SetupError for what checks of settings, files and packages raise."""
    try:
        yield
    except SignatureError as error:  # raised by a check, whose lines say nothing more
        raise SetupError(str(error)) from None
    except (ValueError, OSError, ImportError) as error:
        raise SetupError(str(error)) from error


def with_short_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose ConfigError and SetupError end with the call, and keep their cause.

    The messages say what to change, so the lines of the checks that raised them are left out.
    """

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return function(*arguments, **options)
        except (ConfigError, SetupError) as error:
            raise error.with_traceback(None) from error.__cause__

    return call
