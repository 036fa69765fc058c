"""Data as scripts: pages opened from a disk may load scripts, and nothing else, from it."""

from __future__ import annotations

import json
from typing import Any


def script(call: str, *arguments: Any) -> str:
    """Return a line of JavaScript that calls a function with these values, each as JSON text.

    The text is ASCII, without `<`: nothing in it can end the script, start another one, or mean
    something else in another encoding. JSON.parse, not JavaScript, reads it: a key `__proto__` is
    a key like others.

    Example:
        >>> script("f", {"a": "</script>"})
        'f("{\\"a\\":\\"\\u003c/script>\\"}");\n'
    """
    literals = []
    for value in arguments:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        literals.append(json.dumps(text).replace("<", "\\u003c"))
    return f"{call}({','.join(literals)});\n"
