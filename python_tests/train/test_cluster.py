"""Ranks on the nodes of a Ray cluster, here several on one machine: results and signals."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")
from _cluster_run import TWO_NODES, Here
from _nodes import cluster_of
from _training import assert_same_curves, settings, train
from _training import folder as folder
from ray.cluster_utils import Cluster

from skyrl_fast.config import Config
from skyrl_fast.errors import RunError
from skyrl_fast.train.cluster import SECONDS, ClusterSeconds, run_on_cluster
from skyrl_fast.train.run import TrainResult

# Each starts a cluster.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with cluster_of([2, 2], monkeypatch) as cluster:
        yield cluster


def run(
    folder: Path, name: str, here: Here, *overrides: str, seconds: ClusterSeconds = SECONDS
) -> tuple[Config, TrainResult]:
    config = settings(folder, name, TWO_NODES, "trainer.ckpt_interval=1", *overrides)
    checkpoints = folder / name / "checkpoints"
    return config, run_on_cluster(config, here, checkpoints, seconds=seconds)


@pytest.mark.spec("update.ranks-equal")
def test_two_nodes_train_as_one_process(folder: Path, nodes: Cluster) -> None:
    train(settings(folder, "alone", "trainer.ckpt_interval=1"))
    _, outcome = run(folder, "shared", Here(folder / "once"))
    assert outcome.step == outcome.total_steps == 6
    assert_same_curves(folder / "alone", folder / "shared")


@pytest.mark.spec("update.nodes")
def test_too_few_nodes_are_an_error(folder: Path, nodes: Cluster) -> None:
    soon = ClusterSeconds(place=0.5, settle=0.5)
    once = Here(folder / "once")
    with pytest.raises(RunError, match=r"expected room for a node with .*'CPU': 3"):
        run(folder, "run", once, "trainer.placement.policy_num_gpus_per_node=3", seconds=soon)
    engine = ["trainer.placement.colocate_all=false", "generator.inference_engine.num_threads=3"]
    with pytest.raises(RunError, match=r"'CPU': 1.* and an engine with {'CPU': 3.0} free"):
        run(folder, "run", once, *engine, seconds=soon)


def test_signal_ends_the_run_with_a_checkpoint(folder: Path, nodes: Cluster) -> None:
    once = folder / "once"
    config = settings(folder, "run", TWO_NODES, "trainer.epochs=50")
    killer = threading.Thread(target=interrupt, args=(once,))
    killer.start()
    outcome = run_on_cluster(config, Here(once, 2), folder / "run" / "checkpoints")
    killer.join()
    assert outcome.signal == signal.SIGINT and outcome.step < outcome.total_steps
    assert outcome.checkpoint is not None


def interrupt(once: Path) -> None:
    while not once.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
