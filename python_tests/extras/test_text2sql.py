"""Untrusted SQL: what a query may do, and the text2sql environment."""

import hashlib
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from skyrl_fast.extras.text2sql.env import (
    KEPT_TEXTS,
    LONGEST_KEPT,
    TableTexts,
    Text2SqlEnv,
    render_rows,
)
from skyrl_fast.extras.text2sql.query import (
    QueryError,
    QueryLimits,
    QueryMemoryError,
    QueryTimeoutError,
)
from skyrl_fast.extras.text2sql.query_process import run_query

FEW = QueryLimits(seconds=5.0, max_rows=100, max_bytes=10_000)
SHORT = QueryLimits(seconds=0.3, max_rows=100, max_bytes=10_000)
GOLD = "SELECT price FROM item WHERE name = 'ink'"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    folder = tmp_path / "spider" / "database" / "the shop?"  # needs quoting in a URI
    folder.mkdir(parents=True)
    path = folder / "the shop?.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE item (name TEXT, price INTEGER)")
        connection.execute("INSERT INTO item VALUES ('pen', 3), ('ink', 5), ('pen', 3)")
    return path


def test_rows_are_distinct_and_in_query_order(database: Path) -> None:
    sql = "SELECT name, price FROM item ORDER BY price DESC"
    assert run_query(database, sql, FEW) == [("ink", 5), ("pen", 3)]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT sql FROM sqlite_master",
        "PRAGMA table_info(item)",
        "SELECT name FROM pragma_table_info('item')",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 5) SELECT x FROM n",
        "SELECT count(*), upper(name) FROM item GROUP BY name HAVING price > 1",
        "SELECT value FROM json_each('[1, 2]')",
        "EXPLAIN QUERY PLAN SELECT * FROM item",
    ],
)
def test_reading_is_allowed(database: Path, sql: str) -> None:
    assert run_query(database, sql, FEW)


@pytest.mark.spec("rollout.sql-read-only")
@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO item VALUES ('x', 1)",
        "UPDATE item SET price = 0",
        "DELETE FROM item",
        "DROP TABLE item",
        "CREATE TABLE other (a)",
        "CREATE TEMP TABLE other (a)",
        "CREATE VIEW other AS SELECT 1",
        "UPDATE sqlite_master SET sql = 'x'",
        "ATTACH '{folder}/other.sqlite' AS other",
        "ATTACH ':memory:' AS other",
        "DETACH main",
        "VACUUM INTO '{folder}/copy.sqlite'",
        "PRAGMA query_only = OFF",
        "PRAGMA journal_mode = WAL",
        "PRAGMA writable_schema = ON",
        "PRAGMA hard_heap_limit = 1",
        "PRAGMA database_list",
        "SELECT * FROM pragma_database_list",
        "SELECT load_extension('{folder}/evil.so')",
        "BEGIN",
        "SAVEPOINT a",
        "ANALYZE",
        "SELECT 1; DROP TABLE item",
    ],
)
def test_statements_other_than_reads_are_refused(database: Path, sql: str) -> None:
    before = hashlib.sha256(database.read_bytes()).hexdigest()
    with pytest.raises(QueryError):
        run_query(database, sql.format(folder=database.parent), FEW)
    assert hashlib.sha256(database.read_bytes()).hexdigest() == before
    assert [p.name for p in database.parent.iterdir()] == [database.name]


@pytest.mark.spec("rollout.sql-limits")
@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n",
        "WITH RECURSIVE n(x) AS (SELECT randomblob(90000) UNION SELECT randomblob(90000) FROM n) "
        "SELECT count(*) FROM n",
        "SELECT count(*) FROM " + ", ".join(f"item AS i{k}" for k in range(30)),
    ],
)
def test_expensive_query_is_stopped_at_its_time_limit(database: Path, sql: str) -> None:
    started = time.perf_counter()
    with pytest.raises(QueryTimeoutError, match=r"longer than 0\.3 s"):
        run_query(database, sql, SHORT)
    assert time.perf_counter() - started < 5.0  # generous: machines may pause


@pytest.mark.parametrize("sql", ["SELECT randomblob(1e9)", "SELECT hex(zeroblob(900000))"])
def test_value_size_is_limited(database: Path, sql: str) -> None:
    with pytest.raises(QueryError, match="too big"):
        run_query(database, sql, FEW)


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x, 'abcde' FROM n"


