"""Ranks, nodes and drivers killed at random moments: every step is trained once all the same.

`HYPOTHESIS_PROFILE=thorough` for five moments of each instead of one.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ray")
from _cluster_run import MOMENTS, TWO_NODES, Here, workers
from _nodes import cluster_of
from _training import assert_same_curves, settings, train
from _training import folder as folder
from ray.cluster_utils import Cluster

from skyrl_fast.train.cluster import ClusterSeconds, run_on_cluster

# Each starts a cluster.
pytestmark = [
    pytest.mark.spec("update.node-lost"),
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
]

STEPS = 30
LATEST = 3.0  # seconds after the first step; a run takes about six
DRIVER = """
import sys
from pathlib import Path
from _cluster_run import Here
from _training import settings
from skyrl_fast.train.cluster import run_on_cluster

if __name__ == "__main__":
    folder, name, *overrides = sys.argv[1:]
    config = settings(Path(folder), name, *overrides)
    run_on_cluster(config, Here(Path(folder, "never")), Path(folder, name, "checkpoints"))
"""


def overrides(*others: str) -> list[str]:
    return ["trainer.ckpt_interval=1", f"trainer.epochs={STEPS // 2}", *others]


@pytest.fixture
def alone(folder: Path) -> Path:
    """The folder of an undisturbed run of one process."""
    train(settings(folder, "alone", *overrides()))
    return folder / "alone"


def moments(name: str) -> list[float]:
    chance = random.Random(name)
    return [chance.uniform(0, LATEST) for _ in range(MOMENTS)]


def after_first_step(run: Path, seconds: float, kill: Callable[[], object]) -> None:
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.stat().st_size == 0:
        assert time.monotonic() < deadline, "no step in two minutes"
        time.sleep(0.02)
    time.sleep(seconds)
    kill()


def nothing_is_left() -> None:
    deadline = time.monotonic() + 20
    while left := workers("ray::_Follower") + workers("ray::_RankZero"):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def kill_workers(name: str) -> None:
    for process in workers(name):
        os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("lost", ["ray::_RankZero", "ray::_Follower", "node"])
def test_a_loss_at_any_moment_changes_nothing(
    folder: Path, alone: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = ClusterSeconds(place=5.0)
    with cluster_of([2, 2], monkeypatch) as cluster:
        kill = (lambda: lose_a_node(cluster)) if lost == "node" else (lambda: kill_workers(lost))
        for number, seconds in enumerate(moments(lost)):
            run = folder / f"run-{number}"
            killer = threading.Thread(
                target=after_first_step, args=(run, seconds, kill), daemon=True
            )
            killer.start()
            config = settings(folder, run.name, *overrides(TWO_NODES))
            here = Here(folder / "never")
            outcome = run_on_cluster(config, here, run / "checkpoints", seconds=soon)
            killer.join()
            assert outcome.step == outcome.total_steps == STEPS
            assert_same_curves(alone, run)
            nothing_is_left()
            if lost == "node":
                cluster.add_node(num_cpus=2)


@pytest.mark.spec("run.checkpoint-url")
def test_a_run_with_checkpoints_at_a_url_resumes_from_there(
    folder: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, run = f"file://{folder}/store", folder / "run"
    kill = partial(kill_workers, "ray::_RankZero")
    with cluster_of([2, 2], monkeypatch):
        killer = threading.Thread(target=after_first_step, args=(run, 1.0, kill), daemon=True)
        killer.start()
        config = settings(folder, run.name, *overrides(TWO_NODES, f"trainer.ckpt_path={url}"))
        outcome = run_on_cluster(config, Here(folder / "never"), run / "checkpoints")
        killer.join()
    assert outcome.checkpoint == run / f"checkpoints/step_{STEPS:06d}"
    assert (folder / f"store/step_{STEPS:06d}/manifest.json").is_file()
    assert_same_curves(alone, run)


def lose_a_node(cluster: Cluster) -> None:
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)


def test_a_killed_driver_resumes_by_the_same_command(
    folder: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "driver.py").write_text(DRIVER)
    with cluster_of([2, 2], monkeypatch) as cluster:
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        for number, seconds in enumerate(moments("driver")):
            run = folder / f"run-{number}"
            resuming = overrides(TWO_NODES, "trainer.resume_mode=latest")
            command = [sys.executable, str(folder / "driver.py"), str(folder), run.name, *resuming]
            with subprocess.Popen(command, env=environment) as driver:
                try:
                    after_first_step(run, seconds, driver.kill)
                finally:
                    driver.kill()
            nothing_is_left()
            subprocess.run(command, env=environment, check=True)
            assert_same_curves(alone, run)
            nothing_is_left()
