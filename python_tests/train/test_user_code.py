"""Rewards, environments, callbacks and loggers as users write them, with public names only."""

import json
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from _torch_engine import torch_engine as torch_engine  # a fixture

import skyrl_fast
from skyrl_fast.config import ConfigError
from skyrl_fast.train import Callback, Env, EnvStep, RunInfo, SetupError

ROOT = Path(__file__).parents[2]
WORDS = ("sun", "moon", "rain", "snow", "wind", "star", "tide", "fog")
ROWS = [{"prompt": f"say {word}", "word": word} for word in WORDS]


def letters(answer: str, row: dict[str, Any]) -> float:
    """Reward the share of the answer's characters that are ASCII letters."""
    assert row["prompt"][0]["content"] == f"say {row['word']}"
    return sum(c.isascii() and c.isalpha() for c in answer) / max(len(answer), 1)


@pytest.fixture
def settings(tiny_model_folder: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "trainer.policy.model.path": tiny_model_folder,
        "trainer.policy.optimizer_config": {"lr": 0.01},
        "trainer.run_path": tmp_path / "run",
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.logger": ["jsonl"],
        "trainer.plot": False,
        "trainer.num_threads": 1,  # tiny matrices
        "generator.n_samples_per_prompt": 4,
        "generator.sampling_params.max_generate_length": 6,
        "generator.max_input_length": 300,
    }


@pytest.mark.usefixtures("torch_engine")
async def test_notebook_cell_trains_with_a_reward_function(settings: dict[str, Any]) -> None:
    result = skyrl_fast.train_agent(
        settings | {"trainer.epochs": 6, "trainer.eval_interval": 4},
        prompts=ROWS,
        eval_prompts=ROWS,
        reward=letters,
    )
    assert (result.step, result.total_steps, result.signal) == (12, 12, None)
    assert result.before is not None and result.after is not None
    assert result.after > result.before + 0.1
    assert result.checkpoint == settings["trainer.run_path"] / "checkpoints/step_000012"


class Spell(Env):
    """Spell a word, one letter per turn."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.word = row["word"]
        self.turns = 0

    def init(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "Spell."}, *messages]

    def step(self, action: str) -> EnvStep:
        self.turns += 1
        right = action[:1] == self.word[self.turns - 1]
        done = right or self.turns == 2
        return EnvStep(float(right), done=done, observations="" if done else "next")

    def metrics(self) -> Mapping[str, Any]:
        return {"letters": self.turns}


class Recorder(Callback):
    """Records its calls, and ends the run after one step."""

    def __init__(self, last_step: int | None = None) -> None:
        self.heard: list[tuple[str, int, Any]] = []
        self.last_step = last_step

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        self.heard.append(("step", step, metrics["generate/avg_num_tokens"]))
        return step == self.last_step

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.heard.append(("eval", step, metrics["eval/all/avg_num_turns"]))

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.heard.append(("checkpoint", step, (path / "state.json").is_file()))


@pytest.mark.usefixtures("torch_engine")
def test_environment_and_callback_that_ends_the_run(settings: dict[str, Any]) -> None:
    recorder = Recorder(last_step=2)
    result = skyrl_fast.train_agent(
        settings | {"trainer.epochs": 4, "trainer.ckpt_interval": 1, "generator.max_turns": 2},
        prompts=ROWS,
        eval_prompts=ROWS[:2],
        env=Spell,
        callbacks=[recorder],
    )
    assert (result.step, result.total_steps) == (2, 8)
    assert (result.stopped_by, result.signal) == ("Recorder", None)
    heard = [(event, step) for event, step, _ in recorder.heard]
    assert heard == [("eval", 0), ("step", 1), ("checkpoint", 1), ("step", 2), ("checkpoint", 2)]
    assert recorder.heard[0][2] > 1.0  # turns of an evaluation
    assert all(value for _, _, value in recorder.heard)
    stored = "".join(
        path.read_text()
        for path in (settings["trainer.run_path"] / "trajectories").rglob("*.jsonl")
    )
    assert '"Spell"' in stored and '"letters"' in stored
    again = skyrl_fast.train_agent(
        settings
        | {
            "trainer.epochs": 4,
            "trainer.resume_mode": "latest",
            "trainer.max_training_steps": 3,
            "generator.max_turns": 2,
        },
        prompts=ROWS,
        env=Spell,
    )
    assert (again.step, again.stopped_by) == (3, None)


class Lines:
    """A logger that writes a separate file."""

    def __init__(self, run: RunInfo) -> None:
        self._file = (run.run_path / f"{run.project}-{run.run_name}.txt").open("w")
        self._file.write(f"lr {run.config['trainer']['policy']['optimizer_config']['lr']}\n")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(f"{step} {sorted(metrics)[0]}\n")

    def close(self) -> None:
        self._file.write("closed\n")
        self._file.close()


@pytest.mark.usefixtures("torch_engine")
def test_logger_by_name(settings: dict[str, Any]) -> None:
    changes = {
        "trainer.logger": [f"{__name__}:Lines"],
        "trainer.project_name": "words",
        "trainer.run_name": "first",
        "trainer.max_training_steps": 1,
    }
    result = skyrl_fast.train_agent(
        settings | changes, prompts=ROWS, eval_prompts=ROWS[:1], reward=letters
    )
    lines = (settings["trainer.run_path"] / "words-first.txt").read_text().splitlines()
    assert lines[0] == "lr 0.01"
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "closed"]
    # The rewards before and after do not require a metrics file.
    assert result.before is not None and result.after is not None


NOTEBOOK = """
import asyncio, json, sys
import skyrl_fast

