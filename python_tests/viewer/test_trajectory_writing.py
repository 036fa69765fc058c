"""Trajectories are written in the background: what waits for them, and what a full disk does."""

import asyncio
import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from _training import Recorder, settings, steady, train
from _training import folder as folder  # a fixture

from skyrl_fast.train import run as run_module
from skyrl_fast.train.checkpoint.local import checkpoints
from skyrl_fast.train.flow.waiting import BackgroundWriter
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.trajectory_store.parts import parts
from skyrl_fast.trajectory_store.writer import StoreError, TrajectoryWriter


def stored_steps(run: Path) -> list[int]:
    return [part.step for part in parts(run / "trajectories") if not part.evaluation]


def slow_store(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    write = TrajectoryWriter.write

    def slowly(self: TrajectoryWriter, *arguments: Any, **named: Any) -> Path:
        time.sleep(seconds)
        return write(self, *arguments, **named)

    monkeypatch.setattr(TrajectoryWriter, "write", slowly)


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    write = TrajectoryWriter.write_part

    def full(self: TrajectoryWriter, name: str, records: Any) -> Path:
        if name == f"step_{at_step:06d}.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, name, records)

    monkeypatch.setattr(TrajectoryWriter, "write_part", full)


@pytest.mark.spec("store.background-writing")
def test_checkpoint_waits_for_earlier_trajectories(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_store(monkeypatch, 0.2)
    seen: list[tuple[int, list[int]]] = []
    write_state = run_module.Trainer.write_state

    def recording(self: Any, path: Path) -> None:
        seen.append((self.progress.step, stored_steps(folder / "run")))
        write_state(self, path)

    monkeypatch.setattr(run_module.Trainer, "write_state", recording)
    outcome = train(settings(folder, "run", "trainer.ckpt_interval=3", "trainer.eval_interval=5"))
    assert seen == [(3, [1, 2, 3]), (6, [1, 2, 3, 4, 5, 6])]
    last = read_metrics(outcome.metrics)[-1]
    assert last["timing/store_background"] >= 0.2  # of the step before
    assert "timing/store" in last


@pytest.mark.spec("store.background-writing")
def test_trajectories_of_every_step_are_stored_after_a_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_store(monkeypatch, 0.2)

    async def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)  # cancelled by the stop

    assert train(settings(folder, "run"), Recorder(interrupt)).step == 3
    assert stored_steps(folder / "run") == [1, 2, 3]


def test_run_fails_if_its_last_trajectories_cannot_be_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk(monkeypatch, at_step=6)
    with pytest.raises(StoreError, match="trajectories of step 6 not written"):
        train(settings(folder, "run"))
    assert checkpoints(folder / "run/checkpoints")[-1][0] == 4


@pytest.mark.spec("store.write-error")
def test_full_disk_ends_the_run_at_the_next_step_without_losing_trajectories(folder: Path) -> None:
    expected = train(settings(folder, "complete"))
    with pytest.MonkeyPatch.context() as patch:
        fill_the_disk(patch, at_step=3)
        with pytest.raises(StoreError, match=r"step 3 .*/trajectories: the disk is full; free"):
            train(settings(folder, "run"))
    # Step 3 is not in the store, so no checkpoint contains it.
    assert [step for step, _ in checkpoints(folder / "run/checkpoints")] == [2]
    outcome = train(settings(folder, "run", "trainer.resume_mode=latest"))
    assert steady(outcome.metrics) == steady(expected.metrics)
    assert stored_steps(outcome.run_path) == [1, 2, 3, 4, 5, 6]


async def test_one_call_goes_on_beside_and_the_next_one_waits_for_it() -> None:
    background, events = BackgroundWriter(time.perf_counter), list[str]()
    go = threading.Event()

    def first() -> None:
        go.wait(10)
        events.append("first")

    def second() -> None:
        events.append("second")
        raise ValueError("broken")

    await background.start(first)
    assert events == []  # it did not wait for its end
    asyncio.get_running_loop().call_later(0.1, go.set)  # the loop is alive while it waits
    await background.start(second)
    assert events[0] == "first" and background.take_elapsed() >= 0.05
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            await background.start(first)
    with pytest.raises(ValueError, match="broken"):
        background.wait()
    background.close()
    assert events == ["first", "second"]
