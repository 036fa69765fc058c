"""Checkpoints are complete or absent; a run folder has one owner."""

import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from _checkpoints import write_checkpoint
from safetensors.torch import load_file, save_file

from skyrl_fast.system.file_lock import lock_file
from skyrl_fast.train.checkpoint import local
from skyrl_fast.train.checkpoint.local import (
    CheckpointError,
    RunInUseError,
    checkpoints,
    latest_checkpoint,
    lock_run,
    newest_intact,
    write_json,
)
from skyrl_fast.train.data.random_state import load_random_state, save_random_state, seed_everything
from skyrl_fast.train.output.loggers import JsonlLogger, RunInfo, read_metrics
from skyrl_fast.train.output.plot import plot_learning_curve


def write_text(text: str):
    def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy/weights").write_text(text)

    return write


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_and_find(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    path = write_checkpoint(tmp_path, 12, write_text("a"))
    assert path == tmp_path / "step_000012"
    assert latest_checkpoint(tmp_path) == path
    assert (path / "policy/weights").read_text() == "a"
    assert names(tmp_path) == ["step_000012"]


def test_keep_last_n(tmp_path: Path) -> None:
    for step in (9, 10, 100, 1000000):
        write_checkpoint(tmp_path, step, write_text(str(step)), keep=2)
    assert [step for step, _ in checkpoints(tmp_path)] == [100, 1000000]


def test_same_step_replaces_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, write_text("old"))
    path = write_checkpoint(tmp_path, 1, write_text("new"))
    assert (path / "policy/weights").read_text() == "new"
    assert names(tmp_path) == ["step_000001"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error (os error 28)")],
)
def test_full_disk_keeps_the_previous_checkpoint(tmp_path: Path, error: Exception) -> None:
    write_checkpoint(tmp_path, 1, write_text("good"))

    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise error

    with pytest.raises(CheckpointError, match=r"step 2 .* disk is full; .*step_000001 is intact"):
        write_checkpoint(tmp_path, 2, fail, keep=1)
    assert names(tmp_path) == ["step_000001"]


def test_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="checkpoint of step 1 not written"):
        write_checkpoint(tmp_path / "file/inside", 1, write_text("a"))


def test_other_errors_propagate_and_leave_no_files(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_checkpoint(tmp_path, 1, fail)
    assert names(tmp_path) == []


KILLED = """
import sys, time
from pathlib import Path
from skyrl_fast.train.checkpoint.local import begin_checkpoint
folder = Path(sys.argv[1])
with begin_checkpoint(folder, 2) as path:
    (path / "weights").write_text("half")
    (folder / "started").write_text("")
    time.sleep(60)
"""


def test_kill_while_writing_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, write_text("good"))
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    wait_for(tmp_path / "started", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert (latest / "policy/weights").read_text() == "good"
    write_checkpoint(tmp_path, 2, write_text("next"), keep=1)
    assert names(tmp_path) == ["started", "step_000002"]


def test_next_checkpoint_deletes_the_files_left_by_a_kill(tmp_path: Path) -> None:
    for left in (".step_000002.partial", ".step_000003.old", ".step_000004.old"):
        (tmp_path / left).mkdir(parents=True)
        (tmp_path / left / "weights").write_text("half")
    (tmp_path / "step_000003").mkdir()
    write_checkpoint(tmp_path, 5, write_text("new"))  # never step 2 again
    # The one without its successor is complete: the kill came between the two renames.
    assert names(tmp_path) == [".step_000004.old", "step_000003", "step_000005"]


def test_other_hidden_files_are_kept(tmp_path: Path) -> None:
    others = [".step_notes.partial", ".step_1.partial", ".step_notes.old", ".step_000002.partial.2"]
    for name in others:
        (tmp_path / name).mkdir()
    write_checkpoint(tmp_path, 1, write_text("a"))
    latest_checkpoint(tmp_path)
    write_checkpoint(tmp_path, 2, write_text("b"), keep=1)
    assert names(tmp_path) == sorted([*others, "step_000002"])


def test_kill_while_deleting_leaves_no_partial_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 1, write_text("good"))
    monkeypatch.setattr("shutil.rmtree", lambda path, **options: None)  # killed during the deletion
    write_checkpoint(tmp_path, 2, write_text("next"), keep=1)
    assert [step for step, _ in checkpoints(tmp_path)] == [2]


