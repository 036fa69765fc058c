"""The loop with rollouts that sample from the model itself: learning, resuming, stopping."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from _fakes import FakeRollouts, FakeTokenizer, tiny_model, write_prompts

from skyrl_fast.config import Config
from skyrl_fast.config_loading import load_config
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train import run as run_module
from skyrl_fast.train.checkpoint import RunInUseError, checkpoints
from skyrl_fast.train.prompts import Prompt, PromptSampler, load_prompts
from skyrl_fast.train.run import Outcome, SetupError, run_training
from skyrl_fast.train.sinks import read_metrics
from skyrl_fast.train.trainer import split_rollout_time

CHANGING = ("timing/", "generate/trajectory")  # the clock's


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, prompts and no real tokenizer."""
    tiny_model().save_pretrained(tmp_path / "model")
    write_prompts(tmp_path / "train.jsonl", 8)
    write_prompts(tmp_path / "val.jsonl", 4)
    monkeypatch.setattr(run_module, "load_tokenizer", lambda path: FakeTokenizer())
    return tmp_path


def settings(folder: Path, name: str, *overrides: str) -> Config:
    return load_config(
        None,
        [
            f"data.train_data=[{folder}/train.jsonl]",
            f"data.val_data=[{folder}/val.jsonl]",
            f"trainer.policy.model.path={folder}/model",
            f"trainer.run_path={folder}/{name}",
            "trainer.policy.optimizer_config.lr=0.01",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=2",
            "trainer.epochs=3",
            "trainer.eval_interval=2",
            "trainer.ckpt_interval=2",
            "trainer.max_ckpts_to_keep=-1",
            "trainer.logger=[jsonl]",
            "trainer.plot=false",
            "generator.n_samples_per_prompt=4",
            *overrides,
        ],
    )


