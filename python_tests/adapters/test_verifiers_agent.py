"""Environments of verifiers as agents: their calls are steps, their rubric is the reward."""

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _gateway import played
from fake_envs import FakePrompt, says

pytest.importorskip("openai")

from skyrl_fast.adapters.verifiers_agent import INPUT, VerifiersAgent
from skyrl_fast.adapters.verifiers_tasks import INDEX
from skyrl_fast.system.importing import load_module

pytestmark = pytest.mark.spec("gateway.verifiers")

GUIDE = Path(__file__).parents[2] / "docs/guide/gateway.md"

ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset
from verifiers.envs.multiturn_env import MultiTurnEnv

class Twice(MultiTurnEnv):
    async def env_response(self, messages, state, **options):
        return [{"role": "user", "content": "again"}]

async def length(completion, answer, **options) -> float:
    replies = [m["content"] for m in completion if m["role"] == "assistant"]
    return float(replies[-1] == answer) + 0.1 * len(replies)

def load_environment():
    data = Dataset.from_list([
        {"question": "first?", "answer": "a1", "info": {"level": 2}},
        {"question": "second?", "answer": "no"},
    ])
    rubric = vf.Rubric(funcs=[length])
    return Twice(dataset=data, system_prompt="Be brief.", rubric=rubric, max_turns=2)
"""

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


def run_example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Write a file of the guide into the folder and import it from there."""
    (text,) = re.findall(rf"^```python\n(# {name}\n.*?)^```$", GUIDE.read_text(), re.S | re.M)
    (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)  # as for a script there
    module = load_module(str(folder / name))
    return module.agent, module.rows


@pytest.mark.peers
def test_an_environment_with_several_turns(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers")
    pytest.importorskip("verifiers.envs", reason="verifiers is newer")
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "wordle.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(installed)
    agent, rows = run_example("words.py", tmp_path, monkeypatch)
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
    pytest.importorskip("verifiers.v1.utils.loaders", reason="verifiers is older")
    (tmp_path / "gsm8k.py").write_text(TASKSET)
    agent, rows = run_example("gsm.py", tmp_path, monkeypatch)
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


def test_a_metric_without_a_value_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Environment:
        async def run_rollout(self, *arguments: Any, **options: Any) -> dict[str, Any]:
            metrics = {"length": 2, "judge": None}
            return {"error": None, "reward": 1, "metrics": metrics}

    clients = SimpleNamespace(OpenAIChatCompletionsClient=lambda client: client)
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(clients=clients))
    monkeypatch.setitem(sys.modules, "verifiers.clients", clients)
    task = SimpleNamespace(row={INPUT: "{}"}, async_openai=None, model="m")
    assert asyncio.run(VerifiersAgent(Environment())(task)) == {"length": 2.0, "reward": 1.0}