def test_crash_between_the_two_renames_is_recovered(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 3, write_text("good"))
    path.rename(tmp_path / ".step_000003.old")
    assert latest_checkpoint(tmp_path) == path


LOCKED = """
import os, sys, time
from pathlib import Path
from skyrl_fast.train.checkpoint.local import lock_run
folder = Path(sys.argv[1])
with lock_run(folder, folder / "checkpoints"):
    if "fork" in sys.argv and os.fork() == 0:
        (folder / "child").write_text(str(os.getpid()))
        time.sleep(60)
        os._exit(0)
    (folder / "started").write_text("")
    time.sleep(60)
"""


def test_lock_names_its_owner_and_ends_with_it(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", LOCKED, str(tmp_path)])
    wait_for(tmp_path / "started", process)
    with (
        pytest.raises(RunInUseError, match=f"in use by process {process.pid}"),
        lock_run(tmp_path, tmp_path / "other"),
    ):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    with lock_run(tmp_path, tmp_path / "other"):
        assert (tmp_path / "run.lock").read_text().strip() == str(os.getpid())
    with lock_run(tmp_path, tmp_path / "other"):
        pass


@pytest.mark.spec("run.locks")
def test_two_runs_never_share_a_checkpoint_folder(tmp_path: Path) -> None:
    with lock_run(tmp_path / "a", tmp_path / "a/checkpoints"):
        (tmp_path / "link").symlink_to(tmp_path / "a/checkpoints")
        for folder in (tmp_path / "a/checkpoints", tmp_path / "link"):
            with (
                pytest.raises(
                    RunInUseError,
                    match=f"checkpoint folder {folder} is in use by process {os.getpid()}: .* "
                    "choose another trainer.ckpt_path",
                ),
                lock_run(tmp_path / "b", folder),
            ):
                pass
    with lock_run(tmp_path / "b", tmp_path / "a/checkpoints"):
        pass
    with lock_run(tmp_path / "b", tmp_path / "b"):  # one folder for both
        pass


@pytest.mark.spec("run.failure")
@pytest.mark.parametrize("checkpoints", ["runs/a/checkpoints", "runs/a", "other/b"])
def test_folders_of_a_run_that_wrote_nothing_are_removed(tmp_path: Path, checkpoints: str) -> None:
    (tmp_path / "other").mkdir()
    with (
        pytest.raises(ValueError, match="refused"),
        lock_run(tmp_path / "runs/a", tmp_path / checkpoints),
    ):
        raise ValueError("refused")
    assert [path.name for path in tmp_path.rglob("*")] == ["other"]


def test_folders_with_files_or_of_others_are_kept(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name, file in (("old", None), ("new", "engine.log")):
        with (
            pytest.raises(ValueError, match="failed"),
            lock_run(tmp_path / name, tmp_path / name / "checkpoints"),
        ):
            if file is not None:
                (tmp_path / name / file).write_text("loading")
            raise ValueError("failed")
    assert (tmp_path / "old/run.lock").exists()
    assert (tmp_path / "new/engine.log").exists()
    assert (tmp_path / "new/checkpoints").is_dir()


def test_a_lock_whose_file_was_removed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock_late(descriptor: int) -> None:
        (tmp_path / "run.lock").unlink()
        lock_file(descriptor)

    monkeypatch.setattr(local, "lock_file", lock_late)
    with (
        pytest.raises(RunInUseError, match="was just removed by another run"),
        lock_run(tmp_path, tmp_path / "checkpoints"),
    ):
        pass


def test_lock_of_a_killed_run_ends_although_its_child_lives(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", LOCKED, str(tmp_path), "fork"])
    wait_for(tmp_path / "started", process)
    wait_for(tmp_path / "child", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    child = int((tmp_path / "child").read_text())
    try:
        with lock_run(tmp_path, tmp_path / "checkpoints"):
            os.kill(child, 0)  # still alive
    finally:
        os.kill(child, signal.SIGKILL)


def test_dead_process_is_not_named_as_the_owner(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with lock_run(tmp_path, tmp_path / "checkpoints"):
        (tmp_path / "run.lock").write_text(f"{ended.pid}\n")
        with (
            pytest.raises(RunInUseError, match=rf"process {ended.pid} \(which has ended\) started"),
            lock_run(tmp_path, tmp_path / "checkpoints"),
        ):
            pass


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def test_random_states_round_trip(tmp_path: Path) -> None:
    def draw() -> tuple:
        return random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)

    seed_everything(5)
    draw()
    state = save_random_state(tmp_path / "random.safetensors")
    first = draw()
    draw()
    load_random_state(tmp_path / "random.safetensors", state)
    assert draw() == first


def test_metrics_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run = RunInfo(tmp_path, "project", "run", {})
    sink = JsonlLogger(run)
    for step in range(5):
        sink.write(step, {"x": step / 2})
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 5, "x"')  # truncated by a crash
    sink = JsonlLogger(replace(run, last_step=2))
    sink.write(3, {"x": 9.0})
    sink.close()
    assert read_metrics(path) == [
        {"step": 0, "x": 0.0},
        {"step": 1, "x": 0.5},
        {"step": 2, "x": 1.0},
        {"step": 3, "x": 9.0},
    ]


DAMAGED = [
    b'{"step": 1, "x"\n',
    b"\x00" * 40 + b"\n",
    b'{"step": 1, "\xff": 2}\n',
    b"[1]\n",
    b'{"x": 1}\n',
    b'{"step": "1"}\n',
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
@pytest.mark.spec("metrics.valid-json")
def test_damaged_line_of_the_metrics_costs_only_itself(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d, "x": %d.0}\n' % (step, step) for step in range(5)]
    path.write_bytes(b"".join([lines[0], damaged, *lines[2:]]))
    assert [row["step"] for row in read_metrics(path)] == [0, 2, 3, 4]
    JsonlLogger(RunInfo(tmp_path, "project", "run", {}, last_step=3)).close()
    assert path.read_bytes() == lines[0] + lines[2] + lines[3]


@pytest.mark.spec("metrics.valid-json")
def test_values_that_are_not_finite_are_valid_json_and_read_back(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    path = tmp_path / "metrics.jsonl"
    written = {"a": math.nan, "b": math.inf, "c": -math.inf, "reward/avg_raw_reward": 0.5}
    sink = JsonlLogger(RunInfo(tmp_path, "project", "run", {}))
    sink.write(1, written)
    sink.write(2, {"a": 1.0, "reward/avg_raw_reward": math.nan, "timing/step": math.inf})
    sink.close()
    first, second = (json.loads(line, parse_constant=refuse) for line in path.open())
    assert first == {
        **{"step": 1, "a": None, "b": None, "c": None, "reward/avg_raw_reward": 0.5},
        "non_finite": {"a": "nan", "b": "inf", "c": "-inf"},
    }
    assert second["non_finite"] == {"reward/avg_raw_reward": "nan", "timing/step": "inf"}
    rows = read_metrics(path)
    assert repr(rows[0]) == repr({"step": 1, **written})
    pytest.importorskip("matplotlib")
    assert plot_learning_curve(rows, tmp_path / "curve.png").stat().st_size > 0


# --- processes killed while they write checkpoints -----------------------------------------------

pytest.importorskip("safetensors")


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