def reward(answer, row):
    return float(row["letter"] in answer)

async def cell():
    settings = json.loads(sys.argv[1])
    rows = [{"prompt": f"say {c}", "letter": c} for c in "etao"]
    return skyrl_fast.train_agent(settings, prompts=rows, reward=reward)

result = asyncio.run(cell())
print(result.step, result.checkpoint)
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_notebook_cell_trains_on_vllm(settings: dict[str, Any]) -> None:
    pytest.importorskip("vllm")
    values = {key: str(v) if isinstance(v, Path) else v for key, v in settings.items()}
    values["trainer.max_training_steps"] = 1
    # `-c`: as in a notebook, the main module has no file and cannot be imported by other processes.
    command = [sys.executable, "-c", NOTEBOOK, json.dumps(values)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    last = ended.stdout.splitlines()[-1]
    assert last == f"1 {settings['trainer.run_path']}/checkpoints/step_000001"


def traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class SilentStep(Env):
    def step(self) -> EnvStep:  # type: ignore[override]
        raise AssertionError


@pytest.mark.spec("run.checks-before-models")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"reward": lambda answer: 1.0},
            "train_agent: reward: expected a function that can be called as reward(answer, row), "
            "got reward(answer): too many positional arguments",
        ),
        (
            {"env": SilentStep},
            "train_agent: env.step: expected a function that can be called as env.step(action), "
            "got env.step(self) -> skyrl_fast.rollout.env.protocol.EnvStep: too many positional",
        ),
        (
            {"reward_funcs": lambda completions, answers: [1.0]},
            "reward_funcs: <lambda>: expected arguments named",
        ),
        ({"loss": "nope"}, "trainer.algorithm.policy_loss_type: expected one of regular, "),
        ({"estimator": "nope"}, "trainer.algorithm.advantage_estimator: expected one of grpo, "),
    ],
)
def test_code_that_cannot_be_called_is_a_short_error(
    settings: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises((SetupError, ConfigError)) as caught:
        skyrl_fast.train_agent(settings, prompts=ROWS, **given)
    text = traceback_of(caught.value)
    assert message in text.splitlines()[-1]
    assert len(text.splitlines()) <= 8, text
    assert "During handling" not in text and "direct cause" not in text


def test_a_short_error_keeps_the_traceback_of_the_code_that_it_names(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    module = tmp_path / "broken_losses.py"
    module.write_text("raise KeyError('no such table')\n")
    with pytest.raises(ConfigError) as caught:
        skyrl_fast.train_agent(settings, prompts=ROWS, loss=f"{module}:loss")
    text = traceback_of(caught.value)
    assert f'File "{module}", line 1' in text
    assert "KeyError: 'no such table'" in text
