"""The end of a log file, which may have grown for days."""

from __future__ import annotations

import os
from pathlib import Path

TAIL_BYTES = 1 << 16


def log_tail(path: Path) -> str:
    """Return the last TAIL_BYTES of a file as text; "" if there is no file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode("utf-8", "replace")
