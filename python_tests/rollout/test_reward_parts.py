"""Rewards with named parts, and user code that cannot be called as it would be."""

import asyncio
from typing import Any

import pytest

from skyrl_fast.config import EnvironmentConfig
from skyrl_fast.rollout.env.answers import AnswerError, answer_of, read_reward_parts
from skyrl_fast.rollout.env.factory import EnvFactory, check_env_classes
from skyrl_fast.rollout.env.protocol import Action, EnvStep
from skyrl_fast.rollout.env.reward_functions import ANSWERS, RewardFunctions
from skyrl_fast.rollout.workers.plain import PlainData
from skyrl_fast.train import Env, SetupError, train_agent

CONFIG = {"trainer.policy.model.path": "no-such-model"}


class Parts(Env):
    """Two turns, each with a mapping as its reward."""

    turns = 0

    def step(self, action: Action) -> EnvStep:
        self.turns += 1
        reward = {"reward": 0.5, "format": 1.0, "length": self.turns}
        return EnvStep(reward, done=self.turns == 2, observations="go on")


def test_a_mapping_is_a_reward_and_its_parts() -> None:
    assert read_reward_parts({"reward": 1, "format": True}, "reward") == (1.0, {"format": 1.0})
    assert read_reward_parts(0.5, "reward") == (0.5, {})
    answer = answer_of(EnvStep({"reward": 2.0, "a": 0.25}, done=True), PlainData(100))
    assert (answer.reward, answer.reward_parts) == (2.0, {"a": 0.25})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"score": 1.0}, "reward: expected a number, or a mapping with the key reward, got"),
        ({"reward": 1.0, 3: 1.0}, "reward: expected a number, or a mapping with the key reward"),
        ({"reward": float("nan")}, "reward: expected a finite float32 number, got nan"),
        ({"reward": 1.0, "format": "good"}, r"reward\['format'\]: expected a finite float32"),
    ],
)
def test_wrong_mappings_are_named(value: Any, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        read_reward_parts(value, "reward")


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_parts_pass_through_threads_and_processes(workers: str) -> None:
    async def step() -> Any:
        factory = EnvFactory(EnvironmentConfig(workers=workers))
        session = await factory.make("test_reward_parts:Parts", {})
        answers = [await session.step("x"), await session.step("y")]
        await session.close()
        await factory.close()
        return answers

    first, second = asyncio.run(step())
    assert (first.reward, first.reward_parts) == (0.5, {"format": 1.0, "length": 1.0})
    assert (second.reward_parts, second.done) == ({"format": 1.0, "length": 2.0}, True)


def test_functions_of_a_group_return_parts_per_answer() -> None:
    def graded(completions: list[Any], **columns: Any) -> list[Any]:
        return [{"reward": 1.0, "format": 0.0}, 0.5, None]

    async def group() -> Any:
        factory = EnvFactory(EnvironmentConfig(), make_env=RewardFunctions([graded], [2.0]))
        session = await factory.make("env", {ANSWERS: (["a", "b", "c"], [[1], [2], [3]])})
        await session.init([{"role": "user", "content": "hello"}])
        await session.step("")
        found = await session.metrics()
        await factory.close()
        return found

    found = asyncio.run(group())
    assert found["rewards"] == [2.0, 1.0, 0.0]
    assert found["metrics"] == [
        {"reward_graded": 1.0, "reward_graded/format": 0.0},
        {"reward_graded": 0.5},
        {},
    ]


class NeedsTwo(Env):
    """Cannot be made from a row."""

    def __init__(self, row: Any, database: Any) -> None:
        del row, database


class StepsAlone(Env):
    """Its step takes no action."""

    def step(self) -> EnvStep:  # type: ignore[override]
        return EnvStep(0.0, done=True)


def test_code_that_cannot_be_called_is_refused_with_its_signature() -> None:
    def short(answer: str) -> float:
        return 0.0

    with pytest.raises(
        SetupError, match=r"reward: .* as reward\(answer, row\), got reward\(answer:"
    ):
        train_agent(CONFIG, prompts=["p"], reward=short)
    with pytest.raises(SetupError, match=r"env: .* as env\(row\), got env\(row.*database"):
        train_agent(CONFIG, prompts=["p"], env=NeedsTwo)
    with pytest.raises(
        SetupError, match=r"env.step: .* as env.step\(action\), got env.step\(self\)"
    ):
        train_agent(CONFIG, prompts=["p"], env=StepsAlone)
    with pytest.raises(ValueError, match=r"env_class of a row: StepsAlone.step: expected"):
        check_env_classes(["test_reward_parts:StepsAlone"], EnvironmentConfig())


def test_a_function_of_a_group_may_require_columns_only() -> None:
    def compute_score(data_source: str, solution_str: str) -> float:
        return 0.0

    def exact(completions: list[Any], answer: list[str], *, tolerance: float = 0.0) -> list[float]:
        return [0.0]

    rows = [{"answer": "4", "data_source": "sums"}]
    RewardFunctions([exact], [1.0]).check_arguments(rows)
    wanted = (
        r"compute_score: expected arguments named answer, completion_ids, completions, data_source,"
        r" log_metric, prompts, got compute_score\(data_source: .*solution_str"
    )
    with pytest.raises(ValueError, match=wanted):
        RewardFunctions([compute_score], [1.0]).check_arguments(rows)
    with pytest.raises(ValueError, match="exact: expected arguments named completion_ids"):
        RewardFunctions([exact], [1.0]).check_arguments([*rows, {"data_source": "words"}])
