"""Passages in a JSON-lines file, memory-mapped and read one at a time."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash


class Corpus:
    """The passages of a file; only their offsets are in memory.

    A line is a JSON object with the text `contents` and an optional `id`; Search-R1's passages have
    the title in quotation marks on the first line of `contents`.

    Example:
        >>> Corpus(Path("corpus.jsonl"))[0]
        {'id': '0', 'contents': '"Aachen"\\nAachen is a city.'}
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ValueError(f"corpus: no such file: {path}")
        self.path = path
        self._file = path.open("rb")
        if path.stat().st_size == 0:
            raise ValueError(f"corpus: {path} is empty")
        self._bytes = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._xxh3 = xxhash.xxh3_128()
        self._begins, self._lines = self._find_lines()
        if len(self._begins) == 0:
            raise ValueError(f"corpus: {path} has no passages")

    def _find_lines(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the offset and line number of each passage; blank lines are skipped."""
        begins, lines, begin = [], [], 0
        self._bytes.seek(0)
        for number, line in enumerate(iter(self._bytes.readline, b""), start=1):
            if line.strip():
                begins.append(begin)
                lines.append(number)
            begin += len(line)
            self._xxh3.update(line)
        return np.array(begins, dtype=np.int64), np.array(lines, dtype=np.int64)

    @property
    def digest(self) -> str:
        """XXH3 of the file."""
        return self._xxh3.hexdigest()

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the passage with this number: `id` (default: its number) and `contents`."""
        begin = int(self._begins[index])
        end = self._bytes.find(b"\n", begin)
        line = self._bytes[begin : end if end >= 0 else len(self._bytes)]
        where = f"corpus: {self.path}, line {self._lines[index]}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: invalid JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("contents"), str):
            raise ValueError(f"{where}: expected an object with the text 'contents'")
        name = row.get("id", index)
        if not isinstance(name, str | int | float):
            raise ValueError(f"{where}: id: expected text or a number, got {type(name).__name__}")
        return {"id": _sendable(str(name)), "contents": _sendable(row["contents"])}

    def texts(self) -> Iterator[str]:
        return (self[index]["contents"] for index in range(len(self)))


def _sendable(text: str) -> str:
    """Return the text with "?" for each lone surrogate, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
