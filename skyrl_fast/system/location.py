"""Where a relative path is looked for, in words."""

from __future__ import annotations

import os
from os.path import expanduser


def described_path(path: str | os.PathLike[str]) -> str:
    """Return a path as it was given; a relative one with the place that it means.

    Example:
        >>> described_path("/data/a.jsonl")
        '/data/a.jsonl'
    """
    given = os.fspath(path)
    full = expanduser(given)
    if os.path.isabs(full) or full.startswith("~"):  # "~": the home of an unknown user
        return given
    place = os.path.abspath(full)
    return f"{given} (that is {place}: relative paths are those of the current folder)"
