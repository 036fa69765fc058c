"""An untrusted query on a SQLite file that it cannot change.

The connection is read-only, an authorizer accepts only reading statements, and time, rows and
memory are limited. Nothing outside the file can be accessed.

`query_process` runs this file as a program, which can be killed inside a long SQL function. It
therefore imports only the standard library.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import sqlite3
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

Row = tuple[Any, ...]

NUMBER_BYTES = 8  # of a number or NULL; as a Python object it takes up to four times as much
OPERATIONS_PER_CHECK = 1_000  # of SQLite's virtual machine; with large values each takes long
HEAP_BYTES = 1 << 30  # heap of SQLite in this process; it can only be lowered
SMALL_BYTES = 64 << 20  # memory of a query's process, on top of what it has at the start
LARGE_BYTES = 3 << 29  # memory of the one process that runs a larger query, with its result
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,  # bytes of one value or row
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,  # matching costs pattern times text
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
READING_PRAGMAS = frozenset(
    {
        "table_info",
        "table_xinfo",
        "table_list",
        "index_list",
        "index_info",
        "index_xinfo",
        "foreign_key_list",
    }
)
FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer"})


class QueryError(RuntimeError):
    """The query was refused or failed; the message is SQLite's, or names the limit."""


class QueryTimeoutError(QueryError):
    """The query took too long."""


class QueryMemoryError(QueryError):
    """Memory ran out, which need not be the query's fault."""


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """Limits of a query.

    Args:
        max_rows: most rows of the result, before duplicates are removed.
        max_bytes: most bytes of the result, a number counted as NUMBER_BYTES.
        cut: whether a larger result is truncated at the limit; False: it is an error.
    """

    seconds: float
    max_rows: int
    max_bytes: int
    cut: bool = False


def execute(path: Path, sql: str, limits: QueryLimits) -> list[Row]:
    """Return the distinct rows of the result, in the query's order.

    One call of an SQL function is not interrupted: see `query_process.run_query`.

    Raises:
        QueryTimeoutError: it ran longer than `limits.seconds`.
        QueryMemoryError: memory ran out.
        QueryError: it is no reading query, is invalid, or its result is too large.
    """
    deadline = time.monotonic() + limits.seconds
    late = False

    def check() -> int:
        nonlocal late
        late = time.monotonic() > deadline
        return late  # any value but 0 ends the query

    connection = None
    try:
        connection = _connect(path, limits.seconds)
        connection.set_progress_handler(check, OPERATIONS_PER_CHECK)
        return _fetch(connection.execute(sql), limits)
    except MemoryError:
        raise QueryMemoryError("out of memory") from None
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        if late:
            raise QueryTimeoutError(f"longer than {limits.seconds:g} s") from None
        raise QueryError(str(error)) from None
    finally:
        if connection is not None:
            connection.close()


def _connect(path: Path, seconds: float) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, timeout=seconds)
    try:
        connection.execute(f"PRAGMA hard_heap_limit={HEAP_BYTES}")
        # Sorting and recursion stay under that limit instead of filling the disk.
        connection.execute("PRAGMA temp_store=MEMORY")
        for limit, value in LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(_authorize)
    except BaseException:
        connection.close()
        raise
    return connection


def _authorize(action: int, first: str | None, second: str | None, *_place: str | None) -> int:
    """Return whether SQLite may do one action; it asks for every action of a statement."""
    allowed = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
    if action == sqlite3.SQLITE_FUNCTION:
        allowed = (second or "").lower() not in FORBIDDEN_FUNCTIONS
    elif action == sqlite3.SQLITE_PRAGMA:
        allowed = (first or "").lower() in READING_PRAGMAS
    elif action == sqlite3.SQLITE_UPDATE:
        # Asked for table-valued functions such as json_each; a real change is still refused.
        allowed = first == "sqlite_master"
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _fetch(cursor: sqlite3.Cursor, limits: QueryLimits) -> list[Row]:
    rows: dict[Row, None] = {}
    num_bytes = 0
    for number, row in enumerate(cursor, start=1):
        num_bytes += sum(map(_size, row))
        if number > limits.max_rows or num_bytes > limits.max_bytes:
            if limits.cut:
                break
            raise QueryError(
                f"the result is larger than {limits.max_rows:,} rows or {limits.max_bytes:,} bytes"
            )
        rows[row] = None
    return list(rows)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return NUMBER_BYTES


def _serve() -> None:
    """Answer requests on stdin until it ends; each is a line of JSON."""
    # A request has `path`, `queries`, `limits` and `lock` (of a large one, or null). For each query
    # there is one answer, a line of JSON: `error` and `message`; or `num_bytes` of the rows that
    # follow, for one query; or `equal`, whether the second of two queries has the rows of the
    # first. An empty line says that the clock of the first query starts: a large one waits for its
    # turn.
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    used = _data_bytes()
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        large = request["lock"] is not None
        if large:
            fcntl.flock(os.open(request["lock"], os.O_RDWR | os.O_NOFOLLOW), fcntl.LOCK_EX)
        if used is not None:
            most = used + (LARGE_BYTES if large else SMALL_BYTES)
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
        _say(b"\n")
        _answer(Path(request["path"]), request["queries"], QueryLimits(*request["limits"]))
        if large:
            return  # the lock ends with the process


def _answer(path: Path, queries: list[str], limits: QueryLimits) -> None:
    found: list[list[Row]] = []
    for sql in queries:
        try:
            found.append(execute(path, sql, limits))
            if len(queries) == 1:
                rows = b"".join(_line([_plain(value) for value in row]) for row in found[0])
                _say(_line({"num_bytes": len(rows)}) + rows)
            elif len(found) == 1:
                _say(_line({}))
            else:
                _say(_line({"equal": set(found[0]) == set(found[1])}))
        except (QueryError, MemoryError) as error:
            out_of_memory = isinstance(error, MemoryError)
            if out_of_memory:
                kind = QueryMemoryError.__name__
            else:
                kind = type(error).__name__
            _say(_line({"error": kind, "message": str(error) or "out of memory"}))
            return


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return value


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _data_bytes() -> int | None:
    """Return this process's private memory as RLIMIT_DATA counts it; None: not on Linux."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return int(status.partition("VmData:")[2].split()[0]) << 10


def _watch_parent(parent: int) -> None:
    """End this process soon after its parent, also in the middle of a query."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    _serve()
