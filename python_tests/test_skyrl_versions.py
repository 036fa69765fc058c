"""Which functions of SkyRL are replaced, version by version: docs/skyrl_versions.md is made here.

SKYRL_FAST_WRITE=1 writes the page anew.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from skyrl_fast.integrations.skyrl.names import TARGETS, Target
from skyrl_fast.integrations.skyrl.rules import RULES
from skyrl_fast.integrations.skyrl.source import DIGITS, plain_text

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "skyrl_versions.md"
FOLDER = ROOT / "build" / "peers" / "versions"
# One rule for each function that only mode "fixed" replaces.
FIRST_RULES = ("length_check", "routes_append", "dynamic_sampling_filter",
               "dynamic_sampling_replace")  # fmt: skip
VERSIONS = ("0.2.0", "0.3.0")  # of the package index; those before had few of the functions


def source_tree(version: str) -> Path:
    """Return the package's files, downloaded once."""
    place = FOLDER / version
    if not place.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":none:"]
        command += ["--quiet", "--dest", str(FOLDER), f"skyrl=={version}"]
        if subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("the package index cannot be reached")
        (wheel,) = FOLDER.glob(f"skyrl-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place)
    return place


def definition(path: Path, name: str) -> str | None:
    """Return the text of a function or method, with its decorators."""
    text = path.read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((n for n in body if getattr(n, "name", None) == part), None)
        if found is None:
            return None
        body = getattr(found, "body", [])
    assert found is not None
    first = min([found.lineno, *(d.lineno for d in getattr(found, "decorator_list", []))])
    return "".join(text.splitlines(keepends=True)[first - 1 : found.end_lineno])


def state(tree: Path, target: Target) -> str:
    """Return what `install` does with the name in this source tree."""
    path = tree / f"{target.module.replace('.', '/')}.py"
    text = definition(path, target.name) if path.exists() else None
    if text is None:
        return "-"
    digest = hashlib.sha256(plain_text(text).encode())
    for used in target.uses:
        part = definition(path, used)
        digest.update(plain_text(part).encode() if part else b"")
    return "replaced" if digest.hexdigest()[:DIGITS] in target.texts else "kept"


def page(trees: dict[str, Path]) -> str:
    targets = list(TARGETS)
    extra = [rule.target for rule in RULES if rule.name in FIRST_RULES]
    targets += [target for target in extra if target not in targets]
    lines = [
        "# Versions of SkyRL",
        "",
        "What `install()` does with each function, by version: replaced; kept, because its text is",
        "not one that the stand-in is known to equal; or not there (-). The last ones are replaced",
        'with mode "fixed" alone. Made by `python_tests/test_skyrl_versions.py`.',
        "",
        f"| function | {' | '.join(trees)} |",
        f"|---|{'---|' * len(trees)}",
    ]
    for target in targets:
        cells = " | ".join(state(tree, target) for tree in trees.values())
        lines.append(f"| `{target.name}` | {cells} |")
    return "\n".join(lines) + "\n"


@pytest.mark.peers
@pytest.mark.spec("17.3")
def test_the_page_is_todays() -> None:
    made = page({version: source_tree(version) for version in VERSIONS})
    if os.environ.get("SKYRL_FAST_WRITE"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made


@pytest.mark.peers
@pytest.mark.spec("17.3")
def test_every_function_of_this_skyrl_is_known() -> None:
    skyrl = pytest.importorskip("skyrl", reason="SkyRL is not installed")
    tree = Path(skyrl.__file__).parent.parent
    unknown = [target.name for target in TARGETS if state(tree, target) == "kept"]
    assert unknown == []
