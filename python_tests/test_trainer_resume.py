"""Runs that stop (by a signal, an error, a kill) and go on from their newest checkpoint."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from _fakes import FakeRollouts, write_prompts
from _training import Recorder, settings, steady, train
from _training import folder as folder  # a fixture

from skyrl_fast.train import run as run_module
from skyrl_fast.train.checkpoint import RunInUseError, checkpoints
from skyrl_fast.train.run import SetupError, run_training


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


def test_a_resume_before_the_first_checkpoint_begins_anew(folder: Path) -> None:
    expected = train(settings(folder, "run"))
    kept = steady(expected.metrics)
    shutil.rmtree(folder / "run/checkpoints")
    outcome = train(settings(folder, "run", "trainer.resume_mode=latest"))
    assert steady(outcome.metrics) == kept


def test_a_used_folder_is_not_overwritten(folder: Path) -> None:
    train(settings(folder, "run", "trainer.epochs=1"))
    with pytest.raises(RunInUseError, match="holds an earlier run: --resume"):
        train(settings(folder, "run", "trainer.epochs=1"))


def test_a_run_whose_engine_did_not_start_leaves_the_folder_free(folder: Path) -> None:
    async def broken(*_: object) -> FakeRollouts:
        raise ValueError("no engine today")

    with pytest.raises(SetupError, match="no engine today"):
        run_training(settings(folder, "run", "trainer.epochs=1"), make_rollouts=broken)
    assert train(settings(folder, "run", "trainer.epochs=1")).step == 2


def test_resuming_with_other_data_is_refused(folder: Path) -> None:
    train(settings(folder, "run", "trainer.epochs=1"))
    write_prompts(folder / "train.jsonl", 12)
    with pytest.raises(ValueError, match="num_prompts=8, this run has 12"):
        train(settings(folder, "run", "trainer.resume_mode=latest"))
