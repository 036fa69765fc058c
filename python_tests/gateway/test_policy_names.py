"""Several policies behind the gateway: the model of a call names the policy that answers it."""

from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")

import openai
from _gateway import USER, chat, played

from skyrl_fast.config.settings import REFERENCE

NAMES = ("planner", "worker")


async def delegate(task: Any) -> dict[str, Any]:
    """Let the planner write a plan, the worker follow it, and the frozen reference judge it."""

    async def ask(name: str, text: str) -> str:
        answer = await task.async_openai.chat.completions.create(
            model=name, messages=[USER, {"role": "user", "content": text}]
        )
        return answer.choices[0].message.content

    assert task.model == "planner"
    plan = await ask(task.model, "plan")
    result = await ask("worker", plan)
    grade = await ask(REFERENCE, result)
    await ask("planner", grade)
    rewards = {"planner": 1.0, "worker": 0.25}
    return {"reward": 0.5, "policy_rewards": rewards}


@pytest.mark.spec("lora.policies")
def test_the_model_of_a_call_names_its_policy(tiny_tokenizer: Any) -> None:
    out = played(delegate, tiny_tokenizer, policies=NAMES, untrained_models=("judge",))
    assert [call.policy for call in out.engine.calls] == ["planner", "worker", REFERENCE, "planner"]
    assert [step.policy for step in out.only.steps] == ["planner", "worker", "planner"]
    assert [step.text for step in out.only.steps] == ["a0", "a1", "a3"]
    assert out.only.policy_rewards == {"planner": 1.0, "worker": 0.25}
    assert out.only.steps[-1].reward == 0.5
    assert [(call.model, call.response) for call in out.only.other_calls] == [(REFERENCE, "a2")]


def test_an_unknown_policy_is_refused_by_name(tiny_tokenizer: Any) -> None:
    refused: list[str] = []

    async def agent(task: Any) -> float:
        listed = await task.async_openai.models.list()
        refused.append(" ".join(model.id for model in listed.data))
        for name in ("policy", "workr"):
            with pytest.raises(openai.NotFoundError) as caught:
                await task.async_openai.chat.completions.create(model=name, messages=[USER])
            refused.append(str(caught.value))
        await chat(task, [USER])
        return 1.0

    out = played(agent, tiny_tokenizer, policies=NAMES, untrained_models=("judge",))
    assert refused[0] == "planner worker reference judge"
    for text, name in zip(refused[1:], ("policy", "workr"), strict=True):
        assert f"The model `{name}` does not exist here; known: planner, worker, refer" in text
    assert [step.policy for step in out.only.steps] == ["planner"]


def test_rewards_of_an_unknown_policy_fail_the_trajectory(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> dict[str, Any]:
        await chat(task, [USER])
        return {"reward": 1, "policy_rewards": {"judge": 1}}

    for names, message in ((NAMES, "expected names of planner, worker"), ((), "no policy")):
        out = played(agent, tiny_tokenizer, policies=names, max_retries=0)
        assert message in out.only.failure and "judge" in out.only.failure
