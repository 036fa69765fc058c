"""Data as scripts: a page opened from disk may load scripts, but no other data."""

from __future__ import annotations

import json
from typing import Any


def script(call: str, *arguments: Any) -> str:
    """Return a line of JavaScript that calls a function with these values, each as a JSON string.

    The line is ASCII, without `<`: no value can end the script or start another one, and every
    encoding reads it alike. The values are parsed by JSON.parse, so `__proto__` is an ordinary key.

    Example:
        >>> script("f", {"a": "</script>"})
        'f("{\\"a\\":\\"\\u003c/script>\\"}");\n'
    """
    literals = []
    for value in arguments:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        literals.append(json.dumps(text).replace("<", "\\u003c"))
    return f"{call}({','.join(literals)});\n"
