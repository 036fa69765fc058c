"""Print how large and how dense the package and its tests are.

    python -m scripts.sizes [--json]

Syntax nodes are all expressions and statements (`ast.expr`, `ast.stmt`); lines of code are lines
without docstrings, comments and blanks. Nodes per line say how much a reader finds on one line.
`python_tests/project/test_sizes.py` holds some of these counts as ceilings.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "skyrl_fast"
TESTS = ROOT / "python_tests"
LONG_FILE = 400  # lines

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
PRIVATE = re.compile(r"_[a-z]\w*|_[A-Z]\w*")
PUBLIC_UNDERSCORE = {"_C", "_asdict", "_replace", "_fields"}


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A parsed file."""

    path: Path
    text: str
    tree: ast.Module


@dataclass(frozen=True, slots=True)
class Density:
    """Syntax nodes and lines of code."""

    nodes: int
    code_lines: int

    @property
    def nodes_per_line(self) -> float:
        """Nodes per line of code, 0 without code."""
        return self.nodes / max(self.code_lines, 1)


@cache
def sources(folder: Path) -> list[Source]:
    """Return the Python files below a folder, by path."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        found.append(Source(path, text, ast.parse(text)))
    return found


# Density


def docstring(node: ast.AST) -> ast.Expr | None:
    """Return the docstring's statement of a module, class or function."""
    if not isinstance(node, DOCUMENTED) or not node.body:
        return None
    first = node.body[0]
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return None
    return first if isinstance(first.value.value, str) else None


@cache
def density(source: Source) -> Density:
    """Count a file's syntax nodes and lines of code.

    Example:
        >>> text = 'x = 1  # one\\n\\ny = f(x)\\n'
        >>> density(Source(Path("a.py"), text, ast.parse(text)))
        Density(nodes=7, code_lines=2)
    """
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in NOT_CODE:
            code_lines |= set(range(token.start[0], token.end[0] + 1))
    nodes = 0
    for node in ast.walk(source.tree):
        nodes += isinstance(node, (ast.expr, ast.stmt))
        text = docstring(node)
        if text is not None:
            code_lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return Density(nodes, len(code_lines))


def total(files: list[Source]) -> Density:
    """Return the sum over files."""
    each = [density(source) for source in files]
    return Density(sum(d.nodes for d in each), sum(d.code_lines for d in each))


def density_by_folder() -> dict[str, Density]:
    """Return the density of the package's top folders; Triton kernels are a folder of their own.

    A kernel's line computes addresses, strides and masks, so that it is not compared with others.
    """
    folders: dict[str, list[Source]] = {}
    for source in sources(PACKAGE):
        parts = source.path.relative_to(PACKAGE).parts
        folder = parts[0] if len(parts) > 1 else "(top)"
        if is_triton(source):
            folder = "(Triton kernels)"
        folders.setdefault(folder, []).append(source)
    return {folder: total(files) for folder, files in sorted(folders.items())}


def is_triton(source: Source) -> bool:
    """Return whether a file is about Triton kernels, by its name."""
    return "triton" in source.path.name


# What makes lines hard to read


def literal_unpackings(source: Source) -> Iterator[int]:
    """Yield the lines with `*("a", "b")`, an unpacked literal.

    Example:
        >>> text = 'f(*("a", "b"))\\nf(*names)\\n'
        >>> list(literal_unpackings(Source(Path("a.py"), text, ast.parse(text))))
        [1]
    """
    for node in ast.walk(source.tree):
        is_unpacked = isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Load)
        if is_unpacked and isinstance(node.value, (ast.Tuple, ast.List)):
            yield node.lineno


def paired_assignments(source: Source) -> Iterator[int]:
    """Yield the lines with `a, b = x, y`, several assignments in one statement.

    Example:
        >>> text = 'a, b = 1, 2\\na, b = pair\\n'
        >>> list(paired_assignments(Source(Path("a.py"), text, ast.parse(text))))
        [1]
    """
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if any(isinstance(target, ast.Tuple) for target in node.targets):
            yield node.lineno


def nested_conditionals(source: Source) -> Iterator[int]:
    """Yield the lines with a conditional expression inside another one."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.IfExp):
            inner = (child for child in ast.walk(node) if child is not node)
            if any(isinstance(child, ast.IfExp) for child in inner):
                yield node.lineno


def places(files: list[Source], find_lines: Callable[[Source], Iterator[int]]) -> list[str]:
    """Return path:line of each line that `find_lines` yields."""
    return [f"{s.path.relative_to(ROOT)}:{line}" for s in files for line in find_lines(s)]


# Settings, errors, constants, functions


def setting_count() -> int:
    """Return the number of settings of a run."""
    from skyrl_fast.config.settings import Config, leaves

    return len(list(leaves(Config())))


def config_errors() -> Counter[str]:
    """Return how often each file creates a ConfigError."""
    found: Counter[str] = Counter()
    for source in sources(PACKAGE):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ConfigError"):
                found[str(source.path.relative_to(PACKAGE))] += 1
    return found


def module_constants() -> int:
    """Return the number of names in capitals that modules assign."""
    count = 0
    for source in sources(PACKAGE):
        for node in source.tree.body:
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            names = [name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)]
            count += sum(name.isupper() for name in names)
    return count


def longest_function() -> tuple[int, str]:
    """Return the lines of the longest function, its docstring left out, and its place."""
    longest = (0, "")
    for source in sources(PACKAGE):
        for node in ast.walk(source.tree):
            if not isinstance(node, FUNCTIONS):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            text = docstring(node)
            if text is not None:
                lines -= (text.end_lineno or text.lineno) - text.lineno + 1
            place = f"{source.path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
            longest = max(longest, (lines, place))
    return longest


def lines_of(files: list[Source]) -> int:
    """Return the number of lines, everything included."""
    return sum(len(source.text.splitlines()) for source in files)


def long_files() -> list[str]:
    """Return the package's files with more than LONG_FILE lines."""
    return [
        f"{source.path.relative_to(PACKAGE)} {lines_of([source])}"
        for source in sources(PACKAGE)
        if lines_of([source]) > LONG_FILE
    ]


