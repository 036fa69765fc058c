"""Environments that name the policy of each answer, in a run of several."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from fake_envs import FakePrompt, ScriptedEngine, loop_config, says

from skyrl_fast.config import EnvironmentConfig
from skyrl_fast.config.settings import REFERENCE
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.protocol import Action, Env, EnvStep
from skyrl_fast.rollout.groups import environment_runner, run_groups
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.trajectory import Trajectory

NAMES = ("planner", "worker")


class Turns(Env):
    """Lets the named policies answer one after the other, each with what is in the row."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.answers = list(row["answers"])

    def step(self, action: Action) -> EnvStep | Mapping[str, Any]:
        return self.answers.pop(0)


def played(
    tokenizer: Any, answers: list[Any], *, policies: tuple[str, ...] = NAMES, **row: Any
) -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine(lambda call, n: says(tokenizer, f"a{n}"))

    async def go() -> list[Trajectory]:
        factory = EnvFactory(EnvironmentConfig(), make_env=Turns, longest_text=1000)
        calls = PolicyCalls(engine, WeightGate(), tokenizer, 0, policies)
        runner = environment_runner(calls, factory, loop_config(max_turns=9, max_retries=0))
        prompt = FakePrompt("a", env_extras={"answers": answers, **row})
        try:
            return await run_groups(runner, [prompt], phase="train", policy_version=0)
        finally:
            await factory.close()

    (trajectory,) = asyncio.run(go())
    return trajectory, engine


@pytest.mark.spec("lora.policies")
def test_a_step_names_the_policy_of_the_next_answer(tiny_tokenizer: Any) -> None:
    answers = [
        EnvStep(0.0, done=False, policy="worker"),
        {"observations": "more", "reward": 0.0, "done": False},  # the worker again
        EnvStep(0.0, done=False, policy=REFERENCE),
        EnvStep(1.0, done=True, policy_rewards={"worker": 2}),
    ]
    trajectory, engine = played(tiny_tokenizer, list(answers))
    expected = ["planner", "worker", "worker", REFERENCE]
    assert [call.policy for call in engine.calls] == expected
    assert [step.policy for step in trajectory.steps] == expected
    assert trajectory.policy_rewards == {"worker": 2.0}
    first, _ = played(tiny_tokenizer, answers[1:], policy="worker")
    assert [step.policy for step in first.steps] == ["worker", "worker", REFERENCE]
    alone, engine = played(tiny_tokenizer, [EnvStep(1.0, done=True)], policies=(), policy="x")
    assert alone.failure is None and engine.calls[0].policy is None


@pytest.mark.parametrize(
    ("answer", "policies", "message"),
    [
        (EnvStep(0.0, done=False, policy="judge"), NAMES, "one of planner, worker, reference"),
        (EnvStep(0.0, done=False, policy="judge"), (), "no name in a run of one, got 'judge'"),
        (EnvStep(0.0, done=True, policy_rewards={REFERENCE: 1}), NAMES, "planner, worker, got"),
        (EnvStep(0.0, done=False, policy=3), NAMES, "policy: expected a name, got 3"),
        (EnvStep(0.0, done=True, policy_rewards=3), NAMES, "policy_rewards: expected a mapping"),
        (EnvStep(0.0, done=True, policy_rewards={"planner": "x"}), NAMES, "finite float32"),
    ],
)
def test_an_unknown_policy_fails_the_trajectory(
    answer: EnvStep, policies: tuple[str, ...], message: str, tiny_tokenizer: Any
) -> None:
    trajectory, _ = played(tiny_tokenizer, [answer], policies=policies)
    assert message in (trajectory.failure or "")
