"""Environments of verifiers as agents: their calls are steps, their rubric is the reward."""

from pathlib import Path
from typing import Any

import pytest
from _gateway import played
from fake_envs import FakePrompt, says

pytest.importorskip("openai")

from skyrl_fast.adapters.verifiers_agent import INPUT, VerifiersAgent
from skyrl_fast.adapters.verifiers_tasks import INDEX, VerifiersTasks

pytestmark = pytest.mark.spec("gateway.verifiers")

TASKSET = """
import verifiers.v1 as vf

class Echo(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def right(self, trace) -> float:
        if self.data.name == "fails":
            raise RuntimeError("oh no")
        return float("a0" in str(trace.model_dump()))

class Echoes(vf.Taskset[Echo]):
    def load(self):
        for name in ("one", "two", "fails"):
            yield Echo(vf.TaskData(prompt=f"say {name}", name=name), self.config.task)

__all__ = ["Echoes"]
"""


@pytest.mark.peers
def test_an_environment_with_several_turns(tiny_tokenizer: Any) -> None:
    vf = pytest.importorskip("verifiers")
    pytest.importorskip("verifiers.envs", reason="verifiers is newer")
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


@pytest.mark.peers
def test_a_taskset_with_a_harness(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers")
    pytest.importorskip("verifiers.v1.clients", reason="verifiers is older")
    (tmp_path / "echo_tasks.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    harness = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    agent = VerifiersTasks({"taskset": {"id": "echo_tasks"}, "agent": harness})
    rows = agent.rows(5)
    assert [row["prompt"][0]["content"] for row in rows] == ["say one", "say two", "say fails"]
    prompts = [
        FakePrompt(str(n), row["prompt"], env_extras={INDEX: row[INDEX]})
        for n, row in enumerate(rows)
    ]
    answer = lambda call, n: says(tiny_tokenizer, f"a{n % 2}")  # noqa: E731
    out = played(agent, tiny_tokenizer, prompts=prompts, answer=answer, max_retries=0)
    assert [t.failure for t in out.trajectories[:2]] == [None, None]
    assert "oh no" in str(out.trajectories[2].failure)
    for trajectory, name in zip(out.trajectories[:2], ("one", "two"), strict=True):
        (step,) = trajectory.steps
        assert f"say {name}" in tiny_tokenizer.decode(step.prompt_token_ids)
        assert step.reward == float(step.text == "a0") == trajectory.env_metrics["right"]
