"""Files with one JSON value per line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_jsonl(path: Path, rows: Iterable[Any]) -> int:
    """Write one JSON value per line; return their number."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


def read_jsonl(path: Path) -> list[Any]:
    """Return all values of a file written by `write_jsonl`."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
