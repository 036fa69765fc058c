"""Untrusted queries in processes that are killed at their limits.

SQLite cannot be interrupted within one call of a function, and some functions take hours for
arguments of a megabyte. So each query runs in a child process, one at a time per process, which is
killed if it is late. A child starts in 25 ms and is kept for other queries.

All queries share one limit of memory: each process has SMALL_BYTES. A query that needs more runs
again with LARGE_BYTES, one at a time among all processes of the user.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyrl_fast.extras.text2sql import query
from skyrl_fast.extras.text2sql.query import (
    QueryError,
    QueryLimits,
    QueryMemoryError,
    QueryTimeoutError,
    Row,
)
from skyrl_fast.system.child_environment import environment_without_key

KILL_FACTOR = 1.5  # times a query's limit, at which it ordinarily stops by itself
LAST_KILL_FACTOR = 1.9  # the same, with the time of a first attempt in SMALL_BYTES
START_SECONDS = 30.0  # for a process to start
TURN_SECONDS = 60.0  # for a large query to wait until no other one runs
MAX_IDLE = 32  # processes that are kept
ERRORS = {error.__name__: error for error in (QueryError, QueryTimeoutError, QueryMemoryError)}


class TruthError(RuntimeError):
    """The query that others are compared with failed; the cause is its QueryError."""


def run_query(path: Path, sql: str, limits: QueryLimits) -> list[Row]:
    """Return the distinct rows of the result, in the query's order.

    Raises:
        QueryTimeoutError: it ran longer than `limits.seconds`; over within twice that time.
        QueryMemoryError: memory ran out, or its process ended.
        QueryError: it is no reading query, is invalid, or its result is too large.
    """
    rows: list[Row] = _ask(path, [sql], limits)
    return rows


def same_rows(path: Path, sql: str, truth: str, limits: QueryLimits) -> bool:
    """Return whether two queries, each within the limits, have the same distinct rows in any order.

    Raises:
        QueryTimeoutError, QueryMemoryError, QueryError: as `run_query`, of `sql`.
        TruthError: the same, of `truth`.
    """
    equal: bool = _ask(path, [sql, truth], limits)
    return equal


def _ask(path: Path, queries: Sequence[str], limits: QueryLimits) -> Any:
    started = time.monotonic()
    kill_seconds = KILL_FACTOR * limits.seconds
    try:
        return _ask_process(path, queries, limits, kill_seconds, large=False)
    except (QueryMemoryError, TruthError) as error:
        if not isinstance(error.__cause__ or error, QueryMemoryError):
            raise
    left = LAST_KILL_FACTOR * limits.seconds - (time.monotonic() - started)
    kill_seconds = min(kill_seconds, max(left, limits.seconds / 2))
    return _ask_process(path, queries, limits, kill_seconds, large=True)


def _ask_process(
    path: Path, queries: Sequence[str], limits: QueryLimits, kill_seconds: float, *, large: bool
) -> Any:
    request = {
        "path": os.fspath(path.absolute()),
        "queries": list(queries),
        "limits": [limits.seconds, limits.max_rows, limits.max_bytes, limits.cut],
        "lock": lock_path() if large else None,
    }
    process = _borrow_process()
    usable = False
    try:
        process.send(request, TURN_SECONDS if large else START_SECONDS)
        said: dict[str, Any] = {}
        for number in range(len(queries)):
            said = _said(process, kill_seconds, limits)
            if "error" in said:
                usable = not large
                error = ERRORS[said["error"]](said["message"])
                if number == 0:
                    raise error
                raise TruthError(str(error)) from error
        if "equal" in said:
            answer = said["equal"]
        else:
            answer = process.rows(said["num_bytes"])
        usable = not large
        return answer
    finally:
        if usable and process.alive():
            _keep(process)
        else:
            process.end()


def _said(process: QueryProcess, kill_seconds: float, limits: QueryLimits) -> dict[str, Any]:
    """Return the answer to a query; also if its process is late or gone."""
    try:
        said: dict[str, Any] = json.loads(process.line(kill_seconds))
    except TimeoutError:
        return {"error": "QueryTimeoutError", "message": f"longer than {limits.seconds:g} s"}
    except EOFError:
        return {"error": "QueryMemoryError", "message": "out of memory: its process ended"}
    return said


_idle: list[QueryProcess] = []
_idle_lock = threading.Lock()


def _borrow_process() -> QueryProcess:
    with _idle_lock:
        while _idle:
            process = _idle.pop()
            if process.alive():
                return process
            process.end()
    return QueryProcess()


def _keep(process: QueryProcess) -> None:
    with _idle_lock:
        if len(_idle) < MAX_IDLE:
            _idle.append(process)
            return
    process.end()


@atexit.register
def _end_idle() -> None:
    with _idle_lock:
        while _idle:
            _idle.pop().end()


def _forget() -> None:
    """Begin without processes in a forked child: they are its parent's."""
    global _idle_lock
    _idle_lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


class QueryProcess:
    """A child process that runs `query.py` and answers one request at a time."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", query.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the parent, which decides
            env=environment_without_key(),
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._pipes = (self._child.stdin, self._child.stdout)
        self._answers = self._child.stdout.fileno()
        self._read = bytearray()
        self._late = False

    @property
    def pid(self) -> int:
        return self._child.pid

    def alive(self) -> bool:
        return not self._late and self._child.poll() is None

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in self._pipes:
            with suppress(OSError):  # the process has ended without reading the request
                pipe.close()

    def send(self, request: dict[str, Any], seconds: float) -> None:
        """Send a request, and wait until the clock of its first query starts."""
        try:
            self._pipes[0].write(json.dumps(request).encode() + b"\n")
            self._pipes[0].flush()
            self.line(seconds)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            if request["lock"] is None:
                what = "started"
            else:
                what = "had its turn"
            raise RuntimeError(f"no process for a query has {what} in {seconds:g} s") from error

    def line(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        while (end := self._read.find(b"\n")) < 0:
            self._read_more(deadline)
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line

    def rows(self, num_bytes: int) -> list[Row]:
        deadline = time.monotonic() + START_SECONDS
        while len(self._read) < num_bytes:
            self._read_more(deadline)
        lines = self._read[:num_bytes].splitlines()
        self._read.clear()
        result: list[Row] = []
        for line in lines:
            result.append(tuple(_value(value) for value in json.loads(line)))
        return result

    def _read_more(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1_000):
            self._late = True
            raise TimeoutError
        data = os.read(self._answers, 1 << 20)
        if not data:
            self._late = True
            raise EOFError
        self._read += data


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return value


def lock_path(parent: Path | None = None) -> str:
    """Return the file that the process of a large query locks, in a private folder of the user.

    Args:
        parent: of that folder; None: the folder of temporary files.

    Raises:
        RuntimeError: others can open the folder.
    """
    if parent is None:
        parent = Path(tempfile.gettempdir())
    folder = parent / f"skyrl_fast-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RuntimeError(f"{folder}: expected a folder that only this user can open")
    file = folder / "large_query.lock"
    file.touch(mode=0o600)
    return os.fspath(file)
