"""Tasks of the package reasoning-gym, each graded by its own checker, as an `Env`.

A row holds what its question is made from, not the question's answer: the environment makes the
entry again, since some of its values, such as tuples, would not survive a file of rows.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from skyrl_fast.rollout.env.protocol import Env, EnvStep

COLUMN = "reasoning_gym"  # of a row: what its question is made from
INSTRUCTIONS = "Give your final answer between <answer> and </answer>."


def reasoning_gym_rows(
    task: str,
    number: int,
    *,
    first: int = 0,
    seed: int = 0,
    level: int | None = None,
    tries: int = 1,
    instructions: str = INSTRUCTIONS,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return questions of a task as rows for `ReasoningGymEnv`.

    Args:
        task: one of `reasoning_gym.factory.DATASETS`, but "composite": sources are mixed by
            `data.mixture`.
        number: of rows.
        first: number of the first question. Questions for an evaluation have the same seed and
            begin where those for training end; other seeds repeat some of them.
        seed: of the task's questions.
        level: difficulty by the task's curriculum, from 0; beyond its last level, the last one.
            None: the task's default settings.
        tries: answers that the model may give; it is told when one is not right.
        instructions: text below each question.
        settings: of the task's configuration, by its own names.

    Raises:
        ValueError: there is no such task or setting, the task has no curriculum, or a number is
            out of range.
    """
    for name, value, least in (("number", number, 1), ("first", first, 0), ("tries", tries, 1)):
        if value < least:
            raise ValueError(f"reasoning_gym_rows: {name}: expected at least {least}, got {value}")
    made_from: dict[str, Any] = {
        "task": task,
        "seed": seed,
        "size": first + number,
        "level": level,
        "settings": settings,
    }
    source = task if level is None else f"{task}_level_{level}"
    questions = _questions(json.dumps(made_from))
    rows = []
    for index in range(first, first + number):
        text = questions[index]["question"]
        if instructions:
            text = f"{text}\n\n{instructions}"
        rows.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "data_source": source,
                COLUMN: made_from | {"index": index, "tries": tries},
            }
        )
    return rows


class ReasoningGymEnv(Env):
    """One question: the reward is the checker's score of the last answer, from 0 to 1.

    The metrics `answered` and `solved` are 1 where the text has an answer, and where it scores 1. A
    subclass may read answers of another form by its own `read_answer`.

    Example:
        rows = reasoning_gym_rows("chain_sum", 1000, min_terms=2, max_terms=3)
        skyrl_fast.train_agent(config, env=ReasoningGymEnv, prompts=rows)
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        made_from = row.get(COLUMN)
        if isinstance(made_from, str):  # as tables keep it
            made_from = json.loads(made_from)
        if not isinstance(made_from, Mapping):
            raise ValueError(
                f"ReasoningGymEnv: row: expected a mapping in the column {COLUMN}, as "
                f"reasoning_gym_rows makes it, got {made_from!r}"
            )
        values = dict(made_from)
        index = values.pop("index")
        self._tries_left = values.pop("tries")
        self._questions, self._entry = _question(json.dumps(values), index)

    def read_answer(self, text: str) -> str | None:
        """Return the answer that a text has between its marks; None: it has none."""
        from reasoning_gym.utils import extract_answer

        answer: str | None = extract_answer(text)
        return answer

    def step(self, action: str) -> EnvStep:
        answer = self.read_answer(str(action))
        score = self._score(answer)
        self._tries_left -= 1
        solved = score >= 1
        if self._tries_left and not solved:
            return EnvStep(0.0, done=False, observations=_feedback(answer, score))
        metrics = {"answered": float(answer is not None), "solved": float(solved)}
        return EnvStep({"reward": score, **metrics}, done=True)

    def _score(self, answer: str | None) -> float:
        if answer is None:
            return 0.0
        try:
            return float(self._questions.score_answer(answer, self._entry))
        except (ArithmeticError, LookupError, TypeError, ValueError):
            # Some checkers parse the answer as what it should be, and raise where it is not.
            return 0.0


def _feedback(answer: str | None, score: float) -> str:
    if answer is None:
        return "There was no answer. Try again."
    return f"That answer scores {score:.2f} of 1. Try again."


def _question(made_from: str, index: int) -> tuple[Any, Any]:
    """Return a data set and the entry of one question, which samples of it make once."""
    with _making:
        questions = _questions(made_from)
        entry = _entry(made_from, index)
    return questions, copy.deepcopy(entry)


_making = threading.Lock()  # environments are made in threads


@lru_cache(maxsize=4096)  # some tasks take seconds to make an entry
def _entry(made_from: str, index: int) -> Any:
    return _questions(made_from)[index]


@lru_cache(maxsize=64)  # a process plays many rows of few data sets, and some take seconds to make
def _questions(made_from: str) -> Any:
    """Return the task's data set, by the JSON text of what it is made from."""
    import reasoning_gym  # noqa: F401  first all of it: while another thread imports it, the
    from reasoning_gym.factory import DATASETS  # factory already is there, without most tasks

    values = json.loads(made_from)
    task = values["task"]
    known = sorted(DATASETS.keys() - {"composite"})
    if task not in known:
        raise ValueError(f"reasoning_gym_rows: task: expected one of {known}, got {task!r}")
    kind, config_kind = DATASETS[task]
    settings = values["settings"]
    if values["level"] is not None:
        settings = {**_settings_of_level(task, values["level"]), **settings}
    try:
        config = config_kind(**{**settings, "seed": values["seed"], "size": values["size"]})
    except TypeError as error:
        raise ValueError(f"reasoning_gym_rows: settings: {task}: {error}") from error
    try:
        return kind(config=config)
    except AssertionError as error:  # by the configuration's own check
        raise ValueError(f"reasoning_gym_rows: settings: {task}: {error}") from error


def _settings_of_level(task: str, level: int) -> dict[str, Any]:
    from reasoning_gym.factory import CURRICULA, create_curriculum

    if task not in CURRICULA:
        raise ValueError(f"reasoning_gym_rows: level: expected None, as {task} has no curriculum")
    if level < 0:
        raise ValueError(f"reasoning_gym_rows: level: expected at least 0, got {level}")
    curriculum = create_curriculum(task)
    for name, attribute in curriculum.attributes.items():
        curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
    config = curriculum.generate_configuration()
    return {field.name: getattr(config, field.name) for field in fields(config)}
