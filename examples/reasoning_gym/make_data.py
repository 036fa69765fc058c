"""Sums and differences of two numbers, a task of reasoning-gym, as rows of `ReasoningGymEnv`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.tiny_model.jsonl import write_jsonl
from skyrl_fast.adapters.reasoning_gym_env import COLUMN, reasoning_gym_rows

TASK = "chain_sum"
SETTINGS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
INSTRUCTIONS = "Reply with the answer alone."
NUM_TRAIN = 1_024
NUM_EVAL = 128
NUM_ASKED = 256  # for the evaluation, of which some have the same text


def rows_of(number: int, *, first: int, tries: int = 1) -> list[dict[str, Any]]:
    """Return `number` questions of the task from the question `first` on."""
    return reasoning_gym_rows(
        TASK, number, first=first, tries=tries, instructions=INSTRUCTIONS, **SETTINGS
    )


def text_of(row: dict[str, Any]) -> str:
    """Return a row's question with its instructions."""
    text: str = row["prompt"][0]["content"]
    return text


def with_rewards_of_others(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the same prompts, each judged as an answer to the next row's question.

    The form of an answer is rewarded as before; which answer it is, is not.
    """
    following = [*rows[1:], rows[0]]
    return [{**row, COLUMN: other[COLUMN]} for row, other in zip(rows, following, strict=True)]


def make_data(folder: Path) -> None:
    """Write the files of rows into a new folder.

    No two rows of `train.jsonl` and `eval.jsonl` have the same question; `*_tries.jsonl` are the
    same questions with two tries; `train_others.jsonl` has the rewards of other questions.
    """
    folder.mkdir(parents=True)
    for tries, suffix in ((1, ""), (2, "_tries")):
        train, held_out = distinct_rows(tries)
        write_jsonl(folder / f"train{suffix}.jsonl", train)
        write_jsonl(folder / f"eval{suffix}.jsonl", held_out)
        if tries == 1:
            write_jsonl(folder / "train_others.jsonl", with_rewards_of_others(train))


def distinct_rows(tries: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows for training and the held-out ones, each question once."""
    by_text = {text_of(row): row for row in rows_of(NUM_ASKED, first=NUM_TRAIN, tries=tries)}
    held_out = list(by_text.values())[:NUM_EVAL]
    texts = {text_of(row) for row in held_out}
    candidates = {text_of(row): row for row in rows_of(NUM_TRAIN, first=0, tries=tries)}
    return [row for text, row in candidates.items() if text not in texts], held_out
