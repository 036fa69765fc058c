"""Batches in which some or all trajectories failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from _fakes import FakeRollouts, tiny_model
from _training import folder as folder  # a fixture
from _training import settings

import skyrl_fast
from skyrl_fast.config import Config
from skyrl_fast.rollout.failures import RolloutError
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.output.loggers import read_metrics


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

    outcome = skyrl_fast.train_agent(
        settings(folder, "run", "trainer.epochs=1"), make_rollouts=make
    )
    row = read_metrics(outcome.metrics)[1]
    assert row["generate/failed_trajectories"] == 1
    assert row["generate/num_trajectories"] == 16


@pytest.mark.spec("run.finite-rewards")
@pytest.mark.parametrize("rewards", [(0.0, 1e39), (3e38, 3e38), (0.0, float("nan"))])
def test_rewards_beyond_float32_fail_their_trajectory(
    folder: Path, rewards: tuple[float, float]
) -> None:
    class Rewarding(FakeRollouts):
        async def generate(
            self, prompts: Sequence[Prompt], *, step: int, phase: str
        ) -> list[Trajectory]:
            trajectories = await super().generate(prompts, step=step, phase=phase)
            first, last = trajectories[0].steps[0], trajectories[0].steps[-1]
            first.reward, last.reward = rewards
            return trajectories

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        return Rewarding(config, tiny_model())

    config = settings(folder, "run", "trainer.max_training_steps=1")
    outcome = skyrl_fast.train_agent(config, make_rollouts=make)
    row = read_metrics(outcome.metrics)[1]
    assert row["generate/stop_reason/env_error"] == 4 / 16
    assert 0 <= row["reward/avg_raw_reward"] <= 1


@pytest.mark.spec("rollout.failure-tolerance", "rollout.all-failed")
def test_a_batch_in_which_everything_failed_trains_nothing_and_the_run_continues(
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

    outcome = skyrl_fast.train_agent(
        settings(folder, "run", "trainer.epochs=1"), make_rollouts=make
    )
    rows = read_metrics(outcome.metrics)
    assert rows[1]["generate/failed_trajectories"] == 16
    assert rows[1]["policy/loss"] == 0.0
    assert rows[2]["generate/failed_trajectories"] == 0
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


@pytest.mark.spec("rollout.all-failed")
@pytest.mark.parametrize("before_train", ["true", "false"])
def test_three_batches_of_failures_end_the_run(
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
        skyrl_fast.train_agent(config, make_rollouts=make)
    assert len(made[0].calls) == 3  # training or evaluation
    assert caplog.text.count("NOTHING TO TRAIN IN THIS BATCH: 16 of 16") >= 2


@pytest.mark.spec("rollout.all-failed")
def test_a_short_run_in_which_everything_failed_is_an_error(folder: Path) -> None:
    class Fails(FakeRollouts):
        def _trajectory(self, *arguments: Any) -> Trajectory:
            one = super()._trajectory(*arguments)
            one.steps, one.failure, one.stop_reason = [], "no such table", "env_error"
            return one

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        return Fails(config, tiny_model())

    config = settings(folder, "run", "trainer.epochs=1", "data.val_data=[]")
    with pytest.raises(RolloutError, match=r"every trajectory of the run failed.*: no such table"):
        skyrl_fast.train_agent(config, make_rollouts=make)
    assert (folder / "run/checkpoints/step_000002").is_dir()  # --resume continues when it is mended
