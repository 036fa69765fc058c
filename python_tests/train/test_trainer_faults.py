"""Batches in which some or all trajectories failed."""

from pathlib import Path

import pytest
import torch
from _fakes import FakeRollouts
from _training import Recorder, fill, settings, train
from _training import folder as folder  # a fixture

from skyrl_fast.rollout.failures import RolloutError
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.divergence import DivergedError, DivergenceWatch
from skyrl_fast.train.output.loggers import read_metrics


def fail(one: Trajectory) -> None:
    one.steps, one.failure, one.stop_reason = [], "no such table", "env_error"


def fail_all(rollouts: FakeRollouts, trajectories: list[Trajectory], phase: str) -> None:
    for one in trajectories:
        fail(one)


def test_failed_trajectories_are_counted_and_do_not_stop_the_step(folder: Path) -> None:
    def edit(rollouts: FakeRollouts, trajectories: list[Trajectory], phase: str) -> None:
        if len(rollouts.calls[-1][2]) == 1:  # the batch's first group
            fail(trajectories[1])

    outcome = train(settings(folder, "run", "trainer.epochs=1"), Recorder(edit=edit))
    row = read_metrics(outcome.metrics)[1]
    assert row["generate/failed_trajectories"] == 1
    assert row["generate/num_trajectories"] == 16


@pytest.mark.spec("run.finite-rewards")
@pytest.mark.parametrize("rewards", [(0.0, 1e39), (3e38, 3e38), (0.0, float("nan"))])
def test_rewards_beyond_float32_fail_their_trajectory(
    folder: Path, rewards: tuple[float, float]
) -> None:
    def edit(rollouts: FakeRollouts, trajectories: list[Trajectory], phase: str) -> None:
        for step, reward in zip(trajectories[0].steps, rewards, strict=True):
            step.reward = reward

    config = settings(folder, "run", "trainer.max_training_steps=1")
    row = read_metrics(train(config, Recorder(edit=edit)).metrics)[1]
    assert row["generate/stop_reason/env_error"] == 4 / 16
    assert 0 <= row["reward/avg_raw_reward"] <= 1


def test_a_batch_in_which_everything_failed_trains_nothing_and_the_run_continues(
    folder: Path,
) -> None:
    weights: dict[int, torch.Tensor] = {}

    def edit(rollouts: FakeRollouts, trajectories: list[Trajectory], phase: str) -> None:
        weights[rollouts.version] = next(rollouts.model.parameters()).detach().clone()
        for one in trajectories:
            one.steps[-1].reward = float(one.repetition_id % 2)
        if phase == "train" and rollouts.version == 0:
            fail_all(rollouts, trajectories, phase)

    outcome = train(settings(folder, "run", "trainer.epochs=1"), Recorder(edit=edit))
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
    recorder = Recorder(edit=fail_all)
    config = settings(
        folder, "run", f"trainer.eval_before_train={before_train}", "trainer.eval_interval=-1"
    )
    with pytest.raises(RolloutError, match=r"3 batches in a row failed.*\(.*\): no such table"):
        train(config, recorder)
    assert len(recorder.rollouts[0].calls) == 3  # training or evaluation
    assert caplog.text.count("NOTHING TO TRAIN IN THIS BATCH: 16 of 16") >= 2


def test_a_short_run_in_which_everything_failed_is_an_error(folder: Path) -> None:
    config = settings(folder, "run", "trainer.epochs=1", "data.val_data=[]")
    with pytest.raises(RolloutError, match=r"every trajectory of the run failed.*: no such table"):
        train(config, Recorder(edit=fail_all))
    assert (folder / "run/checkpoints/step_000002").is_dir()  # --resume continues when it is mended


# --- a run whose gradients are no longer finite ends with the reason -----------------------------


@pytest.mark.spec("run.diverged")
def test_single_skipped_steps_are_accidents() -> None:
    watch = DivergenceWatch()
    for _ in range(20):
        watch.see(1, 2)  # every second step
    watch.see(0, 10)
    watch.see(5, 5)
    with pytest.raises(DivergedError, match="6 of the last 10 optimizer steps were skipped"):
        watch.see(1, 1)


@pytest.mark.spec("run.diverged")
def test_run_with_a_huge_learning_rate_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path, monkeypatch, num_prompts=8)
    config = settings(folder, "run", "trainer.epochs=20", "trainer.policy.optimizer_config.lr=1e30")
    with pytest.raises(DivergedError, match=r"optimizer_config\.lr"):
        train(config)
    rows = read_metrics(folder / "run/metrics.jsonl")
    assert max(row["step"] for row in rows) < 12  # of 80
    assert (folder / "run/checkpoints").is_dir()
