"""What a version of SkyRL changes for the drop-in, function by function.

    python -m scripts.skyrl_versions NEW      NEW: a version of the package index, or a source tree
    python -m scripts.skyrl_versions --write  the page of versions, from the known ones
    python -m scripts.skyrl_versions --fresh  exit code 1 if the index has newer SkyRL, TRL or verl

To add a version: run it with NEW, adapt each changed function or leave it to SkyRL, add the printed
fingerprint to `names.py`, run the named tests with NEW installed, then --write.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.peers import PACKAGES
from skyrl_fast.integrations.skyrl.names import BY_NAME, PACKAGE, TARGETS, VERSIONS, Target
from skyrl_fast.integrations.source import fingerprint_of_sources, referenced_names

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "peers" / "versions"
PAGE = ROOT / "docs/reference/skyrl_versions.md"
TESTS = ROOT / "python_tests" / "integrations"
PYTHON = "3.12"  # that SkyRL's current packages need; only their sources are read


def main() -> None:
    """Print the report of a version, write the page, or compare with the package index."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("new", nargs="?", help="version of SkyRL, or a source tree")
    parser.add_argument(
        "--write", action="store_true", help="write docs/reference/skyrl_versions.md"
    )
    parser.add_argument("--fresh", action="store_true", help="compare with the package index")
    args = parser.parse_args()
    if args.write:
        PAGE.write_text(page({version: source_tree(version) for version in VERSIONS}))
    if args.new:
        tree = Path(args.new) if Path(args.new).is_dir() else source_tree(args.new)
        print("\n".join(report(tree, source_tree(VERSIONS[-1]))))
    if args.fresh:
        newer = newer_releases({name: newest_release(name) for name in known_releases()})
        print("\n".join(newer) or "no newer SkyRL, TRL or verl")
        sys.exit(bool(newer))


