"""skyrl_gym's text2sql environment, with the model's SQL in a sandbox.

Actions, observations and rewards are those of `skyrl_gym`'s `SQLEnv`; queries run through
processes with limits, and rows are shown in the query's order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_fast.extras.text2sql.query import (
    QueryError,
    QueryLimits,
    QueryMemoryError,
    QueryTimeoutError,
    Row,
)
from skyrl_fast.extras.text2sql.query_process import TruthError, run_query, same_rows
from skyrl_fast.extras.text2sql.solution import first_between, solution_sql

FOLDERS = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
}
DEFAULT_MAX_TURNS = 5
# An observation shows at most 50 rows of a long result, so the rest need not be read.
LOOK = QueryLimits(seconds=5.0, max_rows=10_000, max_bytes=1 << 24, cut=True)
JUDGE = QueryLimits(seconds=30.0, max_rows=1_000_000, max_bytes=1 << 28)
LONG_OBSERVATION = 9_000  # characters; longer ones are truncated to ...
ROWS_OF_LONG_OBSERVATION = 50
WIDEST_CELL = 2_000  # characters of a cell, if the table would be larger than ...
LARGEST_TABLE = 1_000_000  # characters
WRONG_FORMAT = -1.0
WRONG = 0.0
RIGHT = 1.0
# pandas changes a display option of the process while it writes a table, and then restores it. A
# table that another thread is writing at that time would have its cells cut at 50 characters.
_writing = threading.Lock()
KEPT_TEXTS = 1024
LONGEST_KEPT = 4096  # characters of repr(rows); of the text LONG_OBSERVATION
INVALID_ACTION = (
    "Your previous action is invalid. Follow the format of outputting thinking process and sql "
    "tool, and try again."
)


class Text2SqlEnv:
    """One question about one database.

    Args:
        env_config: `db_path`, the folder of the data sets' databases.
        extras: `db_id`, `data` (synsql, spider or bird), `reward_spec` with the `ground_truth`
            query, and `max_turns`.
        limits: of the queries that judge a solution.
        compare: returns whether two queries have the same rows.

    Raises:
        ValueError: something is missing, or `db_id` is no plain name.
        FileNotFoundError: there is no such database.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any],
        extras: Mapping[str, Any],
        *,
        limits: QueryLimits = JUDGE,
        compare: Callable[[Path, str, str, QueryLimits], bool] = same_rows,
    ) -> None:
        self._limits = limits
        self._compare = compare
        absent = [key for key in ("db_id", "data", "reward_spec") if key not in extras]
        if absent:
            raise ValueError(f"the row lacks {', '.join(absent)}")
        self._database = database_file(env_config["db_path"], extras["data"], extras["db_id"])
        self._gold_sql = extras["reward_spec"]["ground_truth"]
        self._max_turns = extras.get("max_turns", DEFAULT_MAX_TURNS)
        self._turns = 0
        self._history: list[str] = []  # actions and observations

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self._turns += 1
        self._history.append(action)
        solved = "<solution>" in action and "</solution>" in action
        if solved or self._turns >= self._max_turns:
            return {"observations": [], "reward": self._judge(), "done": True, "metadata": {}}
        observation = self._look(action)
        self._history.append(observation)
        return {
            "observations": [{"role": "user", "content": observation}],
            "reward": 0.0,
            "done": False,
            "metadata": {},
        }

    def close(self) -> None:
        """Nothing is held between queries."""

    def _look(self, action: str) -> str:
        sql = first_between(action, "<sql>", "</sql>")
        if sql is None:
            seen = INVALID_ACTION
        else:
            seen = self._answer(sql)
        left = self._max_turns - self._turns
        reminder = f"<reminder>You have {left} turns left to complete the task.</reminder>"
        return f"\n\n<observation>{seen}\n{reminder}</observation>\n\n"

    def _answer(self, sql: str) -> str:
        try:
            return render_rows(run_query(self._database, sql, LOOK))
        except QueryTimeoutError:
            return f"SQL Timeout:\n{sql}"
        except QueryError as error:
            return f"Error executing SQL: {error}, db file: {self._database.name}"

    def _judge(self) -> float:
        sql = solution_sql("".join(self._history))
        if sql is None:
            return WRONG_FORMAT
        try:
            if self._compare(self._database, sql, self._gold_sql, self._limits):
                return RIGHT
            return WRONG
        except QueryMemoryError as error:
            raise RuntimeError(f"the solution cannot be judged: {error}") from error
        except TruthError as error:
            raise RuntimeError(f"{self._database.stem}: the ground truth fails: {error}") from error
        except QueryError:
            return WRONG


