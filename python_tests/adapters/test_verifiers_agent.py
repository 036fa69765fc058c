"""Environments of verifiers as agents: their calls are steps, their rubric is the reward."""

from __future__ import annotations

from typing import Any

import pytest
from _gateway import played
from fake_envs import FakePrompt, says

pytest.importorskip("openai")

from skyrl_fast.adapters.verifiers_agent import INPUT, VerifiersAgent


@pytest.mark.peers
@pytest.mark.spec("gateway.verifiers")
def test_an_environment_with_several_turns(tiny_tokenizer: Any) -> None:
    vf = pytest.importorskip("verifiers")
    from datasets import Dataset
    from verifiers.envs.multiturn_env import MultiTurnEnv

    class Twice(MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **options: Any) -> Any:
            return [{"role": "user", "content": "again"}]

    async def length(completion: Any, answer: str, **options: Any) -> float:
        replies = [m["content"] for m in completion if m["role"] == "assistant"]
        return float(replies[-1] == answer) + 0.1 * len(replies)

    data = Dataset.from_list(
        [
            {"question": "first?", "answer": "a1", "info": {"level": 2}},
            {"question": "second?", "answer": "no"},
        ]
    )
    env = Twice(
        dataset=data, system_prompt="Be brief.", rubric=vf.Rubric(funcs=[length]), max_turns=2
    )
    agent = VerifiersAgent(env)
    rows = agent.rows()
    assert [m["content"] for m in rows[0]["prompt"]] == ["Be brief.", "first?"]
    prompts = [
        FakePrompt(str(n), row["prompt"], env_extras={INPUT: row[INPUT]})
        for n, row in enumerate(rows)
    ]
    answers = lambda call, n: says(tiny_tokenizer, f"a{'again' in tiny_tokenizer.decode(call.prompt_token_ids):d}")  # noqa: E501, E731  # fmt: skip
    out = played(agent, tiny_tokenizer, prompts=prompts, answer=answers)
    assert [t.failure for t in out.trajectories] == [None, None]
    assert [[s.text for s in t.steps] for t in out.trajectories] == [["a0", "a1"]] * 2
    assert [t.steps[-1].reward for t in out.trajectories] == [1.2, 0.2]
    first = out.trajectories[0]
    assert first.env_metrics["length"] == 1.2
    assert first.env_metrics["continued_prompts"] == 1
    assert "first?" in tiny_tokenizer.decode(first.steps[0].prompt_token_ids)
