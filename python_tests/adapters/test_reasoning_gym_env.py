"""Tasks of reasoning-gym as `Env`: the reward is the score of the package's own checker."""

import json
from typing import Any

import pytest

from skyrl_fast.adapters.reasoning_gym_env import COLUMN, ReasoningGymEnv, reasoning_gym_rows

# Tasks of reasoning-gym 0.1.25 whose entries have no answer, though their checkers know right ones.
WITHOUT_ANSWER = {
    "boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour",
}  # fmt: skip
# Its checker reads the answer as a truth value: any text is true.
TAKES_ANY_TEXT = {"game_of_life_halting"}
MIXED_BY_US = {"composite"}  # of other tasks: `data.mixture` mixes sources


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
        values = {"number": 3, name: least - 1}
        said = f"^reasoning_gym_rows: {name}: expected at least {least}, got {least - 1}$"
        with pytest.raises(ValueError, match=said):
            reasoning_gym_rows("chain_sum", **values)


@pytest.fixture
def factory() -> Any:
    return pytest.importorskip("reasoning_gym.factory")


@pytest.mark.peers
@pytest.mark.timeout(900)
@pytest.mark.spec("env.reasoning-gym")
def test_every_task_is_asked_and_scored(factory: Any) -> None:
    names = sorted(factory.DATASETS.keys() - MIXED_BY_US)
    assert len(names) > 100
    unscored = set()
    for name in names:
        (row,) = as_file(reasoning_gym_rows(name, 1, first=3))
        env = ReasoningGymEnv(row)
        entry = env._entry
        assert entry["question"] in row["prompt"][0]["content"]
        assert row["data_source"] == name
        if reward(row, f"So it is\n<answer>{entry['answer']}</answer>") != 1.0:
            unscored.add(name)
        assert reward(row, "I do not know.") == 0.0
        if name not in TAKES_ANY_TEXT:
            assert reward(row, "<answer>no such answer</answer>") < 0.5, name
    assert unscored == WITHOUT_ANSWER


@pytest.mark.peers
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


@pytest.mark.peers
@pytest.mark.spec("env.reasoning-gym")
def test_an_evaluation_has_other_questions_and_the_same_in_every_process(factory: Any) -> None:
    train = reasoning_gym_rows("chain_sum", 50)
    held_out = reasoning_gym_rows("chain_sum", 50, first=50)
    texts = {row["prompt"][0]["content"] for row in train}
    assert not texts & {row["prompt"][0]["content"] for row in held_out}
    row = as_file(held_out)[7]
    answer = ReasoningGymEnv(row)._entry["answer"]
    assert reward({**row, COLUMN: json.dumps(row[COLUMN])}, f"<answer>{answer}</answer>") == 1.0


@pytest.mark.peers
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


@pytest.mark.peers
def test_an_answer_that_a_checker_cannot_parse_scores_0(factory: Any) -> None:
    (row,) = reasoning_gym_rows("prime_factorization", 1)
    assert reward(row, "<answer>no such answer</answer>") == 0.0