def source_tree(version: str) -> Path:
    """Return the files of a version of SkyRL's package, downloaded once.

    Raises:
        OSError: the package index cannot be reached, or has no such version.
    """
    place = FOLDER / version
    if not place.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        command += [str(FOLDER), "--only-binary", ":all:", "--python-version", PYTHON]
        done = subprocess.run([*command, f"skyrl=={version}"], capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"skyrl=={version} cannot be downloaded: {done.stderr.strip()[-300:]}")
        (wheel,) = FOLDER.glob(f"skyrl-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place)
    return place


def definition(path: Path, name: str) -> str | None:
    """Return the source of a function or method, with its decorators."""
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    body: list[ast.stmt] = parsed(path).body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((n for n in body if getattr(n, "name", None) == part), None)
        if found is None:
            return None
        body = getattr(found, "body", [])
    assert found is not None
    first = min([found.lineno, *(d.lineno for d in getattr(found, "decorator_list", []))])
    return "".join(text.splitlines(keepends=True)[first - 1 : found.end_lineno])


def sources(tree: Path, target: Target) -> dict[str, str]:
    """Return the sources of a target and of what it calls, by name; {} without the target.

    As `source.called_functions` finds them in the modules that are loaded.
    """
    start = (target.module, target.name)
    found: dict[tuple[str, str], str] = {}
    waiting = [start]
    while waiting:
        module, name = waiting.pop()
        text = definition(module_path(tree, module), name)
        if text is None or (module, name) in found:
            continue
        found[module, name] = text
        waiting += called_in(tree, module, text)
    own = found.pop(start, None)
    if own is None:
        return {}
    callees = sorted((name, module) for module, name in found)
    return {target.name: own, **{name: found[module, name] for name, module in callees}}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_path(tree: Path, module: str) -> Path:
    path = tree / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def called_in(tree: Path, module: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each of SkyRL's functions that a function's body names."""
    for name in referenced_names(source):
        home, callee = resolve(tree, module, name)
        if callee and callee not in BY_NAME:
            yield home, callee


def resolve(tree: Path, module: str, name: str) -> tuple[str, str]:
    """Return where a function is defined that a module calls by this name; "", "" if nowhere.

    Args:
        name: `function`, or `module.function`.
    """
    first, _, attribute = name.partition(".")
    for node in parsed(module_path(tree, module)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == node.name:
            return module, name
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                if first == (alias.asname or alias.name):
                    imported = f"{node.module}.{alias.name}"
                    is_module = module_path(tree, imported).exists()
                    if is_module == bool(attribute):
                        home = imported if is_module else str(node.module)
                        return resolve(tree, home, attribute or alias.name)
    return "", ""


def fingerprint_in(tree: Path, target: Target) -> str:
    """Return the fingerprint of a target in a source tree, "" without it."""
    found = sources(tree, target)
    return fingerprint_of_sources(list(found.values())) if found else ""


def state(tree: Path, target: Target) -> str:
    """Return what `install` does with the target in a source tree."""
    found = fingerprint_in(tree, target)
    if not found:
        return "-"
    return "replaced" if found in target.fingerprints else "kept"


def report(tree: Path, known: Path) -> Iterator[str]:
    """Yield the lines about a source tree: known functions, changes of others, their tests.

    Args:
        tree: the new source tree.
        known: that of the newest known version.
    """
    states = [state(tree, target) for target in TARGETS]
    for kind in ("replaced", "-"):
        names = [
            target.name for target, found in zip(TARGETS, states, strict=True) if found == kind
        ]
        yield f"{kind} ({len(names)}): {', '.join(names)}"
    changed = [target for target, found in zip(TARGETS, states, strict=True) if found == "kept"]
    yield f"unknown source ({len(changed)}): {', '.join(target.name for target in changed)}"
    for target in changed:
        yield f"\n== {target.name} ({target.module})"
        yield f"fingerprint: {fingerprint_in(tree, target)!r}"
        yield f"replacement: skyrl_fast.integrations.skyrl.{target.replacement}"
        callers = [other.name for other in TARGETS if target.name in other.calls]
        if callers:
            yield f"kept with it, because they call it: {', '.join(callers)}"
        yield f"tests that decide: {', '.join(deciding_tests(target)) or 'none; write one'}"
        old, new = sources(known, target), sources(tree, target)
        for name in {**old, **new}:
            yield from difflib.unified_diff(
                old.get(name, "").splitlines(), new.get(name, "").splitlines(),
                f"known/{name}", f"new/{name}", lineterm="",
            )  # fmt: skip


def deciding_tests(target: Target) -> list[str]:
    """Return the tests that mention the target's function, as file::test."""
    found = []
    for path in sorted(TESTS.glob("test_skyrl_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                part = ast.get_source_segment(text, node) or ""
                if re.search(rf"\b{target.short_name}\b", part):
                    found.append(f"{path.name}::{node.name}")
    return found


def page(trees: Mapping[str, Path]) -> str:
    """Return docs/reference/skyrl_versions.md."""
    lines = [
        "# Versions of SkyRL",
        "",
        "What `install()` does with each function, by version: replaced; kept, because its source,",
        "or that of a function that it calls, differs from every version that the replacement was",
        "tested against; or not present (-).",
        "Written by `python -m scripts.skyrl_versions --write`; with a version or a source tree",
        "as its argument, this script prints what a new SkyRL changes, and which tests decide.",
        "",
        f"| function | {' | '.join(trees)} |",
        f"|---|{'---|' * len(trees)}",
    ]
    for target in TARGETS:
        cells = " | ".join(state(tree, target) for tree in trees.values())
        lines.append(f"| `{target.name}` | {cells} |")
    return "\n".join(lines) + "\n"


def known_releases() -> dict[str, str]:
    """Return the newest release of each peer that this package is tested with."""
    pins = dict(package.split("==") for package in PACKAGES)
    return {"skyrl": VERSIONS[-1], "trl": pins["trl"], "verl": pins["verl"]}


def newest_release(package: str) -> str:
    """Return the newest release on the package index, pre-releases excluded.

    Raises:
        OSError: the index cannot be reached.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", package, "--python-version"]
    done = subprocess.run(
        [*command, PYTHON, "--only-binary", ":all:"], capture_output=True, text=True
    )
    found = re.search(r"Available versions: ([^,\s]+)", done.stdout)
    if found is None:
        raise OSError(f"the index has no versions of {package}: {done.stderr.strip()[-300:]}")
    return found.group(1)


def newer_releases(newest: Mapping[str, str]) -> list[str]:
    """Return a line for each package whose newest release is newer than the known one."""
    known = known_releases()
    return [
        f"{name} {version} is newer than {known[name]}, the last one that was tested"
        for name, version in newest.items()
        if _numbers(version) > _numbers(known[name])
    ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


if __name__ == "__main__":
    main()
