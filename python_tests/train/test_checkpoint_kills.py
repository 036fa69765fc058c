"""Processes killed while they write checkpoints: none that was announced is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

import torch
from _checkpoints import write_checkpoint
from safetensors.torch import load_file, save_file

from skyrl_fast.train.checkpoint.local import newest_intact, write_json

VALUES = 200_000  # per file


def write_files(folder: Path, step: int) -> None:
    (folder / "policy").mkdir()
    for name in ("policy/model.safetensors", "optimizer.safetensors"):
        save_file({"w": torch.full((VALUES,), float(step))}, folder / name)
    state = {"version": 3, "words": [0] * 624 + [0]}
    write_json(
        folder / "state.json",
        {
            "step": step,
            "sampler": {"num_prompts": 4, "batch_size": 2, "position": 0, "epoch": 0, "seed": 0},
            "random": {
                "python": [state["version"], state["words"], None],
                "numpy": ["MT19937", [0] * 624, 0, 0, 0.0],
            },
        },
    )


def write_until_killed(folder: Path, first: int, announce: int) -> None:
    for step in range(first, first + 1000):
        write_checkpoint(folder, step, lambda path, step=step: write_files(path, step), keep=2)
        os.write(announce, step.to_bytes(4, "little"))


def kill_a_writer(folder: Path, first: int, seconds: float) -> int:
    """Return the last checkpoint that the killed process announced, or `first` - 1."""
    receive, announce = os.pipe()
    writer = os.fork()  # without the seconds of a new process's imports
    if writer == 0:
        try:
            os.close(receive)
            write_until_killed(folder, first, announce)
        finally:
            os._exit(1)
    os.close(announce)
    time.sleep(seconds)
    os.kill(writer, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(writer, 0)[1]) == signal.SIGKILL
    announced = os.read(receive, 1 << 16)
    os.close(receive)
    return int.from_bytes(announced[-4:], "little") if announced else first - 1


@pytest.mark.spec("async.checkpoint-kills")
@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_writers_lose_no_announced_checkpoint(tmp_path: Path, kills: int) -> None:
    rng, last, unfinished = random.Random(0), 0, 0
    started = time.perf_counter()
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, lambda path, step=step: write_files(path, step), keep=2)
    last, one = 3, (time.perf_counter() - started) / 3
    for _ in range(kills):
        announced = kill_a_writer(tmp_path, last + 1, rng.uniform(0, 4 * one))
        unfinished += any(tmp_path.glob(".step_*.partial"))
        newest, damaged = newest_intact(tmp_path)
        assert newest is not None and damaged == []
        step = int(newest.name.removeprefix("step_"))
        assert announced <= step <= announced + 1  # renamed, but killed before it was announced
        for name in ("policy/model.safetensors", "optimizer.safetensors"):
            assert torch.equal(load_file(newest / name)["w"], torch.full((VALUES,), float(step)))
        last = step
    assert unfinished >= kills // 4  # killed in the middle of a checkpoint, not between two
