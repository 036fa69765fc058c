"""Functions of a host program: fingerprints of their sources, and modules that bind them."""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

DIGITS = 16  # of the hash: enough for a table that a person can read
DECORATORS = ("skyrl", "torch")  # packages whose wrappers do what the function does


def fingerprint(functions: Sequence[Callable[..., Any]]) -> str:
    """Return a hash of the functions' sources without comments, docstrings and whitespace.

    The same source has the same hash under every Python version.

    Raises:
        OSError: the source of a function is not available.
    """
    digest = hashlib.sha256()
    for function in functions:
        bare = strip_decorators(function)
        # From its code object: getsource would look through the wrappers of others too.
        source = inspect.getsource(getattr(bare, "__code__", bare))
        digest.update(normalize_source(source).encode())
    return digest.hexdigest()[:DIGITS]


def strip_decorators(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without decorators of SkyRL and torch.

    A wrapper of anyone else is kept, since its effect is unknown.
    """
    while hasattr(function, "__wrapped__"):
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if home.partition(".")[0] not in DECORATORS:
            break
        function = function.__wrapped__
    return function


def normalize_source(source: str) -> str:
    """Return the source of one function without comments, docstring and whitespace.

    Example:
        >>> normalize_source("def f(x):  # a comment\\n    return x\\n")
        'deff(x):returnx'
    """
    source = textwrap.dedent(source)
    lines = io.StringIO(source).readlines()  # as tokenize does; a text may contain U+2028
    spans = [
        (token.start, token.end)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    doc = _docstring(source)
    if doc is not None:
        spans.append(((doc.lineno, doc.col_offset), (doc.end_lineno or 0, doc.end_col_offset or 0)))
    for (row, column), (end_row, end_column) in sorted(spans, reverse=True):
        head = lines[row - 1][:column]
        tail = lines[end_row - 1][end_column:]
        lines[row - 1 : end_row] = [head + tail]
    return "".join("".join(lines).split())


def _docstring(source: str) -> ast.expr | None:
    function = ast.parse(source).body[0]
    body = getattr(function, "body", [])
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first.value if isinstance(first.value.value, str) else None
    return None


def find_functions(module: ModuleType, names: Sequence[str]) -> list[Callable[..., Any]]:
    """Return the module's functions of these names; missing ones are omitted."""
    found = (getattr(module, name, None) for name in names)
    return [function for function in found if callable(function)]


def modules_that_bind(package: str, name: str, value: object) -> list[ModuleType]:
    """Return the loaded modules of a package in which the name is bound to this object."""
    return [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == package and vars(module).get(name) is value
    ]