@pytest.mark.parametrize(
    ("limits", "rows"), [((10, 1000), 10), ((1000, 130), 10)], ids=["rows", "bytes"]
)
def test_large_result_is_truncated_or_refused(
    database: Path, limits: tuple[int, int], rows: int
) -> None:
    cut = QueryLimits(5.0, *limits, cut=True)
    assert run_query(database, ENDLESS, cut) == [(k + 1, "abcde") for k in range(rows)]
    with pytest.raises(QueryError, match="the result is larger than"):
        run_query(database, ENDLESS, QueryLimits(5.0, *limits))


def test_numbers_count_towards_the_result_size(database: Path) -> None:
    many = ENDLESS.replace("'abcde'", ", ".join(f"x + {k}.5" for k in range(1_249)))
    few = QueryLimits(5.0, max_rows=1_000, max_bytes=100_000, cut=True)
    assert len(run_query(database, many, few)) == 10  # of 1250 numbers


def test_file_that_is_not_a_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(b"no database " * 100)
    for name in ("x.sqlite", "absent.sqlite"):
        with pytest.raises(QueryError):
            run_query(tmp_path / name, "SELECT * FROM item", FEW)
    assert not (tmp_path / "absent.sqlite").exists()


# --- the environment ---------------------------------------------------------------------------


def make(
    database: Path, *, options: Mapping[str, Any] = MappingProxyType({}), **extras: Any
) -> Text2SqlEnv:
    row = {"db_id": database.stem, "data": "spider", "reward_spec": {"ground_truth": GOLD}}
    root = database.parents[3]
    return Text2SqlEnv({"db_path": str(root)}, {**row, "max_turns": 3, **extras}, **options)


@pytest.mark.spec("rollout.sql-db-id")
@pytest.mark.parametrize(
    "db_id", ["../../x", "..", ".", "", "/etc", "a/b", "a\\b", "a\0b", "c:d", 7, None]
)
def test_db_id_cannot_leave_its_folder(database: Path, db_id: Any) -> None:
    outside = database.parents[3] / "x"
    outside.mkdir()
    (outside / "x.sqlite").write_bytes(database.read_bytes())
    with pytest.raises(ValueError, match="db_id: expected the name of a database"):
        make(database, db_id=db_id)


def test_missing_row_values_are_named(database: Path) -> None:
    with pytest.raises(ValueError, match="the row lacks db_id, reward_spec"):
        Text2SqlEnv({"db_path": "x"}, {"data": "spider"})
    with pytest.raises(ValueError, match="data: expected one of synsql, spider, bird, got 'other'"):
        make(database, data="other")
    with pytest.raises(FileNotFoundError, match="Database file not found"):
        make(database, db_id="absent")


def test_errors_are_shown_without_local_paths(database: Path) -> None:
    seen = make(database).step("<sql>SELECT weight FROM item</sql>")["observations"][0]["content"]
    assert "Error executing SQL: no such column: weight, db file: the shop?.sqlite" in seen
    assert str(database.parent) not in seen


def test_solution_beyond_the_limits_gets_no_reward(database: Path) -> None:
    answer = make(database, options={"limits": SHORT}).step(
        f"<think>a</think><solution>{ENDLESS}</solution>"
    )
    assert (answer["done"], answer["reward"]) == (True, 0.0)


def both(database: Path, **extras: Any) -> list[Callable[[str], dict[str, Any]]]:
    import skyrl_gym
    from omegaconf import OmegaConf

    row = {"db_id": database.stem, "data": "spider", "reward_spec": {"ground_truth": GOLD}}
    row |= {"max_turns": 3, **extras}
    root = str(database.parents[3])
    original = skyrl_gym.make(
        "text2sql", env_config=OmegaConf.create({"db_path": root}), extras=dict(row)
    )
    return [original.step, Text2SqlEnv({"db_path": root}, row).step]


