"""Tasks of reasoning-gym as `Env`: the reward is the score of the package's own checker."""

import json
import re
import subprocess
import sys
import threading
from itertools import product
from typing import Any

import pytest

from skyrl_fast.adapters.reasoning_gym_env import COLUMN, ReasoningGymEnv, reasoning_gym_rows

# Tasks of reasoning-gym 0.1.25 whose entries have no answer, and the one of their metadata.
EXAMPLE_OF_ANSWER = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
WITHOUT_ANY_ANSWER = {"boxnet", "rush_hour"}
# Its checker reads the answer as a truth value: any text is true.
TAKES_ANY_TEXT = {"game_of_life_halting"}
MIXED_BY_US = {"composite"}  # of other tasks: `data.mixture` mixes sources
# The first level of its curriculum is below what its own configuration takes.
FIRST_LEVEL_REFUSED = {"knight_swap"}


def as_file(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows as a file of rows returns them."""
    found: list[dict[str, Any]] = json.loads(json.dumps(rows))
    return found


def reward(row: dict[str, Any], text: str) -> float:
    """Return the reward of the only answer."""
    step = ReasoningGymEnv(row).step(text)
    assert step.done
    assert isinstance(step.reward, dict)
    return float(step.reward["reward"])


def test_what_is_no_row_of_a_task_is_refused() -> None:
    with pytest.raises(ValueError, match=f"^ReasoningGymEnv: row: .* column {COLUMN}, .* got None"):
        ReasoningGymEnv({"prompt": "1 + 1?"})
    for name, least in (("number", 1), ("first", 0), ("tries", 1)):
        values: dict[str, Any] = {"number": 3, name: least - 1}
        said = f"^reasoning_gym_rows: {name}: expected at least {least}, got {least - 1}$"
        with pytest.raises(ValueError, match=said):
            reasoning_gym_rows("chain_sum", **values)


@pytest.fixture
def factory() -> Any:
    return pytest.importorskip("reasoning_gym.factory")


def right_answer(task: str, entry: dict[str, Any]) -> str:
    """Return an answer that is right."""
    if task in EXAMPLE_OF_ANSWER:
        example = entry["metadata"][EXAMPLE_OF_ANSWER[task]]
        return example if isinstance(example, str) else json.dumps(example)
    if task == "boxnet":
        return json.dumps(boxes_moved(entry["metadata"]["initial_state"]))
    if task == "rush_hour":
        return cars_moved(entry)
    return str(entry["answer"])


def boxes_moved(squares: dict[str, list[str]]) -> list[dict[str, str]]:
    """Return the moves of each box to the square of its target, and onto it: rows, then columns."""
    where = {item: list(map(float, name.split("_"))) for name in squares for item in squares[name]}
    moves = []
    for box in (item for item in where if item.startswith("box_")):
        target = box.replace("box_", "target_")
        at = where[box]
        for axis, end in enumerate(where[target]):
            while at[axis] != end:
                before = f"Agent[{at[0]}, {at[1]}]"
                at[axis] += 1 if end > at[axis] else -1
                moves.append({before: f"move({box}, square[{at[0]}, {at[1]}])"})
        moves.append({f"Agent[{at[0]}, {at[1]}]": f"move({box}, {target})"})
    return moves


def cars_moved(entry: dict[str, Any]) -> str:
    """Return up to three moves that let the red car A out."""
    from reasoning_gym.games.rush_hour import Board

    board = entry["metadata"]["board_config"]
    cars = sorted(set(re.findall("[A-Z]", board)))
    steps = [f"{car}{step:+d}" for car, step in product(cars, (-4, -3, -2, -1, 1, 2, 3, 4))]
    for number in (1, 2, 3):
        for moves in product(steps, repeat=number):
            tried = Board(board)
            tried.perform_moves(" ".join(moves))
            if tried.solved:
                return " ".join(moves)
    raise AssertionError(board)


def check_task(task: str, **settings: Any) -> None:
    """Check that a right answer scores 1, a wrong one less, and none 0."""
    (row,) = as_file(reasoning_gym_rows(task, 1, first=3, **settings))
    entry = ReasoningGymEnv(row)._entry
    assert entry["question"] in row["prompt"][0]["content"]
    right = right_answer(task, entry)
    assert reward(row, f"So it is\n<answer>{right}</answer>") == 1.0, task
    assert reward(row, "I do not know.") == 0.0, task
    if task not in TAKES_ANY_TEXT:
        assert reward(row, "<answer>no such answer</answer>") < 0.5, task


@pytest.mark.parametrize("task", ["chain_sum", "letter_counting", "word_sorting", "mini_sudoku"])
@pytest.mark.spec("env.reasoning-gym")
def test_a_task_is_asked_and_scored(factory: Any, task: str) -> None:
    check_task(task, level=0)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.spec("env.reasoning-gym")
def test_every_task_is_asked_and_scored(factory: Any) -> None:
    names = sorted(factory.DATASETS.keys() - MIXED_BY_US)
    assert len(names) > 100
    for name in names:
        settings = {"min_moves": 1, "max_moves": 3} if name == "rush_hour" else {}
        check_task(name, **settings)
    (row,) = reasoning_gym_rows("game_of_life_halting", 1)
    assert reward(row, "<answer>no such answer</answer>") in (0.0, 1.0)
    assert WITHOUT_ANY_ANSWER | EXAMPLE_OF_ANSWER.keys() == {
        name
        for name in names
        if ReasoningGymEnv(reasoning_gym_rows(name, 1)[0])._entry["answer"] is None
    }


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(900)
def test_every_curriculum_has_a_first_level(factory: Any) -> None:
    refused = set()
    for name in sorted(factory.CURRICULA.keys() - MIXED_BY_US - {"sokoban"}):  # seconds a question
        try:
            check_first = reasoning_gym_rows(name, 1, level=0)
        except ValueError:
            refused.add(name)
        else:
            assert ReasoningGymEnv(check_first[0])._entry["question"]
    assert refused == FIRST_LEVEL_REFUSED


@pytest.mark.spec("env.reasoning-gym")
def test_levels_and_settings_are_those_of_the_task(factory: Any) -> None:
    def sums(**settings: Any) -> list[int]:
        rows = reasoning_gym_rows("chain_sum", 30, instructions="", **settings)
        return [row["prompt"][0]["content"].count(" + ") for row in rows]

    assert set(sums(min_terms=4, max_terms=4, min_digits=1, max_digits=1)) <= {0, 1, 2, 3}
    easy = reasoning_gym_rows("chain_sum", 30, level=0)
    hard = reasoning_gym_rows("chain_sum", 30, level=3)
    assert {row["data_source"] for row in hard} == {"chain_sum_level_3"}
    lengths = [sum(len(row["prompt"][0]["content"]) for row in rows) for rows in (easy, hard)]
    assert lengths[0] < lengths[1]
    last = reasoning_gym_rows("chain_sum", 5, level=500)
    beyond = reasoning_gym_rows("chain_sum", 5, level=600)
    assert [row["prompt"] for row in last] == [row["prompt"] for row in beyond]
    with pytest.raises(ValueError, match=r"^reasoning_gym_rows: level: .* at least 0, got -1"):
        reasoning_gym_rows("chain_sum", 1, level=-1)
    with pytest.raises(ValueError, match=r"^reasoning_gym_rows: settings: chain_sum: .*max_term"):
        reasoning_gym_rows("chain_sum", 1, max_term=3)
    for task in ("chain_sums", "composite"):
        with pytest.raises(ValueError, match=r"^reasoning_gym_rows: task: expected one of"):
            reasoning_gym_rows(task, 1)


@pytest.mark.spec("env.reasoning-gym")
def test_an_evaluation_has_other_questions_and_the_same_in_every_process(factory: Any) -> None:
    train = reasoning_gym_rows("chain_sum", 50)
    held_out = reasoning_gym_rows("chain_sum", 50, first=50)
    texts = {row["prompt"][0]["content"] for row in train}
    assert not texts & {row["prompt"][0]["content"] for row in held_out}
    row = as_file(held_out)[7]
    answer = ReasoningGymEnv(row)._entry["answer"]
    assert reward({**row, COLUMN: json.dumps(row[COLUMN])}, f"<answer>{answer}</answer>") == 1.0


@pytest.mark.spec("env.reasoning-gym")
def test_several_tries_are_told_what_was_not_right(factory: Any) -> None:
    (row,) = reasoning_gym_rows("chain_sum", 1, tries=3)
    answer = ReasoningGymEnv(row)._entry["answer"]
    env = ReasoningGymEnv(row)
    first = env.step("It is easy.")
    assert (first.reward, first.done) == (0.0, False)
    assert str(first.observations).startswith("There was no answer.")
    second = env.step("<answer>x</answer>")
    assert (second.reward, second.done) == (0.0, False)
    assert str(second.observations).endswith("of 1. Try again.")
    assert env.step(f"<answer>{answer}</answer>").reward == {
        "reward": 1.0,
        "answered": 1.0,
        "solved": 1.0,
    }
    env = ReasoningGymEnv(row)
    assert env.step(f"<answer>{answer}</answer>").done  # no further try
    env = ReasoningGymEnv(row)
    steps = [env.step("no") for _ in range(3)]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[-1].reward == {"reward": 0.0, "answered": 0.0, "solved": 0.0}


def test_an_answer_that_a_checker_cannot_parse_scores_0(factory: Any) -> None:
    (row,) = reasoning_gym_rows("prime_factorization", 1)
    assert reward(row, "<answer>no such answer</answer>") == 0.0


def test_trajectories_that_begin_together_make_their_question_once(
    factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, _ = factory.DATASETS["chain_sum"]
    made = []
    make = kind.__getitem__

    def counted(self: Any, index: int) -> Any:
        made.append(index)
        return make(self, index)

    (row,) = reasoning_gym_rows("chain_sum", 1, first=7, seed=1234)
    monkeypatch.setattr(kind, "__getitem__", counted)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(ReasoningGymEnv(row)._entry)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [7]
    found[0]["answer"] = "changed by a checker"
    assert found[1]["answer"] == ReasoningGymEnv(row)._entry["answer"] != found[0]["answer"]


FIRST_IN_THREADS = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from skyrl_fast.adapters.reasoning_gym_env import ReasoningGymEnv
row = json.loads(sys.argv[1])
with ThreadPoolExecutor(8) as threads:
    print(len({str(env._entry) for env in threads.map(lambda _: ReasoningGymEnv(row), range(8))}))
"""


def test_a_process_may_begin_with_many_trajectories(factory: Any) -> None:
    """The package fills its table of tasks while it is imported, which takes seconds."""
    (row,) = reasoning_gym_rows("word_sorting", 1)
    command = [sys.executable, "-c", FIRST_IN_THREADS, json.dumps(row)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
