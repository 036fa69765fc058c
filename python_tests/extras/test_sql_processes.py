"""Queries in processes: killed inside a function, one limit of memory, and no process left."""

import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_fast.extras.text2sql import query, query_process
from skyrl_fast.extras.text2sql.query import (
    QueryError,
    QueryLimits,
    QueryMemoryError,
    QueryTimeoutError,
    execute,
)
from skyrl_fast.extras.text2sql.query_process import TruthError, run_query, same_rows

FEW = QueryLimits(seconds=5.0, max_rows=1_000, max_bytes=1 << 20)
SHORT = QueryLimits(seconds=0.4, max_rows=100, max_bytes=10_000)
SLACK_SECONDS = 5.0  # of a loaded machine; the calls below take from 10 seconds to hours
N = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT {}) "
LONG = "printf('%.*c', 999000, 'a')"
KEYS = "(SELECT json_group_object('{}' || x, x) FROM n)"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sql") / "shop.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE item (name TEXT, price INTEGER)")
        connection.execute("INSERT INTO item VALUES ('pen', 3), ('ink', 5), ('pen', 3)")
    return path


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT name, price FROM item ORDER BY price",
        "SELECT x'00ff', NULL, 1.5, -9223372036854775808, 9e999, 'a' || char(10, 0, 128512)",
        N.format(50) + "SELECT x, x * 0.1 FROM n",
        "SELECT 1 WHERE 0",
    ],
)
def test_rows_are_those_of_a_query_in_this_process(database: Path, sql: str) -> None:
    assert run_query(database, sql, FEW) == execute(database, sql, FEW)


@pytest.mark.spec("run.own-files")
def test_lock_in_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / f"skyrl_fast-{os.getuid()}"
    file = Path(query_process.lock_path(tmp_path))
    assert (file.parent, file.parent.stat().st_mode & 0o777) == (folder, 0o700)
    assert file.stat().st_mode & 0o777 == 0o600
    folder.chmod(0o755)
    with pytest.raises(RuntimeError, match="expected a folder that only this user can open"):
        query_process.lock_path(tmp_path)
    folder.chmod(0o700)
    folder.rename(tmp_path / "real")
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(RuntimeError, match="expected a folder that only this user can open"):
        query_process.lock_path(tmp_path)


@pytest.mark.spec("engine.key")
def test_processes_do_not_inherit_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_FAST_ENGINE_KEY", "k" * 32)
    process = query_process.QueryProcess()
    try:
        process.send({"path": "", "queries": [], "limits": [1, 1, 1, False], "lock": None}, 30.0)
        variables = Path(f"/proc/{process.pid}/environ").read_bytes()
    finally:
        process.end()
    assert b"PATH=" in variables
    assert b"SKYRL_FAST_ENGINE_KEY" not in variables


@pytest.mark.spec("rollout.sql-limits")
@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT trim({LONG}, printf('%.*c', 20000, 'b') || 'a')",
        f"SELECT instr({LONG}, printf('%.*c', 400000, 'a') || 'b')",
        f"SELECT replace({LONG}, printf('%.*c', 400000, 'a') || 'b', 'c')",
        N.format(60_000) + f"SELECT json_patch({KEYS.format('a')}, {KEYS.format('b')})",
    ],
    ids=["trim", "instr", "replace", "json_patch"],
)
def test_query_inside_one_function_is_killed_at_its_limit(database: Path, sql: str) -> None:
    run_query(database, "SELECT 1", FEW)
    started = time.monotonic()
    with pytest.raises(QueryTimeoutError, match=r"longer than 0\.4 s"):
        run_query(database, sql, SHORT)
    assert time.monotonic() - started < 2 * SHORT.seconds + SLACK_SECONDS
    assert run_query(database, "SELECT 1", FEW) == [(1,)]