@pytest.mark.spec("rollout.sql-not-judged")
@pytest.mark.parametrize(
    ("gold", "sql", "message"),
    [
        ("SELECT weight FROM item", "SELECT 1", "the ground truth fails: no such column: weight"),
        (GOLD, "SELECT 1", "cannot be judged: out of memory"),
    ],
)
def test_solution_that_cannot_be_judged_is_an_error(
    database: Path, gold: str, sql: str, message: str
) -> None:
    def without_memory(*_: Any) -> bool:
        raise QueryMemoryError("out of memory")

    options = {"compare": without_memory} if gold == GOLD else {}
    env = make(database, options=options, reward_spec={"ground_truth": gold})
    with pytest.raises(RuntimeError, match=message):
        env.step(f"<think>a</think><solution>{sql}</solution>")


THINK = "<think>a</think>"


@pytest.mark.parametrize(
    "actions",
    [
        [f"{THINK}<sql>SELECT price FROM item WHERE name = 'pen'</sql>", "b"],
        [f"{THINK}<sql>SELECT 1 WHERE 0</sql>", "no tag at all", "b"],
        [f"{THINK}<solution>{GOLD}</solution>"],
        [f"{THINK}<solution>SELECT 5.0</solution>"],
        [f"{THINK}<solution>SELECT 4</solution>"],
        [f"{THINK}<solution>SELECT wrong syntax FROM</solution>"],
        [f"<solution>{GOLD}</solution>"],
        [f"{THINK}<sql>SELECT 1</sql>", f"<solution>{GOLD}</solution>"],
        ["a", "b", "c"],
    ],
)
def test_results_equal_skyrl_gym(database: Path, actions: list[str]) -> None:
    original, ours = both(database)
    for action in actions:
        want, got = original(action), ours(action)
        assert got["observations"] == list(want["observations"])
        assert (got["reward"], got["done"]) == (want["reward"], want["done"])


def test_long_result_is_formatted_as_by_skyrl_gym() -> None:
    import pandas

    rows = [(number, "x" * 30) for number in range(400)]
    head = pandas.DataFrame(rows).head(50).to_string(index=False)
    assert render_rows(rows) == f"Truncated to 50 lines since returned response too long: {head}"


def test_one_wide_cell_does_not_widen_all_rows() -> None:
    rows = [("x" * 1_000_000,), *[(str(number),) for number in range(9_999)]]
    assert len(render_rows(rows)) < 50 * 2_100


@pytest.mark.spec("rollout.sql-table-size")
def test_many_wide_cells_do_not_make_a_large_observation() -> None:
    rows = [("x" * 2_000,) * 1_900, *[(str(number),) * 1_900 for number in range(60)]]
    assert len(render_rows(rows)) < 2_000_000


def test_equal_numbers_of_other_types_have_texts_of_their_own() -> None:
    texts = TableTexts()
    shown = [texts.render([(value,)]).split() for value in (1, 1.0, "1.00", -0.0, 0, 0.0, None)]
    assert shown == [["0", text] for text in ("1", "1.0", "1.00", "-0.0", "0", "0.0", "None")]
    assert len(texts) == len(shown)
    assert [texts.render([(value,)]).split() for value in (1, 1.0)] == shown[:2]
    assert len(texts) == len(shown)


def test_only_short_tables_are_kept_and_not_many() -> None:
    texts = TableTexts()
    wide = [("x" * 3000,), *[(number,) for number in range(9)]]
    for rows in ([("x" * LONGEST_KEPT,)], [(number,) for number in range(51)], wide):
        assert texts.render(rows) == texts.render(rows)
        assert len(texts) == 0
    sizes = []
    for number in range(KEPT_TEXTS + 2):
        assert str(number) in texts.render([(number,)])
        sizes.append(len(texts))
    assert (max(sizes), sizes[-1]) == (KEPT_TEXTS, 2)


def test_tables_of_several_threads_are_complete() -> None:
    """pandas cuts cells at 50 characters where another thread writes a table at the same time."""
    import pandas

    texts = TableTexts(longest=0)  # each call writes one
    rows = [("CREATE TABLE parks (depth INT, weight INT, speed INT, age INT)",)]
    wanted = texts.render(rows)
    assert rows[0][0] in wanted
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            seen = set()
            for _ in range(200):
                pandas.reset_option("display.max_colwidth")  # one failure would hide the next
                seen |= set(threads.map(lambda _: texts.render(rows), range(4)))
    finally:
        sys.setswitchinterval(interval)
        pandas.reset_option("display.max_colwidth")
    assert seen == {wanted}
