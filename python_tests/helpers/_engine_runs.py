"""Short runs of a trainer with engines of its own, and what tests do to them meanwhile."""

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from _cluster_run import processes, share_of_e
from _listening import listening
from _training import steady

from examples.asynchronous.quickstart_run import trained
from examples.asynchronous.soak import command_of
from skyrl_fast import train_agent
from skyrl_fast.config import Config
from skyrl_fast.config.loading import load_config
from skyrl_fast.system.file_lock import close_locked, lock_file
from skyrl_fast.train.run import TrainResult

SERVER = "skyrl_fast.rollout.engine.serve_vllm"
STEPS = 8
SAMPLES = 4 * 4  # of a step
DRIVER = """
import sys
from _cluster_run import share_of_e
from skyrl_fast import train_agent
from skyrl_fast.config.loading import load_config

if __name__ == "__main__":
    train_agent(load_config(None, sys.argv[1:]), reward=share_of_e)
"""


def write_prompts(folder: Path) -> None:
    rows = [{"prompt": f"word {number}", "hold": str(folder / "hold")} for number in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def overrides_of(folder: Path, model: Path, name: str, *overrides: str) -> list[str]:
    return [
        f"data.train_data=[{folder}/train.jsonl]",
        f"trainer.policy.model.path={model}",
        f"trainer.run_path={folder}/{name}",
        "trainer.policy.optimizer_config.lr=0.001",
        "trainer.max_prompt_length=32",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=2",
        f"trainer.epochs={STEPS // 2}",
        "trainer.ckpt_interval=1",
        "trainer.eval_before_train=false",
        "trainer.logger=[jsonl]",
        "trainer.plot=false",
        "generator.n_samples_per_prompt=4",
        "generator.max_input_length=32",
        "generator.trajectory_timeout_seconds=600",  # of those that wait for a fault's end
        "environment.timeout_seconds=600",
        "generator.sampling_params.max_generate_length=24",
        "generator.inference_engine.num_threads=1",
        *overrides,
    ]


def settings(folder: Path, model: Path, name: str, *overrides: str) -> Config:
    return load_config(None, overrides_of(folder, model, name, *overrides))


def run(
    folder: Path, model: Path, name: str, *overrides: str, during: Callable[[], None]
) -> TrainResult:
    """Train in a thread, and call `during` in this one: Ray adds nodes in the main thread alone."""
    config = settings(folder, model, name, "data.train_data=[train.jsonl]", *overrides)
    with contextlib.chdir(folder), ThreadPoolExecutor(1) as pool:
        training = pool.submit(train_agent, config, reward=share_of_e)
        during()
        return training.result()


def rows(run_path: Path) -> list[dict[str, Any]]:
    return steady(run_path / "metrics.jsonl")


def samples(run_path: Path) -> Counter[tuple[int, str, int]]:
    return Counter((entry.step, entry.uid, entry.repetition_id) for entry in trained(run_path))


def servers() -> list[int]:
    """Return the processes of engines' servers."""
    return processes(lambda command: {SERVER.encode(), b"serve"} <= set(command.split(b"\0")))


def is_unused(folder: Path) -> bool:
    """Return whether no process holds a folder of weights; other tests may have some."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        lock_file(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        return False
    close_locked(descriptor)
    return folder.exists()


def same(one: Path, two: Path) -> None:
    wanted, found = rows(one), rows(two)
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for a, b in zip(wanted, found, strict=True):
        assert b["reward/avg_raw_reward"] == pytest.approx(a["reward/avg_raw_reward"], abs=1e-6)
        for name in ("policy/loss", "policy/grad_norm"):  # engines round differently
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), (a["step"], name)
    assert samples(two) == samples(one) and samples(one).total() == SAMPLES * wanted[-1]["step"]


def wait_for_step(run_path: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if (run_path / "metrics.jsonl").exists() and len(rows(run_path)) >= step:
            return
        time.sleep(0.1)
    raise TimeoutError(f"no step {step} in {run_path}")


def after_step_2(
    run_path: Path,
    fault: Callable[[], object],
    *,
    find_servers: Callable[[], list[int]] = servers,
) -> None:
    """Cause a fault during the generation of a batch, which continues when the engine is back."""
    wait_for_step(run_path, 2)
    before = find_servers()
    with held(run_path.parent):
        fault()
        wait_for_server(before, find_servers)
        time.sleep(5)  # it gets its weights


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Let the rewards of a batch wait."""
    hold = folder / "hold"
    hold.touch()
    try:
        yield
    finally:
        hold.unlink()


def wait_for_server(before: list[int], find_servers: Callable[[], list[int]] = servers) -> None:
    """Wait for a server that is none of these processes."""
    deadline = time.monotonic() + 200
    while not (new := set(find_servers()) - set(before)) or not any(map(answers, new)):
        if time.monotonic() > deadline:
            raise TimeoutError("no engine was started again")
        time.sleep(0.2)


def answers(process: int) -> bool:
    """Return whether a server listens."""
    try:
        return bool(listening(process))
    except OSError:
        return False


def kill_one(processes: list[int]) -> None:
    os.kill(processes[0], signal.SIGKILL)


def wait_for_end(others: Callable[[], list[int]] = list) -> None:
    """Wait until no server, none of the other processes and no folder of weights is left."""
    deadline = time.monotonic() + 30
    while left := servers() + others():
        assert time.monotonic() < deadline, [command_of(pid) for pid in left]
        time.sleep(0.2)
    assert not any(map(is_unused, Path("/dev/shm").glob("skyrl_fast-weights-*")))
