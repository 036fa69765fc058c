"""Create the quickstart's databases, prompts and demonstrations.

The task is skyrl-gym's ``text2sql`` environment. A question names two quantities and a number; the
name of the table that has them is only in the database, so the agent has to query it with ``<sql>``
before it can answer with ``<solution>``. A database has two tables, of which only one has both
quantities: the agent inspects the first, and then the second if necessary.

The demonstrations come from a careless expert with four bad habits. Everything else in them is
right: a tiny model learns to copy from such demonstrations in a minute or two, and reinforcement
learning then removes the habits.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tiny_model.jsonl import write_jsonl

DATABASE_FOLDER = Path("SynSQL-2.5M/databases")  # of text2sql for rows with data="synsql"
MAX_TURNS = 5
NUM_TABLES = 2
COLUMNS_PER_TABLE = 3
NUM_ROWS = 12
MAX_VALUE = 99
THRESHOLDS = range(20, 81, 5)  # leaves rows on both sides of the comparison

TABLE_NAMES = (
    "boats", "farms", "lamps", "horses", "trains", "rivers", "towers", "bridges", "planes", "tents",
    "wines", "stones", "shops", "trees", "roads", "phones", "ships", "drums", "coats", "lakes",
    "mines", "parks", "ropes", "wheels",
)  # fmt: skip
QUANTITIES = ("price", "weight", "age", "length", "speed", "rank", "power", "depth")
UNKNOWN_TABLE = "data"  # the expert's name for a table it has not inspected; no table has it
AGGREGATES = {"highest": "MAX", "lowest": "MIN", "average": "AVG", "total": "SUM"}
COMPARISONS = {"over": ">", "under": "<"}

SYSTEM_PROMPT = (
    "Answer with SQL. Think first, look into the database with <sql>, then give the <solution>."
)


@dataclass(frozen=True, slots=True)
class Table:
    """One table: its name and its columns, which have the names of quantities."""

    name: str
    columns: tuple[str, ...]

    @property
    def create_sql(self) -> str:
        """The table's definition, as the agent sees it."""
        return f"CREATE TABLE {self.name} ({', '.join(f'{c} INT' for c in self.columns)})"


@dataclass(frozen=True, slots=True)
class Question:
    """`aggregate` of `measure` where `filter` is `comparison` `threshold`, in the user's words."""

    aggregate: str
    measure: str
    filter: str
    comparison: str
    threshold: int

    @property
    def text(self) -> str:
        """The question as the user asks it."""
        return (
            f"What is the {self.aggregate} {self.measure} of those "
            f"with {self.filter} {self.comparison} {self.threshold}?"
        )


@dataclass(frozen=True, slots=True)
class Carelessness:
    """Error rates of the demonstrator, one probability for each habit.

    Two habits are more likely than the right behaviour, so that even the warm start's most likely
    answer is wrong for most questions: perfect imitation of the expert still fails.
    """

    stop_early: float = 0.6  # answers from the first table although it lacks the columns
    under: float = 0.6  # writes ">" for "under"
    guess: float = 0.1  # answers without looking, from a table that does not exist
    no_think: float = 0.05  # forgets to think before it answers: the environment's -1


PERFECT = Carelessness(0, 0, 0, 0)


def make_tables(rng: random.Random) -> list[Table]:
    """Return two tables without a common quantity."""
    names = rng.sample(TABLE_NAMES, NUM_TABLES)
    columns = rng.sample(QUANTITIES, NUM_TABLES * COLUMNS_PER_TABLE)
    return [
        Table(name, tuple(columns[i * COLUMNS_PER_TABLE : (i + 1) * COLUMNS_PER_TABLE]))
        for i, name in enumerate(names)
    ]


def make_question(rng: random.Random, tables: Sequence[Table]) -> Question:
    """Return a question about two columns of one of the tables."""
    measure, filter_column = rng.sample(rng.choice(tables).columns, 2)
    return Question(
        aggregate=rng.choice(list(AGGREGATES)),
        measure=measure,
        filter=filter_column,
        comparison=rng.choice(list(COMPARISONS)),
        threshold=rng.choice(THRESHOLDS),
    )


