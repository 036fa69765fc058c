"""Functions of a host program: fingerprints of their sources, and modules that bind them."""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Callable, Collection, Sequence
from types import FunctionType, ModuleType
from typing import Any

DIGITS = 16  # digits of the hash: enough for a table that a person can read
DECORATORS = ("skyrl", "torch")  # packages whose wrappers do what the function does
UNKNOWN_SOURCE = (
    "its source, or that of a function that it calls, differs from every version this replacement "
    "was tested against"
)


def fingerprint(functions: Sequence[Callable[..., Any]]) -> str:
    """Return a hash of the functions' sources without comments, docstrings and whitespace.

    The same source has the same hash under every Python version.

    Raises:
        OSError: the source of a function is not available.
    """
    return fingerprint_of_sources([_source(function) for function in functions])


def fingerprint_with_calls(
    functions: Sequence[Callable[..., Any]], package: str, *, skip: Collection[str] = ()
) -> str:
    """Return the fingerprint of functions and of a package's functions that they call.

    Args:
        package, skip: as of `called_functions`.

    Returns:
        The fingerprint, "" if a source is not available, as of a function created at run time.
    """
    try:
        callees: list[Callable[..., Any]] = []
        for function in functions:
            callees += called_functions(function, package, skip=skip)
        return fingerprint([*functions, *callees])
    except (OSError, TypeError, SyntaxError):
        return ""


def fingerprint_of_sources(sources: Sequence[str]) -> str:
    """Return the fingerprint of functions by their sources."""
    digest = hashlib.sha256("".join(map(normalize_source, sources)).encode())
    return digest.hexdigest()[:DIGITS]


def _source(function: Callable[..., Any]) -> str:
    bare = strip_decorators(function)
    # From its code object: getsource would look through the wrappers of others too.
    return inspect.getsource(getattr(bare, "__code__", bare))


def called_functions(
    function: Callable[..., Any], package: str, *, skip: Collection[str] = ()
) -> list[FunctionType]:
    """Return the functions of a package that a function calls, directly or through another.

    They are those that its body names, in its module or as `module.function`; methods, and what a
    body imports itself, are not followed.

    Args:
        package: name of the top package; functions of others are not followed.
        skip: names of functions that are omitted, with what they alone call.

    Returns:
        The functions, sorted by name and module.

    Raises:
        OSError: the source of a function is not available.
    """
    found: dict[tuple[str, str], FunctionType] = {}
    start = strip_decorators(function)
    waiting = [start]
    while waiting:
        caller = waiting.pop()
        for name in referenced_names(_source(caller)):
            callee = _function_named(name, caller.__globals__, package)
            if callee is None or callee is start or callee.__name__ in skip:
                continue
            key = (callee.__name__, callee.__globals__["__name__"])
            if key not in found:
                found[key] = callee
                waiting.append(callee)
    return [found[key] for key in sorted(found)]


def _function_named(name: str, namespace: dict[str, Any], package: str) -> FunctionType | None:
    first, _, attribute = name.partition(".")
    value = namespace.get(first)
    if attribute:
        if isinstance(value, ModuleType):
            value = getattr(value, attribute, None)
        else:
            value = None
    if callable(value):
        bare = strip_decorators(value)
    else:
        bare = None
    if not isinstance(bare, FunctionType):
        return None
    home = str(bare.__globals__.get("__name__", ""))
    if home.partition(".")[0] == package:
        return bare
    return None


def referenced_names(source: str) -> set[str]:
    """Return the names in a function's body: `name`, and `name.attribute`.

    Example:
        >>> sorted(referenced_names("@d\\ndef f(x):\\n    return g(m.h(x))\\n"))
        ['g', 'm', 'm.h', 'x']
    """
    body = getattr(ast.parse(textwrap.dedent(source)).body[0], "body", [])
    nodes = [node for statement in body for node in ast.walk(statement)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
    return names


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
    spans = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            spans.append((token.start, token.end))
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
        if isinstance(first.value.value, str):
            return first.value
        return None
    return None


def modules_that_bind(package: str, name: str, value: object) -> list[ModuleType]:
    """Return the loaded modules of a package in which the name is bound to this object."""
    result: list[ModuleType] = []
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == package and vars(module).get(name) is value:
            result.append(module)
    return result
