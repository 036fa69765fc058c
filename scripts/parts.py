"""A long check in parts: each has a time limit, all run, and a later call resumes the rest.

A part is a command. Its log is kept in a folder; its result, and the end of its log, are added to
two files of another as soon as it ends, so that an interrupted check keeps them. Parts that have
passed with the same sources are not run again. With a number of seconds in all, a part starts only
if its predicted seconds are left.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PASSED = "passed"
LEFT = "not run yet"
SITE = "site"  # folder of installed wheels
PREDICTED = 10.0  # seconds of a part that does not say
STOP_SECONDS = 5.0  # from SIGTERM to SIGKILL
LAST_LINES = 15  # printed of a failed part's log
KEPT_LINES = 120  # of each part's log among the results
SOURCES = ("bench/gpu", "csrc", "python_tests", "scripts", "skyrl_fast")
NOT_SOURCES = ":!bench/results"  # whose commit changes no result


@dataclass(frozen=True, slots=True)
class Part:
    """One command of a check.

    Args:
        name: also of its log file.
        command: program and arguments, run in the repository's folder.
        limit: seconds after which it is stopped.
        predicted: seconds that it should take; with fewer left it is not started.
        environment: further variables.
        needs: modules without which it cannot run.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    predicted: float = PREDICTED
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


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
    results: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    sources: str | None = None,
) -> int:
    """Run the parts that have not passed; print a summary; return the exit status.

    Args:
        title: of the check, for messages.
        parts: in order of importance.
        folder: of logs.
        options: parsed `add_options`.
        results: folder of the results; None: `folder`. Its `gpu_parts.json` says what has passed.
        clock: in seconds.
        sources: their state, whose results are kept; None: `commit()`.

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
            seconds = f"{part.predicted:4.0f} s, at most {part.limit:3.0f} s"
            print(f"{part.name:18} {seconds}  {shlex.join(part.command)}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(folder / SITE), os.environ.get("PYTHONPATH", str(ROOT))])
    sources = commit() if sources is None else sources
    record = _Results(folder if results is None else results, sources)
    end = clock() + options.seconds if options.seconds else float("inf")
    todo = [p for p in parts if p.name in chosen and (options.again or not record.passed(p.name))]
    for part in todo:
        result = _run(part, folder, end - clock(), path)
        if result is not None:
            record.add(part, result, folder / f"{part.name}.log")
    outcomes = {name: record.of(name) for name in chosen}
    print(f"\n{title}:")
    for name, outcome in outcomes.items():
        print(f"  {name}: {outcome}")
    left = sum(outcome == LEFT for outcome in outcomes.values())
    if left:
        print(f"{title}: {left} of {len(outcomes)} parts are left; the same command runs them")
    return 0 if all(outcome.startswith(PASSED) for outcome in outcomes.values()) else 1


class _Results:
    """Results by part, of one state of the sources, in two files that are written after each."""

    def __init__(self, folder: Path, sources: str) -> None:
        self._sources = sources
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "gpu_parts.json"
        self._log = folder / "gpu_log.txt"
        self._results: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            stored = json.loads(self._path.read_text())
            if stored["commit"] == sources:
                self._results = stored["parts"]
        if not self._results:
            self._log.unlink(missing_ok=True)

    def passed(self, name: str) -> bool:
        return bool(self._results.get(name, {}).get("result") == PASSED)

    def of(self, name: str) -> str:
        if name not in self._results:
            return LEFT
        found = self._results[name]
        seconds = f"{found['seconds']:.0f} s (predicted: {found['predicted']:.0f})"
        return f"{found['result']} in {seconds}; {found['last_line']}"

    def add(self, part: Part, result: dict[str, Any], log: Path) -> None:
        self._results[part.name] = result | {"predicted": part.predicted}
        content = {"commit": self._sources, "parts": self._results}
        self._path.write_text(json.dumps(content, indent=1) + "\n")
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        with self._log.open("a") as out:
            out.write(f"== {part.name}: {self.of(part.name)}\n")
            out.writelines(f"{line}\n" for line in lines[-KEPT_LINES:])


def commit(root: Path = ROOT) -> str:
    """Return the last commit of the sources, marked if they differ; outside of git, a digest."""
    git = ("git", "-C", str(root))
    last = (*git, "log", "-1", "--format=%h", "--", ".", NOT_SOURCES)
    changed = (*git, "status", "--porcelain", "--untracked-files=no", "--", ".", NOT_SOURCES)
    try:
        found = [subprocess.run(command, capture_output=True) for command in (last, changed)]
    except FileNotFoundError:
        return source_digest(root)
    if any(done.returncode for done in found) or not found[0].stdout.strip():
        return source_digest(root)
    mark = "-dirty" if found[1].stdout.strip() else ""
    return found[0].stdout.decode().strip() + mark


def source_digest(root: Path) -> str:
    """Return a digest of the files of `SOURCES`, without compiled ones."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix not in (".pyc", ".so"):
                digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
                digest.update(path.read_bytes())
    return f"sources-{digest.hexdigest()[:12]}"


def _installation(wheels: Path, site: Path) -> Part:
    """Return the part that installs a folder's wheels."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
    files = sorted(map(str, wheels.glob("*.whl")))
    return Part("wheels", (*pip, "--upgrade", "--target", str(site), *files), 120, 20)


def _run(part: Part, folder: Path, seconds: float, python_path: str) -> dict[str, Any] | None:
    """Run a part within the seconds; return its result; None: too few seconds."""
    limit = min(part.limit, seconds - STOP_SECONDS)
    if limit < min(part.predicted, part.limit):
        return None
    log = folder / f"{part.name}.log"
    if missing := _missing(part, folder / SITE):
        log.unlink(missing_ok=True)
        print(f"{part.name}: failed: {missing}", flush=True)
        return {"result": f"failed: {missing}", "seconds": 0.0, "last_line": ""}
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
    return {
        "result": result,
        "seconds": time.monotonic() - began,
        "last_line": "".join(lines[-1:]),
    }


def _missing(part: Part, site: Path) -> str:
    """Return what the part needs and is not here, or ""."""
    if shutil.which(part.command[0]) is None:
        return f"{part.command[0]} is not on PATH"
    modules = [
        name
        for name in part.needs
        if importlib.util.find_spec(name) is None and not (site / name).is_dir()
    ]
    if modules:
        return f"expected {', '.join(modules)}, got no such module; --wheels FOLDER installs them"
    return ""


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
