"""A trial of Harbor as a command at the gateway: rewards, failures by name, training."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from _agents import CALL
from _gateway import played
from _torch_engine import torch_engine as torch_engine  # a fixture
from fake_envs import FakePrompt

import skyrl_fast
from examples.harbor.trial import read_config, rewards_of
from skyrl_fast.gateway.agents.command import CommandAgent
from skyrl_fast.trajectory_store.reader import read_trajectories

pytest.importorskip("starlette")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/harbor"
CONFIG = EXAMPLE / "local_process.json"
# An environment of its own, with Python 3.12: see the example's page.
HARBOR = ROOT / "build/peers/harbor/bin/harbor"
RESULT = "trials/trial/result.json"
WRITE = "import os\nos.makedirs('trials/trial')\nopen({path!r}, 'w').write({text!r})\n"


def harbor(folder: Path, code: str) -> Path:
    """Return a program in place of Harbor's, which calls the model once and then does this."""
    program = folder / "harbor"
    program.write_text(f"#!{sys.executable} -IS\n{CALL}\n{code}")
    program.chmod(0o755)
    return program


def writes(**result: Any) -> str:
    return WRITE.format(path=RESULT, text=json.dumps(result))


def command(program: Path, config: Path = CONFIG) -> list[str]:
    return [sys.executable, str(EXAMPLE / "trial.py"), str(program), str(config)]


def trial(program: Path, tokenizer: Any, task: Path = EXAMPLE / "task", **options: Any) -> Any:
    prompt = FakePrompt("p", env_extras={"task": str(task)})
    agent = CommandAgent(command(program), reward_file="reward.json")
    return played(agent, tokenizer, prompts=[prompt], max_retries=0, **options).only


def test_placeholders_are_quoted() -> None:
    variables = {"URL": 'a"\\b', "KEY": "$URL"}
    assert read_config('{"a": "${URL}", "b": "$$${KEY}"}', variables) == {
        "a": 'a"\\b',
        "b": "$$URL",
    }
    with pytest.raises(KeyError, match="OTHER"):
        read_config('{"a": "${OTHER}"}', variables)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"reward": 0.5}, {"reward": 0.5}),
        ({"tests": 1}, {"reward": 1, "tests": 1}),
        ({"reward": 1, "style": 0.25}, {"reward": 1, "style": 0.25}),
    ],
)
def test_rewards_of_a_result(rewards: dict[str, float], expected: dict[str, float]) -> None:
    assert rewards_of({"verifier_result": {"rewards": rewards}}) == expected


@pytest.mark.spec("gateway.harbor")
def test_the_verifiers_rewards(tmp_path: Path, tiny_tokenizer: Any) -> None:
    program = harbor(tmp_path, writes(verifier_result={"rewards": {"reward": 0.5, "style": 2}}))
    trajectory = trial(program, tiny_tokenizer)
    (step,) = trajectory.steps
    assert (trajectory.failure, step.text, step.reward) == (None, "a0", 0.5)
    assert trajectory.env_metrics["style"] == 2.0


LOST = {"exception_type": "AgentTimeoutError", "exception_message": "after 60 s"}
HOSTILE = {
    "dies": ("os.kill(os.getpid(), 9)", "no result; exit code -9"),
    "fails": ("sys.exit(3)", "no result; exit code 3"),
    "garbage": (WRITE.format(path=RESULT, text="{"), "Expecting property name"),
    "no rewards": (writes(verifier_result=None), "expected a reward of the verifier, got none"),
    "an exception": (writes(exception_info=LOST), "AgentTimeoutError: after 60 s"),
    "which reward": (
        writes(verifier_result={"rewards": {"a": 1, "b": 2}}),
        "expected a reward called 'reward', got a, b",
    ),
}


@pytest.mark.spec("gateway.harbor")
@pytest.mark.parametrize("case", HOSTILE)
def test_trials_without_a_reward_are_named(case: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    code, expected = HOSTILE[case]
    failure = trial(harbor(tmp_path, code), tiny_tokenizer).failure
    assert "agent.reward_file: reward.json: no such file; exit code 1; output: " in failure
    assert f"harbor: {EXAMPLE / 'task'}: " in failure
    assert expected in failure


def test_a_trial_that_never_ends_is_ended_at_its_deadline(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    program = harbor(tmp_path, "import time\ntime.sleep(600)")
    trajectory = trial(program, tiny_tokenizer, trajectory_timeout_seconds=8.0)
    assert trajectory.stop_reason == "timeout"


@pytest.mark.peers
@pytest.mark.skipif(not HARBOR.exists(), reason="needs Harbor and Python 3.12")
@pytest.mark.usefixtures("torch_engine")
def test_a_task_folder_of_harbor_is_trained(
    tmp_path: Path,
    tiny_model_folder: Path,
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))  # of the environment and the agent
    settings = {
        "agent.command": command(HARBOR),
        "agent.reward_file": "reward.json",
        "trainer.policy.model.path": tiny_model_folder,
        "trainer.policy.optimizer_config": {"lr": 0.01},
        "trainer.run_path": tmp_path / "run",
        "trainer.train_batch_size": 2,
        "trainer.policy_mini_batch_size": 2,
        "trainer.eval_interval": -1,
        "trainer.logger": ["jsonl"],
        "trainer.plot": False,
        "trainer.num_threads": 1,  # tiny matrices
        "generator.n_samples_per_prompt": 2,
        "generator.sampling_params.max_generate_length": 6,
        "generator.max_input_length": 300,
    }
    rows = [{"prompt": str(n), "task": str(EXAMPLE / "task")} for n in range(4)]
    result = skyrl_fast.train_agent(settings, prompts=rows)
    assert (result.step, result.signal) == (2, None)
    trajectories = list(read_trajectories(tmp_path / "run"))
    assert len(trajectories) == 8
    for trajectory in trajectories:
        (step,) = trajectory.steps
        assert "say sun" in tiny_tokenizer.decode(list(step.prompt_token_ids))
        answer = tiny_tokenizer.decode(step.response_ids, skip_special_tokens=True)
        letters = sum(c.isascii() and c.isalpha() for c in answer)
        assert step.turn["reward"] == pytest.approx(letters / max(len(answer), 1), abs=1e-6)

    broken = tmp_path / "task"
    shutil.copytree(EXAMPLE / "task", broken)
    (broken / "tests/test.sh").write_text("#!/bin/sh\n")
    failure = trial(HARBOR, tiny_tokenizer, broken).failure
    assert f"harbor: {broken}: RewardFileNotFoundError: No reward file found" in failure
