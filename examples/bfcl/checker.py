"""The leaderboard's checker, in a process that stays up: one for each process that asks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from examples.tiny_model.recipe import environment_with

HERE = Path(__file__).resolve().parent
PACKAGES = Path("runs/bfcl/packages")  # relative to the working directory, as in config.yaml


class Checker:
    """A process with the leaderboard's checker; several threads may ask it.

    Args:
        packages: folder of the package bfcl-eval.

    Raises:
        FileNotFoundError: there is no such folder.
    """

    def __init__(self, packages: Path = PACKAGES) -> None:
        if not packages.is_dir():
            raise FileNotFoundError(f"{packages.resolve()}: no packages; run.py installs them")
        self._lock = Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "package.py"), "check"],
            env=environment_with(packages),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def check(self, row: Mapping[str, Any], calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return `valid`, and why it is not.

        Args:
            row: with the columns `category`, `functions` and `answers`.
            calls: `{name: arguments}`, each.

        Raises:
            RuntimeError: the process has ended.
        """
        question = {name: row[name] for name in ("category", "functions", "answers")}
        line = json.dumps({**question, "calls": list(calls)})
        with self._lock:
            said = self._ask(line)
        if not said:
            status = self._process.wait()
            raise RuntimeError(f"the process of the checker has ended with status {status}")
        return json.loads(said)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except BrokenPipeError:
            return ""

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@cache
def shared_checker() -> Checker:
    """Return the checker of this process."""
    return Checker()
