"""Agents as a generator of SkyRL: rows with the exact tokens, in the order of the prompts."""

import asyncio
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("omegaconf")
pytest.importorskip("starlette")

import httpx

from examples.skyrl_agents.skyrl_agents import AgentGenerator, split_arguments
from skyrl_fast.batch.generator_output import validate_generator_output

AGENT = {"agent.function": f"{__file__}:agent", "generator.max_retries": 0}


async def agent(task: Any) -> float:
    """Two calls; the second one has another context."""
    row = task.row
    if row["answer"] == "fails":
        raise RuntimeError("oh no")
    headers = {"authorization": f"Bearer {task.api_key}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False) as client:

        async def ask(messages: Any, **options: Any) -> str:
            body = {"model": task.model, "messages": messages, **options}
            answer = await client.post(f"{task.base_url}/chat/completions", json=body)
            return answer.json()["choices"][0]["message"]["content"]

        first = await ask(row["prompt"])
        await ask([{"role": "user", "content": f"after {first}"}], temperature=0.1)
    if row["answer"] == "pid":
        return float(os.getpid())
    return float(row["answer"])


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass
class Client:
    """SkyRL's inference engine client, as far as a generator uses it."""

    tokenizer: Any
    fails: bool = False
    asked: list[tuple[dict[str, Any], str | None]] = field(default_factory=list)

    async def generate(self, input_batch: Any, model: str | None = None) -> dict[str, Any]:
        if self.fails:
            raise ConnectionError("refused")
        self.asked.append((input_batch, model))
        (prompt,) = input_batch["prompt_token_ids"]
        ids = [*self.tokenizer.encode(f"a{len(prompt)}"), self.tokenizer.eos_token_id]
        return {
            "responses": [self.tokenizer.decode(ids, skip_special_tokens=True)],
            "response_ids": [ids],
            "stop_reasons": ["stop"],
            "response_logprobs": [[-0.5] * len(ids)],
        }


def config(**changes: Any) -> Any:
    """SkyRL's `generator`, as far as it is read."""
    sampling = SimpleNamespace(
        max_generate_length=16, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, logprobs=1,
        stop=None,
    )  # fmt: skip
    values = {
        "step_wise_trajectories": True,
        "max_turns": 4,
        "max_input_length": 256,
        "sampling_params": sampling,
        "eval_sampling_params": None,
        "chat_template": SimpleNamespace(source="name", name_or_path=None),
        "chat_template_kwargs": {},
        "use_cache_salt": True,
        "zero_reward_on_non_stop": False,
        "apply_overlong_filtering": False,
    }
    return SimpleNamespace(**{**values, **changes})


def batch(
    answers: list[str], make_id: Any = TrajectoryID, uid: str = "p", **fields: Any
) -> dict[str, Any]:
    return {
        "prompts": [[{"role": "user", "content": "task"}] for _ in answers],
        "env_classes": ["none" for _ in answers],
        "env_extras": [{"answer": answer} for answer in answers],
        "sampling_params": {"max_tokens": 8, "temperature": 0.7, "logprobs": 1, "stop": None},
        "trajectory_ids": [make_id(uid, n) for n in range(len(answers))],
        "batch_metadata": SimpleNamespace(global_step=3, training_phase="train"),
        **fields,
    }


def generated(client: Client, given: dict[str, Any], **changes: Any) -> dict[str, Any]:
    generator = AgentGenerator(
        config(**changes), client, client.tokenizer, agent=AGENT, policy_model_name="m"
    )
    return asyncio.run(generator.generate(given))


def test_processes_of_agents_are_kept_from_batch_to_batch(tiny_tokenizer: Any) -> None:
    settings = {**AGENT, "agent.workers": "process"}
    client = Client(tiny_tokenizer)
    generator = AgentGenerator(config(), client, tiny_tokenizer, agent=settings)
    pids = {asyncio.run(generator.generate(batch(["pid"])))["rewards"][-1] for _ in range(2)}
    assert len(pids) == 1 and os.getpid() not in pids


def test_each_call_of_an_agent_is_a_row(tiny_tokenizer: Any) -> None:
    client = Client(tiny_tokenizer)
    given = batch(["1", "2"])
    output = generated(client, given)
    first = tiny_tokenizer.apply_chat_template(
        given["prompts"][0], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert output["prompt_token_ids"][0] == output["prompt_token_ids"][2] == first
    answer = [*tiny_tokenizer.encode(f"a{len(first)}"), tiny_tokenizer.eos_token_id]
    assert output["response_ids"][0] == answer
    assert f"after a{len(first)}" in tiny_tokenizer.decode(output["prompt_token_ids"][1])
    assert output["rewards"] == [0.0, 1.0, 0.0, 2.0]
    assert output["is_last_step"] == [False, True, False, True]
    ids = given["trajectory_ids"]
    assert list(map(id, output["trajectory_ids"])) == [id(ids[n]) for n in (0, 0, 1, 1)]
    assert output["rollout_logprobs"][0] == [-0.5] * len(answer)
    assert output["loss_masks"][0] == [1] * len(answer)
    assert not set(output) & {"policy_versions", "env_classes", "data_sources"}
    validate_generator_output(output, step_wise=True)
    request, model = client.asked[0]
    assert model == "m"
    assert request["cache_salt"] == "policy-3"
    assert request["sampling_params"] == {
        "max_tokens": 8,
        "temperature": 0.7,  # not the agent's
        "logprobs": 1,
        "stop": None,
        "include_stop_str_in_output": True,
    }


def test_a_failed_trajectory_is_a_masked_row(tiny_tokenizer: Any) -> None:
    end = tiny_tokenizer.eos_token_id
    output = generated(Client(tiny_tokenizer), batch(["fails", "2"]))
    assert (output["response_ids"][0], output["loss_masks"][0]) == ([end], [0])
    assert output["rewards"] == [0.0, 0.0, 2.0]
    assert output["stop_reasons"] == ["env_error", "stop", "stop"]
    with pytest.raises(RuntimeError, match=r"all 1 trajectories failed; .*oh no"):
        generated(Client(tiny_tokenizer), batch(["fails"]))
    with pytest.raises(RuntimeError, match="ConnectionError: refused"):
        generated(Client(tiny_tokenizer, fails=True), batch(["1"]))


def test_skyrls_rules_of_stop_reasons_hold_for_trajectories(tiny_tokenizer: Any) -> None:
    rules = {"zero_reward_on_non_stop": True, "apply_overlong_filtering": True}
    output = generated(Client(tiny_tokenizer), batch(["1"]), max_turns=1, **rules)
    assert output["stop_reasons"] == ["max_turns"]
    assert output["rewards"] == [0.0]
    assert set(output["loss_masks"][0]) == {0}


def test_settings_that_cannot_work_are_named(tiny_tokenizer: Any) -> None:
    client = Client(tiny_tokenizer)
    for changes, settings, wanted in (
        ({"step_wise_trajectories": False}, AGENT, "step_wise_trajectories: expected true"),
        ({}, {}, "agent.function: expected a function"),
        ({}, {"agent.function": "no.such:agent"}, "agent.function: cannot import"),
    ):
        with pytest.raises(ValueError, match=wanted):
            AgentGenerator(config(**changes), client, tiny_tokenizer, agent=settings)
    settings, rest = split_arguments(
        [
            "trainer.override_entrypoint=skyrl_agents",
            "agent.command=[my-agent, --fast]",
            "generator.max_retries=2",
            "generator.max_turns=8",
        ]
    )
    assert settings == {"agent.command": ["my-agent", "--fast"], "generator.max_retries": 2}
    assert rest == ["generator.max_turns=8"]


@pytest.mark.peers
def test_skyrl_takes_the_generator_and_its_output(tiny_tokenizer: Any) -> None:
    base = pytest.importorskip("skyrl.train.generators.base", reason="SkyRL is not installed")
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.generators.utils import concatenate_generator_outputs
    from skyrl.train.utils.trainer_utils import validate_generator_output as validate

    settings = ["generator.step_wise_trajectories=true", "generator.max_turns=4"]
    skyrl = SkyRLTrainConfig.from_cli_overrides(
        [*settings, "trainer.algorithm.advantage_estimator=grpo"]
    )
    skyrl.generator.max_input_length = 256
    client = Client(tiny_tokenizer)
    base.GeneratorInterface.register(AgentGenerator)
    generator = AgentGenerator(skyrl.generator, client, tiny_tokenizer, agent=AGENT)
    assert isinstance(generator, base.GeneratorInterface)
    given = batch(["1", "2", "fails"], make_id=base.TrajectoryID)
    given["batch_metadata"] = base.BatchMetadata(global_step=1, training_phase="train")
    output = asyncio.run(generator.generate(given))
    validate(3, output, step_wise=True)
    assert set(output) <= set(base.GeneratorOutput.__annotations__)
    other = asyncio.run(generator.generate(batch(["3"], make_id=base.TrajectoryID, uid="q")))
    both = concatenate_generator_outputs([output, other], step_wise=True)
    assert both["response_ids"] == output["response_ids"] + other["response_ids"]
    assert client.asked[0][1] is None


@pytest.mark.peers
@pytest.mark.timeout(300)
def test_two_steps_of_skyrls_trainer(tmp_path: Path, tiny_tokenizer: Any) -> None:
    pytest.importorskip("skyrl.train.trainer", reason="SkyRL is not installed")
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    helpers = Path(__file__).parents[1] / "helpers"
    path = os.pathsep.join([str(helpers.parents[1]), os.environ.get("PYTHONPATH", "")])
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, helpers / "_skyrl_agent_run.py", tmp_path / "tokenizer", out],
        env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for result in json.loads(out.read_text()):  # of rows, and of merged rows
        # 12 trajectories of 2 calls, one of which failed: 23 rows, padded for two ranks.
        assert result["rows"] == [24, 24]
        assert len(result["losses"]) == 8
        assert all(math.isfinite(loss) for loss in result["losses"])
        rewards = [log["reward/avg_raw_reward"] for log in result["logs"]]
        assert rewards == pytest.approx([11 / 12] * 2)