def hostile_calls(name: str, num_args: int, kind: str, calls: int) -> Iterator[str]:
    """Yield queries that call a function with long and odd arguments."""
    source = random.Random(name)
    values = [
        LONG,
        "zeroblob(999000)",
        "printf('%.*c', 400000, 'a') || 'b'",
        "printf('%.*c', 20000, 'b') || 'a'",
        "printf('%.*c', 900, '[') || printf('%.*c', 900, ']')",
        "'[' || replace(printf('%.*c', 400000, 'x'), 'x', '1,') || '1]'",
        "'$' || replace(printf('%.*c', 20000, 'x'), 'x', '.a')",
        "'%' || replace(printf('%.*c', 400, 'x'), 'x', '%a')",
        *("'a'", "''", "'%999999999d'", "'now'", "NULL", "9e999", "-9223372036854775808", "3"),
    ]
    for _ in range(calls):
        number = num_args if num_args >= 0 else source.randrange(1, 5)
        arguments = ", ".join(source.choice(values) for _ in range(number))
        call = f"{name}({arguments})" if name[0].isalpha() else f"({arguments}) {name} '$'"
        yield f"SELECT length({call})"
        if kind == "w":
            yield N.format(400) + f"SELECT length({call}) FROM n"
            yield N.format(400) + f"SELECT max(v) FROM (SELECT {call} OVER (ORDER BY x) v FROM n)"


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_every_function_is_over_within_twice_the_limit(database: Path) -> None:
    with sqlite3.connect(":memory:") as connection:
        found = connection.execute("SELECT name, narg, type FROM pragma_function_list").fetchall()
    late, timeouts = [], 0
    for name, num_args, kind in sorted(set(found)):
        for sql in hostile_calls(name, num_args, kind, calls=16):
            started = time.monotonic()
            try:
                run_query(database, sql, SHORT)
            except QueryTimeoutError:
                timeouts += 1
            except QueryError:
                pass
            seconds = time.monotonic() - started
            if seconds > 2 * SHORT.seconds + SLACK_SECONDS:
                late.append((sql, seconds))
    assert late == []
    assert timeouts > 0


@pytest.mark.spec("rollout.sql-memory")
def test_query_that_needs_much_memory_runs_again_with_more(database: Path) -> None:
    many = N.format(120) + "SELECT count(*) FROM (SELECT DISTINCT randomblob(999000) FROM n)"
    assert run_query(database, many, QueryLimits(30.0, 10, 1_000)) == [(120,)]


@pytest.mark.spec("rollout.sql-memory")
def test_query_beyond_all_memory_is_no_ordinary_error(
    database: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = tmp_path / "query.py"  # with less memory for large queries: a fast test
    small.write_text(Path(query.__file__).read_text().replace("= 3 << 29", "= 96 << 20"))
    monkeypatch.setattr(query, "__file__", str(small))
    monkeypatch.setattr(query_process, "_idle", [])
    many = N.format(300) + "SELECT count(*) FROM (SELECT DISTINCT randomblob(999000) FROM n)"
    limits = QueryLimits(30.0, 10, 1_000)
    with pytest.raises(QueryMemoryError, match="out of memory"):
        run_query(database, many, limits)
    with pytest.raises(TruthError, match="out of memory"):
        same_rows(database, "SELECT 1", many, limits)


@pytest.mark.spec("rollout.sql-not-judged")
def test_rows_are_compared_as_sets(database: Path) -> None:
    assert same_rows(database, "SELECT price FROM item", "SELECT 5.0 UNION ALL SELECT 3", FEW)
    assert not same_rows(database, "SELECT price FROM item", "SELECT 5", FEW)
    with pytest.raises(QueryError, match="no such column: weight"):
        same_rows(database, "SELECT weight FROM item", "SELECT 5", FEW)
    with pytest.raises(TruthError, match="no such column: weight"):
        same_rows(database, "SELECT 5", "SELECT weight FROM item", FEW)


def test_process_ends_with_its_parent_in_the_middle_of_a_query(database: Path) -> None:
    code = (
        "import sys, time\n"
        "from skyrl_fast.extras.text2sql.query_process import QueryProcess\n"
        "request = {'path': sys.argv[1], 'queries': [sys.argv[2]], 'lock': None}\n"
        "process = QueryProcess()\n"
        "process.send({**request, 'limits': [600.0, 10, 1000, False]}, 30.0)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    sql = f"SELECT trim({LONG}, printf('%.*c', 900000, 'b') || 'a')"
    command = [sys.executable, "-c", code, str(database), sql]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(300):  # of 0.1 s
        if not os.path.exists(f"/proc/{pid}") or _is_zombie(pid):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} is alive")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
