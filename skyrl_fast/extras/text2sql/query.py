"""An untrusted query on a SQLite file that it cannot change.

The connection is read-only, an authorizer accepts only reading statements, and time, rows and
memory are limited. Nothing outside the file can be accessed.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

Row = tuple[Any, ...]

NUMBER_BYTES = 8  # of a number or NULL; as a Python object it takes up to four times as much
OPERATIONS_PER_CHECK = 1_000  # of SQLite's virtual machine; with large values each takes long
# SQLite's limit is for all connections of the process, and it can only be lowered.
HEAP_BYTES = 1 << 30
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


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """Limits of a query.

    Args:
        seconds: of run time; one call of an SQL function is not interrupted.
        max_rows: of the result, before duplicates are removed.
        max_bytes: of the result, a number counted as NUMBER_BYTES.
        cut: whether a larger result is truncated at the limit; False: it is an error.
    """

    seconds: float
    max_rows: int
    max_bytes: int
    cut: bool = False


def run_query(path: Path, sql: str, limits: QueryLimits) -> list[Row]:
    """Return the distinct rows of the result, in the query's order.

    Args:
        path: an existing SQLite file.
        sql: one untrusted statement.
        limits: of time and size.

    Raises:
        QueryTimeoutError: it ran longer than `limits.seconds`.
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
        raise QueryError("out of memory") from None
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
    return len(value) if isinstance(value, str | bytes) else NUMBER_BYTES
