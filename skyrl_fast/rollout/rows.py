"""Rows of the data, as user code gets them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

log = logging.getLogger(__name__)


def copy_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a row for user code, which may change it."""
    # The row itself is read by other samples, epochs and evaluations. A column that cannot be
    # copied, such as a client or a lock, is shared; the log names it once.
    copied = {}
    for name, value in row.items():
        try:
            copied[name] = copy.deepcopy(value)
        except Exception as error:  # by any class of a user
            _warn_of_shared_column(name, type(error).__name__, str(error))
            copied[name] = value
    return copied


@cache
def _warn_of_shared_column(name: str, kind: str, error: str) -> None:
    log.warning(
        "column %r cannot be copied (%s: %s): all episodes share it; said once", name, kind, error
    )