class Recorder:
    """Starts fake rollouts and keeps them; `during` is called before each batch is generated."""

    def __init__(self, during: Any = None) -> None:
        self.rollouts: list[FakeRollouts] = []
        self.during = during

    async def __call__(self, config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        during = self.during

        class Watched(FakeRollouts):
            async def generate(
                self, prompts: Sequence[Prompt], *, step: int, phase: str
            ) -> list[Trajectory]:
                if during is not None and phase == "train":
                    await during(step)
                return await super().generate(prompts, step=step, phase=phase)

        self.rollouts.append(Watched(config, tiny_model(seed=1)))
        return self.rollouts[-1]

    @property
    def order(self) -> list[tuple[int, list[str]]]:
        return [(s, uids) for r in self.rollouts for s, phase, uids in r.calls if phase == "train"]


def train(config: Config, recorder: Recorder | None = None) -> Outcome:
    return run_training(config, make_rollouts=recorder or Recorder())


def steady(path: Path) -> list[dict[str, Any]]:
    """The metrics without what the clock says."""
    return [
        {name: value for name, value in row.items() if not name.startswith(CHANGING)}
        for row in read_metrics(path)
    ]


def test_a_whole_run_learns_and_leaves_everything(folder: Path) -> None:
    recorder = Recorder()
    outcome = train(
        settings(folder, "run", "trainer.epochs=12", "generator.n_samples_per_prompt=8"), recorder
    )
    assert (outcome.step, outcome.total_steps, outcome.signal) == (24, 24, None)
    assert outcome.before is not None and outcome.after is not None
    rows = read_metrics(outcome.metrics)
    assert [row["step"] for row in rows] == list(range(25))
    early = [row["reward/avg_raw_reward"] for row in rows[1:5]]
    late = [row["reward/avg_raw_reward"] for row in rows[-4:]]
    assert sum(late) / 4 > sum(early) / 4 + 0.1
    assert rows[1]["policy/optimizer_steps"] == 2
    assert rows[1]["generate/avg_num_turns"] == 2
    assert {f"timing/{part}" for part in ("generate", "environment", "batch", "sync")} <= set(
        rows[1]
    )
    assert recorder.rollouts[0].version == 24
    assert recorder.rollouts[0].closed
    record = json.loads((outcome.trajectories / "step_000001.jsonl").read_text().splitlines()[0])
    assert len(record["turns"]) == 2 and record["prompt"].startswith("1 ")
    assert (outcome.trajectories / "eval_step_000000.jsonl").exists()
    assert outcome.checkpoint == folder / "run/checkpoints/step_000024"
    assert "agent, turn 2" in outcome.sample


def test_the_engine_gets_the_trained_weights(folder: Path) -> None:
    recorder = Recorder()
    outcome = train(settings(folder, "run", "trainer.epochs=1"), recorder)
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(outcome.checkpoint / "policy")
    for one, two in zip(saved.parameters(), recorder.rollouts[0].model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_on_policy_the_trainer_agrees_with_the_sampler(folder: Path) -> None:
    outcome = train(settings(folder, "run", "trainer.epochs=1", "trainer.policy_mini_batch_size=4"))
    for row in read_metrics(outcome.metrics)[1:]:
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-5  # float32 noise


def test_same_seed_same_metrics_other_seed_other(folder: Path) -> None:
    one = steady(train(settings(folder, "a")).metrics)
    two = steady(train(settings(folder, "b")).metrics)
    three = steady(train(settings(folder, "c", "trainer.seed=7")).metrics)
    assert one == two
    assert one != three


class DiedError(Exception):
    """As by kill -9: nothing may be written any more."""


@pytest.mark.parametrize("at_step", [3, 5])
def test_resume_equals_an_undisturbed_run(
    folder: Path, at_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, first, second = Recorder(), Recorder(), Recorder()
    expected = train(settings(folder, "whole"), whole)

    async def die(step: int) -> None:
        if step == at_step:
            raise DiedError

    first.during = die
    with monkeypatch.context() as patch, pytest.raises(DiedError):
        patch.setattr(run_module.Trainer, "_rescue", lambda self: None)
        train(settings(folder, "broken"), first)
    assert [step for step, _ in checkpoints(folder / "broken/checkpoints")] == list(
        range(2, at_step + 1, 2)
    )
    outcome = train(settings(folder, "broken", "trainer.resume_mode=latest"), second)

    assert steady(outcome.metrics) == steady(expected.metrics)
    resumed_at = (at_step // 2) * 2
    assert first.order[:resumed_at] + second.order == whole.order
    for file in ("model.safetensors",):
        assert (outcome.checkpoint / "policy" / file).read_bytes() == (
            expected.checkpoint / "policy" / file
        ).read_bytes()
    assert (outcome.checkpoint / "optimizer.safetensors").read_bytes() == (
        expected.checkpoint / "optimizer.safetensors"
    ).read_bytes()


def test_an_error_leaves_a_checkpoint_of_the_last_whole_step(folder: Path) -> None:
    async def fail(step: int) -> None:
        if step == 3:
            raise RuntimeError("the environment is gone")

    with pytest.raises(RuntimeError, match="the environment is gone"):
        train(settings(folder, "run"), Recorder(fail))
    assert checkpoints(folder / "run/checkpoints")[-1][0] == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_with_a_checkpoint_and_the_run_goes_on(
    folder: Path, number: signal.Signals
) -> None:
    expected = train(settings(folder, "whole"))

    async def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)  # cancelled by the stop

    recorder = Recorder(interrupt)
    outcome = train(settings(folder, "run"), recorder)
    assert (outcome.step, outcome.signal) == (3, number)
    assert outcome.checkpoint is not None and outcome.checkpoint.name == "step_000003"
    assert recorder.rollouts[0].closed
    resumed = train(settings(folder, "run", "trainer.resume_mode=latest"))
    assert (resumed.step, resumed.signal) == (6, None)
    assert steady(resumed.metrics) == steady(expected.metrics)


def test_learning_rate_zero_keeps_weights_and_reward(folder: Path) -> None:
    outcome = train(settings(folder, "run", "trainer.policy.optimizer_config.lr=0"))
    rewards = [
        r["eval/all/avg_score"] for r in read_metrics(outcome.metrics) if "eval/all/avg_score" in r
    ]
    assert len(rewards) == 4
    assert len(set(rewards)) == 1
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(folder / "model")
    after = AutoModelForCausalLM.from_pretrained(outcome.checkpoint / "policy")
    for one, two in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_used_folder_is_not_overwritten(folder: Path) -> None:
    train(settings(folder, "run", "trainer.epochs=1"))
    with pytest.raises(RunInUseError, match="holds an earlier run: --resume"):
        train(settings(folder, "run", "trainer.epochs=1"))


def test_resuming_with_other_data_is_refused(folder: Path) -> None:
    train(settings(folder, "run", "trainer.epochs=1"))
    write_prompts(folder / "train.jsonl", 12)
    with pytest.raises(ValueError, match="num_prompts=8, this run has 12"):
        train(settings(folder, "run", "trainer.resume_mode=latest"))


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("trainer.policy.model.path=./nowhere", "model folder not found: ./nowhere"),
        ("data.train_data=[nowhere.jsonl]", "data file not found: nowhere.jsonl"),
        ("trainer.train_batch_size=32", "at least trainer.train_batch_size=32 prompts, got 8"),
        ("trainer.logger=[wandb]", "wandb"),
    ],
)
def test_what_is_missing_is_said_before_the_engine_starts(
    folder: Path, override: str, wanted: str
) -> None:
    if "wandb" in override:
        try:
            import wandb  # noqa: F401

            pytest.skip("wandb is installed")
        except ImportError:
            pass
    recorder = Recorder()
    extra = ["trainer.policy_mini_batch_size=4"] if "batch" in override else []
    with pytest.raises(SetupError, match=wanted):
        train(settings(folder, "run", override, *extra), recorder)
    assert recorder.rollouts == []


def test_failed_trajectories_are_counted_and_do_not_stop_the_step(folder: Path) -> None:
    class Flaky(FakeRollouts):
        async def generate(
            self, prompts: Sequence[Prompt], *, step: int, phase: str
        ) -> list[Trajectory]:
            trajectories = await super().generate(prompts, step=step, phase=phase)
            trajectories[1].steps = []
            trajectories[1].failure = "RuntimeError: flaky"
            trajectories[1].stop_reason = "error"
            return trajectories

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        return Flaky(config, tiny_model())

    outcome = run_training(settings(folder, "run", "trainer.epochs=1"), make_rollouts=make)
    row = read_metrics(outcome.metrics)[1]
    assert row["generate/failed_trajectories"] == 1
    assert row["generate/num_trajectories"] == 16


def test_plot_and_tensorboard(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    outcome = train(
        settings(
            folder,
            "run",
            "trainer.epochs=1",
            "trainer.plot=true",
            "trainer.logger=[jsonl,tensorboard]",
        )
    )
    assert outcome.plot is not None
    assert outcome.plot.read_bytes()[1:4] == b"PNG"
    assert list((folder / "run/tensorboard").iterdir())


def test_sampler_epochs_are_permutations_and_resume() -> None:
    sampler = PromptSampler(10, batch_size=4, seed=3)
    batches = [sampler.next_batch() for _ in range(6)]
    for epoch in range(3):
        seen = batches[2 * epoch] + batches[2 * epoch + 1]
        assert len(set(seen)) == 8
    assert batches[:2] != batches[2:4]
    for position in range(6):
        one = PromptSampler(10, batch_size=4, seed=3)
        for _ in range(position):
            one.next_batch()
        two = PromptSampler(10, batch_size=4, seed=3)
        two.restore(json.loads(json.dumps(one.state())))
        assert [two.next_batch() for _ in range(6 - position)] == batches[position:]


def test_prompt_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [
        {"prompt": "hello", "data_source": "s", "answer": 3},
        {"prompt": [{"role": "user", "content": "x"}], "env_class": "own"},
    ]
    path.write_text(json.dumps(rows))
    first, second = load_prompts([str(path)], default_env_class="d", prefix="eval-")
    assert first == Prompt(
        "eval-0",
        [{"role": "user", "content": "hello"}],
        "d",
        {"data_source": "s", "answer": 3},
        "s",
    )
    assert (second.uid, second.env_class) == ("eval-1", "own")


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("a.jsonl", '{"prompt": 3}\n', "row 0: prompt: wanted a list of messages"),
        ("a.jsonl", "[1]\n", "row 0: wanted a mapping"),
        ("a.jsonl", '{"prompt": "x"}\n{', "line 2: no JSON"),
        ("a.json", "{}", "wanted a list of rows"),
        ("a.csv", "x", "wanted .jsonl, .json or .parquet"),
    ],
)
def test_broken_prompt_files_name_the_place(
    tmp_path: Path, name: str, text: str, wanted: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=wanted):
        load_prompts([str(tmp_path / name)], default_env_class="d")


def test_rollout_time_is_shared_by_proportion(folder: Path) -> None:
    config = settings(folder, "x")
    rollouts = FakeRollouts(config, tiny_model())
    prompts = load_prompts([f"{folder}/train.jsonl"], default_env_class="d")
    trajectories = asyncio.run(rollouts.generate(prompts, step=0, phase="train"))
    times = {"rollout": 8.0}
    split_rollout_time(times, trajectories)
    assert times == {"environment": pytest.approx(2.0), "generate": pytest.approx(6.0)}
