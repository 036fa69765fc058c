"""Data as scripts: a page opened from disk may load scripts, but no other data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CALLBACK = "skyrlFastView.receive"


def script(call: str, *arguments: Any) -> str:
    """Return a line of JavaScript that calls a function with these values, each as a JSON string.

    The line is ASCII, without `<`: no value can end the script or start another one, and every
    encoding reads it alike. The values are parsed by JSON.parse, so `__proto__` is an ordinary key.

    Example:
        >>> script("f", {"a": "</script>"})
        'f("{\\"a\\":\\"\\u003c/script>\\"}");\n'
    """
    literals = ",".join(f'"{literal(value)}"' for value in arguments)
    return f"{call}({literals});\n"


def literal(value: Any) -> str:
    """Return the value's JSON as the inside of a JavaScript string, in ASCII without `<`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return json.dumps(text)[1:-1].replace("<", "\\u003c")


class ListScripts:
    """A long list in numbered scripts, such as part0.js, of `limit` bytes or of one larger item."""

    def __init__(self, folder: Path, name: str, limit: int) -> None:
        self._folder = folder
        self._name = name
        self._limit = limit
        self._literals: list[str] = []
        self._size = 0
        self._number = 0

    def keep_together(self, size: int) -> None:
        """Start another script if the next items, of this size, fit into one, but not into this."""
        if size <= self._limit < self._size + size:
            self.close()

    def add(self, item: str) -> tuple[int, int]:
        """Append an item, given as a `literal`; return its script's number and its place there."""
        if self._size + len(item) > self._limit:
            self.close()
        self._literals.append(item)
        self._size += len(item) + 1
        return self._number, len(self._literals) - 1

    def close(self) -> None:
        if not self._literals:
            return
        name = f"{self._name}{self._number}"
        content = f'{CALLBACK}("{literal(name)}","[{",".join(self._literals)}]");\n'
        (self._folder / f"{name}.js").write_text(content, encoding="ascii")
        self._literals = []
        self._size = 0
        self._number += 1