def database_file(db_path: str, data: str, db_id: str) -> Path:
    """Return the SQLite file of a database; `db_id` is one folder name and cannot leave it.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if data not in FOLDERS:
        raise ValueError(f"data: expected one of {', '.join(FOLDERS)}, got {data!r}")
    plain = (
        isinstance(db_id, str) and not set(db_id) & set("/\\\0:") and db_id not in ("", "..", ".")
    )
    if not plain:
        raise ValueError(f"db_id: expected the name of a database, got {db_id!r:.100}")
    file = Path(db_path) / FOLDERS[data] / db_id / f"{db_id}.sqlite"
    if not file.is_file():
        raise FileNotFoundError(f"Database file not found at: {file}")
    return file


class TableTexts:
    """Texts of short results by `repr(rows)`, which tells 1, 1.0 and True apart.

    The trajectories of a group often get the same rows, and pandas takes as long for a small table
    as its query does.

    Args:
        longest: characters of repr(rows) of a result that is kept.
    """

    def __init__(self, longest: int = LONGEST_KEPT) -> None:
        self._longest = longest
        self._texts: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def render(self, rows: Sequence[Row]) -> str:
        """Return what `render_rows` does."""
        if len(rows) > ROWS_OF_LONG_OBSERVATION or len(key := repr(rows)) > self._longest:
            return _render(rows)
        text = self._texts.get(key)
        if text is None:
            text = _render(rows)
            if len(self._texts) >= KEPT_TEXTS:
                self._texts.clear()
            if len(text) <= LONG_OBSERVATION:
                self._texts[key] = text
        return text


_kept = TableTexts()


def render_rows(rows: Sequence[Row]) -> str:
    """Return rows as the model sees them: a table without names, cut to 50 rows if it is long.

    Example:
        >>> print(render_rows([("pen", 3), ("ink", 5)]))
          0  1
        pen  3
        ink  5
    """
    return _kept.render(rows)


def _render(rows: Sequence[Row]) -> str:
    import pandas

    # Every cell is padded to its column's width: one wide cell would make all of them wide.
    if rows and len(rows) * sum(max(map(_width, column)) for column in zip(*rows, strict=True)) > (
        LARGEST_TABLE
    ):
        rows = rows[:ROWS_OF_LONG_OBSERVATION]
        widest = max(1, min(WIDEST_CELL, LARGEST_TABLE // (len(rows) * len(rows[0]))))
        return _cut(pandas.DataFrame([tuple(_narrow(value, widest) for value in r) for r in rows]))
    table = pandas.DataFrame(rows)
    text = _text(table)
    if len(text) <= LONG_OBSERVATION:
        return text
    return _cut(table)


def _cut(table: Any) -> str:
    shown = _text(table.head(ROWS_OF_LONG_OBSERVATION))
    return f"Truncated to 50 lines since returned response too long: {shown}"


def _text(table: Any) -> str:
    with _writing:
        text: str = table.to_string(index=False)
    return text


def _width(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return len(str(value))


def _narrow(value: Any, widest: int) -> Any:
    if isinstance(value, str | bytes):
        return value[:widest]
    return value
