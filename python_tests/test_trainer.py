"""The loop with rollouts that sample from the model itself: learning, resuming, stopping."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import numpy as np
import torch
from _fakes import FakeRollouts, FakeTokenizer, tiny_model, write_prompts

from skyrl_fast.config import Config
from skyrl_fast.config.loading import load_config
from skyrl_fast.rollout.failures import RolloutError
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train import run as run_module
from skyrl_fast.train.checkpoint import RunInUseError, checkpoints
from skyrl_fast.train.dynamic_sampling import DynamicSamplingError
from skyrl_fast.train.policy import Policy
from skyrl_fast.train.prompts import Prompt, PromptSampler, load_prompts
from skyrl_fast.train.rollouts import split_rollout_time
from skyrl_fast.train.run import Outcome, SetupError, run_training
from skyrl_fast.train.sinks import read_metrics
from skyrl_fast.train.waiting import Beside
from skyrl_fast.trajectory_store import read_trajectories
from skyrl_fast.trajectory_store.parts import parts
from skyrl_fast.trajectory_store.writer import StoreError, TrajectoryWriter

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
            async def before_batch(self, step: int, phase: str) -> None:
                if during is not None and phase == "train":
                    await during(step)

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
    assert len(record["turns"]) == 2 and record["turns"][0]["context"].startswith("1 ")
    assert (outcome.trajectories / "eval_step_000000.jsonl").exists()
    assert outcome.checkpoint == folder / "run/checkpoints/step_000024"
    assert "agent, turn 2" in outcome.sample


# Three ways to the trainer's log-probabilities: the pass that trains, one before it, and with the
# engine's as the old ones.
@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.policy_mini_batch_size=4"],
        ["trainer.policy_mini_batch_size=2"],
        ["trainer.policy_mini_batch_size=4", "trainer.algorithm.old_logprobs=rollout"],
        ["trainer.policy_mini_batch_size=4", "generator.merge_stepwise_output=true"],
    ],
)
@pytest.mark.spec("14.6")
def test_the_store_holds_what_was_trained(folder: Path, overrides: list[str]) -> None:
    outcome = train(settings(folder, "run", "trainer.epochs=1", *overrides))
    stored = list(read_trajectories(outcome.run_path, phase="train"))
    assert [t.entry.step for t in stored] == [1] * 16 + [2] * 16
    rewards = [t.entry.reward for t in stored if t.entry.step == 1]
    row = read_metrics(outcome.metrics)[1]
    assert sum(rewards) / 16 == pytest.approx(row["reward/avg_raw_reward"])
    assert all(t.entry.staleness == 0 for t in stored)
    compared = 0
    for trajectory in stored:
        for step in trajectory.steps:
            assert step.loss_mask.tolist() == [1, 1]
            assert step.advantages.tolist() == pytest.approx([trajectory.entry.advantage] * 2)
            seen = ~np.isnan(step.trainer_logprobs)
            # Rows of advantage 0 are not run, unless all log-probabilities were made before.
            assert seen.all() or trajectory.entry.advantage == 0
            # The sampler is the trainer's own model: what differs is rounding.
            gap = np.abs(step.trainer_logprobs - step.rollout_logprobs)[seen]
            assert (gap < 1e-4).all()
            compared += len(gap)
    assert compared > 0


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


@pytest.mark.spec("10.1", "10.2", "10.3")
def test_rows_per_step_merged_or_per_trajectory_learn_the_same(folder: Path) -> None:
    first = {}
    for name, override in {
        "step": "generator.step_wise_trajectories=true",
        "merged": "generator.merge_stepwise_output=true",
        "trajectory": "generator.step_wise_trajectories=false",
    }.items():
        outcome = train(settings(folder, name, override, "trainer.max_training_steps=1"))
        first[name] = read_metrics(outcome.metrics)[1]
    for name in ("merged", "trajectory"):  # 16 trajectories of two turns each
        row = first[name]
        assert row["generate/num_seq_before_merge"] == 32
        assert row["generate/num_seq_after_merge"] == row["generate/batch_num_seq"] == 16
        assert row["generate/batch_num_tokens"] < first["step"]["generate/batch_num_tokens"]
        for same in ("generate/avg_num_turns", "reward/avg_raw_reward", "policy/grad_norm"):
            # The same tokens are trained after the same tokens: float32 sums in another order.
            assert row[same] == pytest.approx(first["step"][same], rel=1e-4), same
    assert first["step"]["policy/grad_norm"] > 0


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


# --- trajectories are written beside the training -------------------------------------------------


def stored_steps(run: Path) -> list[int]:
    return [part.step for part in parts(run / "trajectories") if not part.evaluation]


def slow_store(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    write = TrajectoryWriter.write

    def slowly(self: TrajectoryWriter, *arguments: Any, **named: Any) -> Path:
        time.sleep(seconds)
        return write(self, *arguments, **named)

    monkeypatch.setattr(TrajectoryWriter, "write", slowly)


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    write = TrajectoryWriter._write_part

    def full(self: TrajectoryWriter, name: str, records: Any) -> Path:
        if name == f"step_{at_step:06d}.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, name, records)

    monkeypatch.setattr(TrajectoryWriter, "_write_part", full)


@pytest.mark.spec("14.17")
def test_a_checkpoint_waits_for_the_trajectories_before_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_store(monkeypatch, 0.2)
    seen: list[tuple[int, list[int]]] = []
    write_state = run_module.Trainer._write_state

    def looks(self: Any, path: Path) -> None:
        seen.append((self.progress.step, stored_steps(folder / "run")))
        write_state(self, path)

    monkeypatch.setattr(run_module.Trainer, "_write_state", looks)
    outcome = train(settings(folder, "run", "trainer.ckpt_interval=3", "trainer.eval_interval=5"))
    assert seen == [(3, [1, 2, 3]), (6, [1, 2, 3, 4, 5, 6])]
    last = read_metrics(outcome.metrics)[-1]
    assert last["timing/store_beside"] >= 0.2  # of the step before
    assert "timing/store" in last


@pytest.mark.spec("14.17")
def test_a_signal_leaves_the_trajectories_of_every_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_store(monkeypatch, 0.2)

    async def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)  # cancelled by the stop

    assert train(settings(folder, "run"), Recorder(interrupt)).step == 3
    assert stored_steps(folder / "run") == [1, 2, 3]


@pytest.mark.spec("14.17")
def test_a_run_has_not_ended_well_before_its_last_trajectories_are_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk(monkeypatch, at_step=6)
    with pytest.raises(StoreError, match="trajectories of step 6 not written"):
        train(settings(folder, "run"))
    assert checkpoints(folder / "run/checkpoints")[-1][0] == 4


@pytest.mark.spec("14.18")
def test_a_full_disk_ends_the_run_at_the_next_step_and_nothing_is_lost(folder: Path) -> None:
    expected = train(settings(folder, "whole"))
    with pytest.MonkeyPatch.context() as patch:
        fill_the_disk(patch, at_step=3)
        with pytest.raises(StoreError, match=r"step 3 .*/trajectories: the disk is full; free"):
            train(settings(folder, "run"))
    # Step 3 is not in the store: no checkpoint says that it is done.
    assert [step for step, _ in checkpoints(folder / "run/checkpoints")] == [2]
    outcome = train(settings(folder, "run", "trainer.resume_mode=latest"))
    assert steady(outcome.metrics) == steady(expected.metrics)
    assert stored_steps(outcome.run_path) == [1, 2, 3, 4, 5, 6]


def test_one_call_goes_on_beside_and_the_next_one_waits_for_it() -> None:
    beside, events = Beside(time.perf_counter), list[str]()
    go = threading.Event()

    def first() -> None:
        go.wait(10)
        events.append("first")

    def second() -> None:
        events.append("second")
        raise ValueError("broken")

    async def work() -> None:
        await beside.start(first)
        assert events == []  # it did not wait for its end
        asyncio.get_running_loop().call_later(0.1, go.set)  # the loop is alive while it waits
        await beside.start(second)
        assert events[0] == "first" and beside.took() >= 0.05
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                await beside.start(first)

    asyncio.run(work())
    with pytest.raises(ValueError, match="broken"):
        beside.wait()
    beside.close()
    assert events == ["first", "second"]


def test_a_resume_before_the_first_checkpoint_begins_anew(folder: Path) -> None:
    expected = train(settings(folder, "run"))
    kept = steady(expected.metrics)
    shutil.rmtree(folder / "run/checkpoints")
    outcome = train(settings(folder, "run", "trainer.resume_mode=latest"))
    assert steady(outcome.metrics) == kept


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
            if len(self.calls[-1][2]) == 1:  # the batch's first group
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


@pytest.mark.spec("3.11", "3.28")
def test_a_batch_in_which_everything_failed_trains_nothing_and_the_run_goes_on(
    folder: Path,
) -> None:
    class FirstFails(FakeRollouts):
        async def generate(
            self, prompts: Sequence[Prompt], *, step: int, phase: str
        ) -> list[Trajectory]:
            trajectories = await super().generate(prompts, step=step, phase=phase)
            for one in trajectories:
                if phase == "train" and self.version == 0:
                    one.steps, one.failure, one.stop_reason = [], "no such table", "env_error"
                else:
                    one.steps[-1].reward = float(one.repetition_id % 2)
            return trajectories

    weights: list[torch.Tensor] = []

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        made = FirstFails(config, tiny_model())
        update = made.update_weights

        async def noted(policy: Policy, *, version: int) -> dict[str, float]:
            weights.append(next(policy.model.parameters()).detach().clone())
            return await update(policy, version=version)

        made.update_weights = noted  # type: ignore[method-assign]
        return made

    outcome = run_training(settings(folder, "run", "trainer.epochs=1"), make_rollouts=make)
    rows = read_metrics(outcome.metrics)
    assert rows[1]["generate/failed_trajectories"] == 16
    assert rows[1]["policy/loss"] == 0.0
    assert rows[2]["generate/failed_trajectories"] == 0
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


@pytest.mark.spec("3.28")
@pytest.mark.parametrize("before_train", ["true", "false"])
def test_three_batches_in_which_everything_failed_end_the_run(
    folder: Path, before_train: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(FakeRollouts):
        async def generate(
            self, prompts: Sequence[Prompt], *, step: int, phase: str
        ) -> list[Trajectory]:
            trajectories = await super().generate(prompts, step=step, phase=phase)
            for one in trajectories:
                one.steps, one.failure, one.stop_reason = [], "no such table", "env_error"
            return trajectories

    made: list[Fails] = []

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        made.append(Fails(config, tiny_model()))
        return made[-1]

    config = settings(
        folder, "run", f"trainer.eval_before_train={before_train}", "trainer.eval_interval=-1"
    )
    with pytest.raises(RolloutError, match=r"3 batches in a row failed.*\(.*\): no such table"):
        run_training(config, make_rollouts=make)
    assert len(made[0].calls) == 3  # training or evaluation
    assert caplog.text.count("NOTHING TO TRAIN IN THIS BATCH: 16 of 16") >= 2


# --- filters, dynamic sampling, KL in the reward ------------------------------------------------


def outcomes_by_uid(easy: Sequence[str]) -> Any:
    """Starts rollouts in which these prompts always succeed; others succeed every second time."""

    class Scripted(FakeRollouts):
        async def generate(
            self, prompts: Sequence[Prompt], *, step: int, phase: str
        ) -> list[Trajectory]:
            trajectories = await super().generate(prompts, step=step, phase=phase)
            for one in trajectories:
                always = one.uid.partition("~")[0] in easy
                one.steps[-1].reward = 1.0 if always else float(one.repetition_id % 2)
            return trajectories

    made: list[Scripted] = []

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        made.append(Scripted(config, tiny_model()))
        return made[-1]

    make.made = made  # type: ignore[attr-defined]
    return make


def train_calls(make: Any) -> list[tuple[int, list[str]]]:
    return [(s, uids) for r in make.made for s, phase, uids in r.calls if phase == "train"]


FILTER = "trainer.algorithm.dynamic_sampling.type=filter"


@pytest.mark.spec("6.40", "6.45", "8.6")
def test_dynamic_sampling_fills_the_batch_from_further_prompts(folder: Path) -> None:
    make = outcomes_by_uid(["0", "1", "2"])
    config = settings(folder, "run", FILTER, "trainer.epochs=4", "trainer.max_training_steps=2")
    outcome = run_training(config, make_rollouts=make)
    assert outcome.step == 2
    order = PromptSampler(8, batch_size=4, seed=42)
    want = [[str(i) for i in order.next_batch()] for _ in range(len(train_calls(make)))]
    got = [[uid.partition("~")[0] for uid in uids] for _, uids in train_calls(make)]
    assert got == want  # the data in its order, whatever number of batches a step takes
    rows = read_metrics(outcome.metrics)[1:]
    sampled = [int(row["dynamic_sampling/num_batches"]) for row in rows]
    assert sampled == [sum(s == step for s, _ in train_calls(make)) for step in (0, 1)]
    assert max(sampled) > 1
    assert max(row["dynamic_sampling/avg_raw_reward"] for row in rows) > 0.5
    for number, row in enumerate(rows, start=1):
        assert row["reward/avg_raw_reward"] == 0.5  # only groups of two successes in four are left
        assert row["generate/num_trajectories"] == 16
        assert row["policy/optimizer_steps"] == 2
        lines = (outcome.trajectories / f"step_00000{number}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert len(records) == 16
        assert all(record["uid"].partition("~")[0] not in "012" for record in records)


@pytest.mark.spec("6.46")
def test_dynamic_sampling_resumes_at_its_data_position(folder: Path) -> None:
    easy = ["0", "1", "2"]
    wanted = [FILTER, "trainer.epochs=6", "trainer.max_training_steps=4"]
    whole, first, second = (outcomes_by_uid(easy) for _ in range(3))
    expected = run_training(settings(folder, "whole", *wanted), make_rollouts=whole)

    async def dying(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        rollouts = await first(config, tokenizer, model_path)

        async def until_second_batch_of_step_2(step: int, phase: str) -> None:
            if phase == "train" and [s for s, _ in train_calls(first)].count(2) == 2:
                raise RuntimeError("gone")

        rollouts.before_batch = until_second_batch_of_step_2  # type: ignore[method-assign]
        return rollouts

    with pytest.raises(RuntimeError, match="gone"):
        run_training(settings(folder, "broken", *wanted), make_rollouts=dying)
    outcome = run_training(
        settings(folder, "broken", *wanted, "trainer.resume_mode=latest"), make_rollouts=second
    )
    assert steady(outcome.metrics) == steady(expected.metrics)
    done = [call for call in train_calls(first) if call[0] < 2]
    assert done + train_calls(second) == train_calls(whole)


@pytest.mark.spec("6.41")
def test_dynamic_sampling_gives_up_with_a_reason(folder: Path) -> None:
    make = outcomes_by_uid([str(i) for i in range(8)])
    config = settings(
        folder, "run", FILTER, "trainer.algorithm.dynamic_sampling.max_sample_batches=3"
    )
    with pytest.raises(DynamicSamplingError, match="after 3 batches of prompts 0 of 12 sampled"):
        run_training(config, make_rollouts=make)
    assert len(train_calls(make)) == 3


@pytest.mark.spec("6.42")
def test_prompts_that_end_before_the_batch_is_full_end_the_run(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = outcomes_by_uid(["0", "1", "2"])
    outcome = run_training(settings(folder, "run", FILTER, "trainer.epochs=1"), make_rollouts=make)
    # Eight prompts, five of them informative: one batch of four, and one that is not filled.
    assert (outcome.step, outcome.total_steps, outcome.signal) == (1, 2, None)
    assert outcome.checkpoint is not None and outcome.checkpoint.name == "step_000001"
    assert outcome.after is not None
    again = run_training(
        settings(folder, "run", FILTER, "trainer.epochs=1", "trainer.resume_mode=latest"),
        make_rollouts=outcomes_by_uid(["0", "1", "2"]),
    )
    assert again.step == 1


@pytest.mark.spec("6.43")
def test_replacing_keeps_the_number_of_groups_and_steps(folder: Path) -> None:
    make = outcomes_by_uid(["0", "1", "2", "3"])
    config = settings(
        folder, "run", "trainer.algorithm.dynamic_sampling.type=replace", "trainer.epochs=1",
        "trainer.algorithm.dynamic_sampling.min_replace_ratio=0",
    )  # fmt: skip
    outcome = run_training(config, make_rollouts=make)
    rows = read_metrics(outcome.metrics)[1:]
    assert sum(row["dynamic_sampling/num_groups_replaced"] for row in rows) > 0
    for row in rows:
        assert row["reward/avg_raw_reward"] == 0.5
        assert row["policy/optimizer_steps"] == 2


@pytest.mark.spec("6.47")
def test_a_batch_without_a_signal_is_a_step_that_changes_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(
        folder, "run", "trainer.algorithm.zero_variance_filter=true", "trainer.epochs=1"
    )
    make = outcomes_by_uid([str(i) for i in range(8)])
    outcome = run_training(config, make_rollouts=make)
    assert "no token of the batch's 32 rows is trained" in caplog.text
    rows = read_metrics(outcome.metrics)[1:]
    assert outcome.step == 2
    assert all(row["policy/loss"] == 0.0 and row["policy/grad_norm"] == 0.0 for row in rows)
    assert all(row["reward/num_zero_variance_filtered"] == 4 for row in rows)
    assert all(row["reward/avg_raw_reward"] == 1.0 for row in rows)


@pytest.mark.spec("6.36", "6.37", "8.6")
def test_overlong_and_unfinished_from_the_settings(folder: Path) -> None:
    class Cut(FakeRollouts):
        async def generate(
            self, prompts: Sequence[Prompt], *, step: int, phase: str
        ) -> list[Trajectory]:
            trajectories = await super().generate(prompts, step=step, phase=phase)
            first = 3 if len(self.calls[-1][2]) == 1 else 0  # of the batch's first group
            for one in trajectories[:first]:
                one.stop_reason = one.steps[-1].stop_reason = "length"
                one.steps[-1].reward = 1.0
            for one in trajectories[first:]:
                one.steps[-1].reward = 0.0
            return trajectories

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        return Cut(config, tiny_model())

    config = settings(
        folder, "run", "generator.zero_reward_on_non_stop=true", "trainer.epochs=1",
        "generator.apply_overlong_filtering=true",
    )  # fmt: skip
    row = read_metrics(run_training(config, make_rollouts=make).metrics)[1]
    assert row["generate/num_zeroed_rewards"] == 3
    assert row["generate/num_overlong_filtered"] == 3
    assert row["reward/avg_raw_reward"] == 0.0
    assert row["generate/avg_tokens_non_zero_rewards"] == 4  # rollouts as they were sampled


@pytest.mark.spec("5.40", "5.42", "5.43")
def test_kl_in_the_reward_starts_at_zero_and_its_coefficient_survives_a_resume(
    folder: Path,
) -> None:
    wanted = [
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.kl_loss_coef=0.5",
        "trainer.algorithm.kl_ctrl={type: adaptive, kl_target: 0.01, horizon: 64}",
    ]
    expected = train(settings(folder, "whole", *wanted))
    rows = read_metrics(expected.metrics)[1:]
    assert rows[0]["loss/avg_kl"] == pytest.approx(0.0, abs=1e-6)  # the reference is the start
    assert rows[0]["loss/kl_loss_coef"] == 0.5
    assert rows[1]["loss/kl_loss_coef"] == pytest.approx(0.5 * (1 - 0.2 * 16 / 64))
    assert rows[-1]["loss/avg_kl"] > 1e-4
    first = Recorder()

    async def die(step: int) -> None:
        if step == 3:
            raise RuntimeError("gone")

    first.during = die
    with pytest.raises(RuntimeError, match="gone"):
        train(settings(folder, "broken", *wanted), first)
    outcome = train(settings(folder, "broken", *wanted, "trainer.resume_mode=latest"))
    assert steady(outcome.metrics) == steady(expected.metrics)


def test_off_policy_correction_from_the_settings(folder: Path) -> None:
    outcome = train(
        settings(
            folder, "run", "trainer.epochs=1",
            "trainer.algorithm.off_policy_correction={tis_ratio_type: token, "
            "sequence_mask_metric: geometric}",
        )
    )  # fmt: skip
    for row in read_metrics(outcome.metrics)[1:]:
        assert row["policy/is_ratio_mean"] == pytest.approx(1.0, abs=1e-4)  # on policy
        assert row["policy/geo_sequence_mask_masked_ratio"] == 0.0


@pytest.mark.spec("8.7")
def test_evaluation_by_data_set_and_by_samples(folder: Path) -> None:
    class Named(FakeRollouts):
        async def generate(
            self, prompts: Sequence[Prompt], *, step: int, phase: str
        ) -> list[Trajectory]:
            trajectories = await super().generate(prompts, step=step, phase=phase)
            for number, one in enumerate(trajectories):
                one.data_source = "math/easy" if int(one.uid.removeprefix("eval-")) < 1 else None
                one.steps[-1].reward = float(number % 4 == 0)
            return trajectories

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        return Named(config, tiny_model())

    config = settings(
        folder, "run", "trainer.max_training_steps=1", "generator.eval_n_samples_per_prompt=2",
        "trainer.train_batch_size=4",
    )  # fmt: skip
    row = read_metrics(run_training(config, make_rollouts=make).metrics)[0]
    scores = {name: value for name, value in row.items() if name.endswith(("_score", "_1", "_2"))}
    assert scores == {  # four prompts twice: 1 0, 0 0, 1 0, 0 0
        "eval/all/avg_score": 0.25,
        "eval/all/pass_at_1": 0.25,
        "eval/all/pass_at_2": 0.5,
        "eval/math_easy/avg_score": 0.5,
        "eval/math_easy/pass_at_1": 0.5,
        "eval/math_easy/pass_at_2": 1.0,
        "eval/unknown/avg_score": pytest.approx(1 / 6),
        "eval/unknown/pass_at_1": pytest.approx(1 / 6),
        "eval/unknown/pass_at_2": pytest.approx(1 / 3),
    }


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
