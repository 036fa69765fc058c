"""Copies of the sources, to be built and tested in another state than the tree's. Stdlib only."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# An editable install finds the package in `ROOT` first, wherever Python runs.
SITE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
"""


def copy_sources(tree: Path, folders: Iterable[str], files: Iterable[str]) -> None:
    """Copy folders and files of the repository to `tree`, without built modules.

    Python imports the copy if `tree` is in PYTHONPATH, also where the package is installed.
    """
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in folders:
        shutil.rmtree(tree / folder, ignore_errors=True)
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    for name in files:
        shutil.copy(ROOT / name, tree)
    (tree / "sitecustomize.py").write_text(SITE, encoding="utf-8")