# Tests


def monkeypatches() -> int:
    """Return how often tests replace an attribute or an item."""
    replacing = {"monkeypatch.setattr", "monkeypatch.setitem"}
    count = 0
    for source in sources(TESTS):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                count += ast.unparse(node.func) in replacing
    return count


def private_uses() -> int:
    """Return how often tests use a private name of the package: an import, or an attribute."""
    count = 0
    for source in sources(TESTS):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("skyrl_fast"):
                count += sum(is_private(alias.name) for alias in node.names)
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                count += ast.unparse(node.value) not in ("self", "cls")
    return count


def is_private(name: str) -> bool:
    """Return whether a name begins with one underscore, and belongs to no public API."""
    return name not in PUBLIC_UNDERSCORE and PRIVATE.fullmatch(name) is not None


# Imports


def module_name(path: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def top_nodes(tree: ast.Module, *, with_types: bool = False) -> list[ast.AST]:
    """Return nodes that run at import: not in functions, by default not in TYPE_CHECKING."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, FUNCTIONS):
            continue
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if for_types and not with_types:
            continue
        found.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def import_graph(*, in_functions: bool) -> dict[str, set[str]]:
    """Return module -> the package's modules it imports, also in TYPE_CHECKING.

    `from package import module` imports the module, not the package.
    """
    modules = {module_name(source.path) for source in sources(PACKAGE)}
    graph: dict[str, set[str]] = {}
    for source in sources(PACKAGE):
        module = module_name(source.path)
        names: set[str] = set()
        nodes = ast.walk(source.tree) if in_functions else top_nodes(source.tree, with_types=True)
        for node in nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    is_module = full in modules or alias.name == "_C"
                    names.add(full if is_module else node.module)
        graph[module] = {name for name in names if name in modules and name != module}
    return graph


def import_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others.

    Example:
        >>> import_circles({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}})
        [['b', 'd']]
    """
    reached = {module: reachable(graph, module) for module in graph}
    circles: dict[str, list[str]] = {}
    for module in sorted(graph):
        if module in reached[module]:
            circle = [other for other in sorted(reached[module]) if module in reached[other]]
            circles[circle[0]] = circle
    return list(circles.values())


def reachable(graph: dict[str, set[str]], module: str) -> set[str]:
    """Return the modules that a module imports, directly or through others."""
    found: set[str] = set()
    waiting = [*graph[module]]
    while waiting:
        other = waiting.pop()
        if other not in found:
            found.add(other)
            waiting.extend(graph[other])
    return found


# The report


def report() -> dict[str, object]:
    """Return all counts by name."""
    package = sources(PACKAGE)
    tests = sources(TESTS)
    errors = config_errors()
    length, place = longest_function()
    everything = total(package)
    return {
        "lines of the package": lines_of(package),
        "lines of code": everything.code_lines,
        "nodes per line of code": round(everything.nodes_per_line, 2),
        "nodes per line of code by folder": {
            folder: round(counts.nodes_per_line, 2)
            for folder, counts in density_by_folder().items()
        },
        "literal unpackings": len(places(package, literal_unpackings)),
        "paired assignments": len(places(package, paired_assignments)),
        "nested conditional expressions": len(places(package, nested_conditionals)),
        "settings": setting_count(),
        "ConfigErrors": errors.total(),
        "ConfigErrors by file": dict(errors.most_common()),
        "module constants": module_constants(),
        "longest function": f"{length} lines, {place}",
        f"files over {LONG_FILE} lines": long_files(),
        "tests / package, lines": round(lines_of(tests) / lines_of(package), 3),
        "monkeypatches in tests": monkeypatches(),
        "private uses in tests": private_uses(),
        "import circles": [len(c) for c in import_circles(import_graph(in_functions=True))],
    }


def show(counts: dict[str, object]) -> Iterator[str]:
    """Yield the report's lines."""
    for name, value in counts.items():
        if isinstance(value, dict):
            yield f"{name}:"
            yield from (f"    {inner:40} {count}" for inner, count in value.items())
        elif isinstance(value, list):
            yield f"{name}: {len(value)}"
            yield from (f"    {item}" for item in value)
        else:
            yield f"{name}: {value}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="all counts as JSON")
    if parser.parse_args().json:
        print(json.dumps(report(), indent=1))
    else:
        print("\n".join(show(report())))