def solution_sql(question: Question, table: str, *, comparison: str | None = None) -> str:
    """Return an answer from the named table, with one space between symbols as when decoded."""
    return (
        f"SELECT {AGGREGATES[question.aggregate]} ( {question.measure} ) FROM {table} "
        f"WHERE {question.filter} {COMPARISONS[comparison or question.comparison]} "
        f"{question.threshold}"
    )


def find_table(question: Question, tables: Sequence[Table]) -> int:
    """Return the index of the table that has the question's quantities."""
    return next(i for i, table in enumerate(tables) if question.measure in table.columns)


def gold_sql(question: Question, tables: Sequence[Table]) -> str:
    """Return the right answer."""
    return solution_sql(question, tables[find_table(question, tables)].name)


def make_rows(rng: random.Random, tables: Sequence[Table]) -> list[list[tuple[int, ...]]]:
    """Return random contents, one list of rows for each table."""
    return [
        [tuple(rng.randint(1, MAX_VALUE) for _ in table.columns) for _ in range(NUM_ROWS)]
        for table in tables
    ]


def write_database(
    path: Path | str, tables: Sequence[Table], rows: Sequence[Sequence[tuple[int, ...]]]
) -> sqlite3.Connection:
    """Write one SQLite file (or ":memory:") and return the open connection."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA page_size = 512")  # the smallest: a database is 2 kB
    connection.execute("PRAGMA synchronous = OFF")
    for table, table_rows in zip(tables, rows, strict=True):
        connection.execute(table.create_sql)
        marks = ", ".join("?" * len(table.columns))
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table_rows)
    connection.commit()
    return connection


def has_one_answer(
    connection: sqlite3.Connection, question: Question, tables: Sequence[Table]
) -> bool:
    """Return whether no other choice of columns, aggregate or comparison has the right result."""
    table = tables[find_table(question, tables)]
    gold = connection.execute(gold_sql(question, tables)).fetchall()
    choices = (
        Question(aggregate, measure, filter_column, comparison, question.threshold)
        for measure in table.columns
        for filter_column in table.columns
        for aggregate in AGGREGATES
        for comparison in COMPARISONS
    )
    equal = sum(
        connection.execute(solution_sql(choice, table.name)).fetchall() == gold
        for choice in choices
    )
    return gold != [(None,)] and equal == 1


def prompt_messages(question: Question) -> list[dict[str, str]]:
    """Return the chat that the agent starts from."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question.text},
    ]


def look_sql(table_index: int) -> str:
    """Return the query for a table's definition: one row, so its order cannot vary."""
    return f"SELECT sql FROM sqlite_master WHERE rowid = {table_index + 1}"


def render_observation(create_sql: str, turns_left: int) -> str:
    """Return text2sql's answer to `look_sql`; for demonstrations, which have no database file."""
    header = "0".rjust(len(create_sql))  # pandas' name for a column without one
    reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
    return f"\n\n<observation>{header}\n{create_sql}\n{reminder}</observation>\n\n"


def _look(thought: str, table_index: int) -> str:
    return f"<think> {thought} </think> <sql> {look_sql(table_index)} </sql>"


def _answer(
    rng: random.Random, thought: str, question: Question, table: str, careless: Carelessness
) -> str:
    """Return the last turn."""
    comparison = question.comparison
    if comparison == "under" and rng.random() < careless.under:
        comparison = "over"
    solution = f"<solution> {solution_sql(question, table, comparison=comparison)} </solution>"
    if rng.random() < careless.no_think:
        return solution
    return f"<think> {thought} </think> {solution}"


