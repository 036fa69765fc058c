"""The diffs of docs/upstream: each applies to SkyRL's source tree, where its test needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import pytest

from skyrl_fast.integrations.skyrl.rules import RULES

FOLDER = Path(__file__).parents[2] / "docs" / "upstream"
NAMES = [rule.name for rule in RULES]
TESTS = Path("tests", "train", "test_upstream.py")
SECONDS = 600


@pytest.mark.spec("dropin.upstream")
def test_every_rule_has_a_diff_and_a_test() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.diff")) == sorted(NAMES)
    text = (FOLDER / TESTS.name).read_text()
    assert all(f"\ndef test_{name}(" in text for name in NAMES)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of SkyRL's source tree with the tests of the diffs."""
    found = find_spec("skyrl")
    root = Path(found.origin).parents[1] if found is not None and found.origin else None
    if root is None or not (root / "tests" / "train").is_dir():
        pytest.skip("no source tree of SkyRL: scripts/peers.py --skyrl")
    copy = tmp_path_factory.mktemp("skyrl")
    shutil.copytree(root / "skyrl", copy / "skyrl", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / TESTS).parent.mkdir(parents=True)
    shutil.copy(FOLDER / TESTS.name, copy / TESTS)
    return copy


@pytest.fixture(scope="module")
def failed_before(tree: Path) -> set[str]:
    return _names_of_failed_tests(tree)


def _names_of_failed_tests(tree: Path, *only: str) -> set[str]:
    """Run the tests of the diffs; return the names of those that failed, without parameters."""
    result = tree / "result.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    paths = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [*command, str(TESTS), "--junitxml", str(result), *only],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{paths}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode in (0, 1), done.stdout[-2000:]  # 1: tests ran, and some failed
    cases = list(ElementTree.parse(result).getroot().iter("testcase"))
    assert cases
    return {
        str(case.get("name")).partition("[")[0].removeprefix("test_")
        for case in cases
        if len(case) > 0
    }


def _apply(tree: Path, name: str, *options: str) -> None:
    diff = FOLDER / f"{name}.diff"
    subprocess.run(["git", "apply", *options, str(diff)], cwd=tree, check=True)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.spec("dropin.upstream")
@pytest.mark.parametrize("name", NAMES)
def test_diff_makes_its_failing_test_pass(tree: Path, failed_before: set[str], name: str) -> None:
    assert name in failed_before
    _apply(tree, name)
    try:
        assert not _names_of_failed_tests(tree, "-k", f"test_{name}")
    finally:
        _apply(tree, name, "--reverse")


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.spec("dropin.upstream")
def test_all_diffs_apply_together(tree: Path) -> None:
    for name in NAMES:
        _apply(tree, name)
    try:
        assert not _names_of_failed_tests(tree)
    finally:
        for name in reversed(NAMES):
            _apply(tree, name, "--reverse")
