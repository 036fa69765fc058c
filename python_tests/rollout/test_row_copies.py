"""Code of users gets its own copy of a row: what it changes there, nobody else sees."""

import asyncio
import logging
import threading
from typing import Any

import pytest
from fake_envs import FakePrompt, ScriptedEngine, loop_config, run, says
from helpers._gateway import chat, played

from skyrl_fast.config import EnvironmentConfig
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.protocol import Action, Env, EnvStep
from skyrl_fast.rollout.env.reward_env import RewardEnv
from skyrl_fast.rollout.env.reward_functions import GroupRewards, RewardFunctions
from skyrl_fast.rollout.rows import copy_row

pytestmark = pytest.mark.spec("rollout.row-copies")

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
SEEN: list[Any] = []


def row() -> FakePrompt:
    content = [{"type": "text", "text": "task"}]
    return FakePrompt("p", [{"role": "user", "content": content}], "x", {"items": [{"n": 0}]})


def change(messages: Any, items: Any) -> None:
    """Record a row's values, and change them in place."""
    SEEN.append((messages[0]["content"][0]["text"], items[0]["n"]))
    messages[0]["content"][0]["text"] += " again"
    items[0]["n"] += 1


class Changing(Env):
    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def init(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        change(messages, self.row["items"])
        return [{"role": "user", "content": "task"}]

    def step(self, action: str) -> EnvStep:
        return EnvStep(0.0, done=True)


def reward(answer: str, row: dict[str, Any]) -> float:
    change(row["prompt"], row["items"])
    return 1.0


def first_function(prompts: Any, completions: Any, items: Any, **columns: Any) -> list[float]:
    for prompt, item, completion in zip(prompts, items, completions, strict=True):
        change(prompt, item)
        completion[0]["content"] = "changed"
    return [0.0] * len(items)


def second_function(prompts: Any, completions: Any, items: Any, **columns: Any) -> list[float]:
    assert {c[0]["content"] for c in completions} == {"ok"}
    return first_function(prompts, completions, items)


async def agent(task: Any) -> float:
    change(task.row["prompt"], task.row["items"])
    await chat(task, [{"role": "user", "content": "task"}])
    return 1.0


@pytest.mark.parametrize("kind", ["environment", "reward", "reward functions", "agent"])
def test_each_episode_gets_the_row_of_the_data(kind: str, tiny_tokenizer: Any) -> None:
    SEEN.clear()
    prompt = row()
    functions = RewardFunctions([first_function, second_function], [1.0, 1.0])
    envs = {"environment": Changing, "reward": lambda row: RewardEnv(reward, row)}

    def answer(call: Any, number: int) -> Any:
        return says(tiny_tokenizer, "ok")

    for _ in range(2):  # epochs
        if kind == "agent":
            played(agent, tiny_tokenizer, answer=answer, prompts=[prompt], n_samples_per_prompt=2)
            continue
        config = loop_config(n_samples_per_prompt=2, max_turns=1)
        make_env = envs.get(kind, functions)
        engine = ScriptedEngine(answer)
        trajectories = run(tiny_tokenizer, [prompt], config, engine, make_env=make_env)
        assert [t.failure for t in trajectories] == [None, None]
        if make_env is functions:
            factory = EnvFactory(EnvironmentConfig(timeout_seconds=20), make_env=functions)
            asyncio.run(GroupRewards(factory)(prompt, trajectories))
            assert [t.failure for t in trajectories] == [None, None]
    calls = 2 if kind == "reward functions" else 1  # for each answer
    assert [("task", 0)] * 4 * calls == SEEN
    assert prompt == row()


async def test_the_history_has_the_calls_that_the_model_made(tiny_tokenizer: Any) -> None:
    class Popping(Env):
        def step(self, action: Action) -> EnvStep:
            action.tool_calls[0]["function"]["arguments"].pop("x")
            return EnvStep(0.0, done=True)

    factory = EnvFactory(EnvironmentConfig(timeout_seconds=20), make_env=lambda row: Popping())
    env = await factory.make("x", {})
    await env.step(Action("text", [CALL]))
    await env.close()
    await factory.close()
    assert CALL["function"] == {"name": "f", "arguments": {"x": 1}}


def test_columns_that_cannot_be_copied_are_shared_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lock, values = threading.Lock(), [[1]]
    given = {"a_lock": {"lock": lock}, "numbers": (n for n in "ab"), "values": values}
    with caplog.at_level(logging.WARNING):
        copies = [copy_row(given) for _ in range(2)]
    for copied in copies:
        assert copied["a_lock"] is given["a_lock"] and copied["numbers"] is given["numbers"]
        assert copied["values"] == values and copied["values"][0] is not values[0]
    named = [text for text in caplog.messages if "column 'a_lock'" in text]
    assert len(named) == 1 and "cannot be copied (TypeError" in named[0]
