"""The SQL of a solution: equal to skyrl_gym's judge, in linear time."""

import random
import re
import time

import pytest

from skyrl_fast.extras.text2sql.solution import first_between, solution_sql

pytestmark = pytest.mark.spec("rollout.sql-judge-linear")

TAGS = ["think", "sql", "solution", "observation"]
PIECES = [
    *(f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")),
    *("<Think>", "</OBSERVATION>", "<thin\u212a>", "</ob\u017fervation>", "<\u017fql>", "</think"),
    *("a", " ", "\n", "\x1f", "\u00a0", "\u3000", "\u200b", "<", "sqlx", "\u0130", ""),
]


def test_solution_is_that_of_skyrl_gym() -> None:
    utils = pytest.importorskip("skyrl_gym.envs.sql.utils")
    source = random.Random(7)
    valid = 0
    for _ in range(30_000):
        pieces = source.choices(PIECES, k=source.randrange(12))
        if source.random() < 0.7:  # most random texts have no solution
            pieces = ["<think>", "a", "</think>", *pieces, "<solution>", "b", "</solution>"]
        text = "".join(pieces)
        is_valid, _, sql, _ = utils.verify_format_and_extract(text)
        assert solution_sql(text) == (sql if is_valid else None), repr(text)
        found = re.search(r"<sql>(.*?)</sql>", text, re.DOTALL)
        assert first_between(text, "<sql>", "</sql>") == (found[1] if found else None)
        valid += is_valid
    assert valid > 1_000


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 29_000 + "<solution>a</solution>",
        "<think></think>" + "</observation> " * 29_000 + "<solution>a</solution>",
        "<think></think>" + "</observation><think>" * 29_000 + "<solution>a</solution>",
        "</observation" + " " * 400_000 + "<solution>a</solution>",
    ],
    ids=["thoughts", "observations", "thoughts after observations", "space"],
)
def test_judge_is_linear(text: str) -> None:
    started = time.process_time()
    solution_sql(text)
    assert time.process_time() - started < 1.0  # milliseconds; quadratic code takes 84 s


def test_query_is_found_in_linear_time() -> None:
    started = time.process_time()
    assert first_between("<sql>" * 200_000, "<sql>", "</sql>") is None
    assert time.process_time() - started < 1.0
