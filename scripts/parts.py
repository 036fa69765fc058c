"""A long check in parts: each has a time limit, all run, and a later call resumes the rest.

A part is a command. Its log and result are kept in a folder; parts that have passed at the same
commit are not run again. With a number of seconds in all, the last parts get what is left, or are
left for the next call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PASSED = "passed"
LEFT = "not run yet"
SITE = "site"  # folder of installed wheels
SHORTEST = 10.0  # seconds: a part is not started with less
STOP_SECONDS = 5.0  # from SIGTERM to SIGKILL
LAST_LINES = 15  # of a failed part's log


@dataclass(frozen=True, slots=True)
class Part:
    """One command of a check.

    Args:
        name: also of its log file.
        command: program and arguments, run in the repository's folder.
        limit: seconds after which it is stopped.
        environment: further variables.
        group: parts next to each other with the same group run at the same time; "": alone.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    group: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run_parts` takes."""
    parser.add_argument("--seconds", type=float, help="in all; the rest is left for the next call")
    parser.add_argument("--parts", default="", help="names, comma-separated; default: all")
    parser.add_argument("--again", action="store_true", help="also run parts that have passed")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install without a network")
    parser.add_argument("--list", action="store_true", help="print the parts and their limits")
    parser.add_argument(
        "--dry", action="store_true", help="try the commands without a GPU, with tiny sizes"
    )


def run_parts(
    title: str,
    parts: Sequence[Part],
    folder: Path,
    options: argparse.Namespace,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the parts that have not passed; print a summary; return the exit status.

    Args:
        title: of the check, for messages.
        parts: in order of importance.
        folder: of logs and results.
        options: parsed `add_options`.
        clock: in seconds.

    Raises:
        SystemExit: a name in `--parts` is unknown.
    """
    if options.wheels is not None:
        parts = [_installation(options.wheels, folder / SITE), *parts]
    names = [part.name for part in parts]
    chosen = [name for name in options.parts.split(",") if name] or names
    if unknown := [name for name in chosen if name not in names]:
        raise SystemExit(f"{title}: no part {', '.join(unknown)}; there are {', '.join(names)}")
    if options.list:
        for part in parts:
            print(f"{part.name:24} {part.limit:5.0f} s  {shlex.join(part.command)}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(folder / SITE), os.environ.get("PYTHONPATH", str(ROOT))])
    results = _Results(folder / "parts.json")
    end = clock() + options.seconds if options.seconds else float("inf")
    todo = [p for p in parts if p.name in chosen and (options.again or not results.passed(p.name))]
    for group, members in itertools.groupby(todo, key=lambda part: part.group):
        batch = list(members)
        with ThreadPoolExecutor(len(batch) if group else 1) as pool:
            for name, result in pool.map(
                lambda part: _run(part, folder, end - clock(), path), batch
            ):
                if result is not None:
                    results.add(name, result)
    outcomes = {name: results.of(name) for name in chosen}
    print(f"\n{title}:")
    for name, outcome in outcomes.items():
        print(f"  {name}: {outcome}")
    left = sum(outcome == LEFT for outcome in outcomes.values())
    if left:
        print(f"{title}: {left} of {len(outcomes)} parts are left; the same command runs them")
    return 0 if all(outcome.startswith(PASSED) for outcome in outcomes.values()) else 1


class _Results:
    """Results by part, of one commit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, dict[str, Any]] = {}
        if path.exists():
            stored = json.loads(path.read_text())
            if stored["commit"] == commit():
                self._results = stored["parts"]

    def passed(self, name: str) -> bool:
        return bool(self._results.get(name, {}).get("result") == PASSED)

    def of(self, name: str) -> str:
        if name not in self._results:
            return LEFT
        found = self._results[name]
        return f"{found['result']} in {found['seconds']:.0f} s; {found['last_line']}"

    def add(self, name: str, result: dict[str, Any]) -> None:
        self._results[name] = result
        content = {"commit": commit(), "parts": self._results}
        self._path.write_text(json.dumps(content, indent=1) + "\n")


def commit() -> str:
    """Return the commit of the sources, marked if they differ from it; "unknown" outside of git."""
    git = ["git", "-C", str(ROOT)]
    try:
        found = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.decode().strip() if found.returncode == 0 else "unknown"


def _installation(wheels: Path, site: Path) -> Part:
    """Return the part that installs a folder's wheels."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
    files = sorted(map(str, wheels.glob("*.whl")))
    return Part("wheels", (*pip, "--upgrade", "--target", str(site), *files), 120)


def _run(
    part: Part, folder: Path, seconds: float, python_path: str
) -> tuple[str, dict[str, Any] | None]:
    """Run a part within the seconds; return its name and result (None: too few seconds)."""
    limit = min(part.limit, seconds - STOP_SECONDS)
    if limit < min(SHORTEST, part.limit):
        return part.name, None
    if shutil.which(part.command[0]) is None:
        missing = f"failed: {part.command[0]} is not on PATH"
        print(f"{part.name}: {missing}", flush=True)
        return part.name, {"result": missing, "seconds": 0.0, "last_line": ""}
    log = folder / f"{part.name}.log"
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": python_path} | dict(part.environment),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that its children are stopped with it
        )
        try:
            status = process.wait(limit)
            result = PASSED if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            result = f"stopped after {limit:.0f} s"
        finally:
            _stop(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    shown = lines[-1:] if result == PASSED else lines[-LAST_LINES:]
    print("\n  ".join([f"{part.name}: {result}", *shown]), flush=True)
    found = {
        "result": result,
        "seconds": time.monotonic() - began,
        "last_line": "".join(lines[-1:]),
    }
    return part.name, found


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