def demonstrate(
    rng: random.Random, question: Question, tables: Sequence[Table], careless: Carelessness
) -> list[str]:
    """Return the text of each of the expert's turns; all but the last inspect a table.

    The expert's thoughts are always true; its errors are in its actions.
    """
    found = f"{question.measure} and {question.filter} of"
    missing = f"no {question.measure} here"
    if rng.random() < careless.guess:
        return [_answer(rng, f"{found} {UNKNOWN_TABLE}", question, UNKNOWN_TABLE, careless)]
    turns = [_look("look at table 1", 0)]
    for index, table in enumerate(tables):
        if question.measure in table.columns:
            thought = f"{found} {table.name}"
            break
        thought = missing
        if rng.random() < careless.stop_early:
            break
        turns.append(_look(missing, index + 1))
    turns.append(_answer(rng, thought, question, table.name, careless))
    return turns


def make_demonstration(
    rng: random.Random, careless: Carelessness, held_out: set[str]
) -> list[dict[str, str]]:
    """Return a complete chat on a new database, never with a held-out question."""
    while True:
        tables = make_tables(rng)
        question = make_question(rng, tables)
        if question.text not in held_out:
            break
    messages = prompt_messages(question)
    turns = demonstrate(rng, question, tables, careless)
    for i, turn in enumerate(turns):
        messages.append({"role": "assistant", "content": turn})
        if i + 1 < len(turns):
            observation = render_observation(tables[i].create_sql, MAX_TURNS - i - 1)
            messages.append({"role": "user", "content": observation})
    return messages


def make_prompts(
    rng: random.Random,
    database_root: Path,
    name: str,
    *,
    num_databases: int,
    questions_per_database: int,
    taken: set[str],
) -> Iterator[dict[str, Any]]:
    """Write databases and yield their questions as rows of SkyRL's data format.

    Args:
        rng: source of all choices.
        database_root: folder for the environment's ``db_path``.
        name: prefix of the databases' names.
        num_databases: databases to write.
        questions_per_database: rows for each of them.
        taken: questions to avoid; new ones are added.
    """
    for i in range(num_databases):
        db_id = f"{name}_{i:03d}"
        path = database_root / DATABASE_FOLDER / db_id / f"{db_id}.sqlite"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        tables = make_tables(rng)
        connection = write_database(path, tables, make_rows(rng, tables))
        asked = 0
        while asked < questions_per_database:
            question = make_question(rng, tables)
            if question.text in taken or not has_one_answer(connection, question, tables):
                continue
            taken.add(question.text)
            asked += 1
            yield {
                "data_source": "quickstart",
                "prompt": prompt_messages(question),
                "env_class": "text2sql",
                "db_id": db_id,
                "data": "synsql",
                "reward_spec": {"method": "rule", "ground_truth": gold_sql(question, tables)},
                "extra_info": {"split": name, "table": find_table(question, tables) + 1},
            }
        connection.close()


def make_data(
    folder: Path,
    *,
    seed: int = 0,
    num_train: int = 512,
    num_eval: int = 64,
    num_demonstrations: int = 12_000,
    careless: Carelessness | None = None,
) -> dict[str, int]:
    """Write ``databases/``, ``train.jsonl``, ``eval.jsonl`` and ``demonstrations.jsonl``.

    The same seed creates the same files. No question of eval is in train or in the demonstrations,
    and eval has separate databases.

    Args:
        folder: to write to; created if it does not exist.
        seed: of all random choices.
        num_train: rows for reinforcement learning, four to a database.
        num_eval: held-out rows, two to a database.
        num_demonstrations: chats for the supervised phase.
        careless: how wrong the demonstrations are.

    Returns:
        The number of rows in each file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    careless = careless or Carelessness()
    taken: set[str] = set()
    counts = {}
    for name, size, per_database in (("eval", num_eval, 2), ("train", num_train, 4)):
        rows = make_prompts(
            random.Random(f"{seed}-{name}"),
            folder / "databases",
            name,
            num_databases=-(-size // per_database),
            questions_per_database=per_database,
            taken=taken,
        )
        counts[name] = write_jsonl(folder / f"{name}.jsonl", list(rows)[:size])
    rng = random.Random(f"{seed}-demonstrations")
    counts["demonstrations"] = write_jsonl(
        folder / "demonstrations.jsonl",
        (make_demonstration(rng, careless, taken) for _ in range(num_demonstrations)),
    )
    return counts
