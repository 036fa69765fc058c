"""Engines colocated with the ranks of pretended nodes: results, GPUs, faults, what is left.

The engines are scripted servers, whose tokens depend on weights, prompt and seed alone.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from _cluster_run import TAG, TWO_NODES, workers
from _engine_runs import (
    STEPS,
    after_step_2,
    held,
    kill_one,
    rows,
    same,
    settings,
    wait_for_end,
    wait_for_step,
    write_prompts,
)
from _nodes import cluster_of
from _scripted_engines import ScriptedRun, scripted_servers
from ray.cluster_utils import Cluster

from examples.asynchronous.soak import children
from skyrl_fast.config import Config
from skyrl_fast.train.cluster import ClusterSeconds, run_on_cluster
from skyrl_fast.train.flow.event_loop import StopSignals
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.run import TrainResult

# Each starts a cluster, ranks and engines.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
SOON = ClusterSeconds(place=20.0, settle=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Path]:
    """Prompts, and the run `alone` of one rank and two engines on this machine."""
    folder = tmp_path_factory.mktemp("runs")
    write_prompts(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TAG, "alone")
        two = "generator.inference_engine.num_engines=2"
        config = settings(folder, tiny_model_folder, "alone", two)
        ScriptedRun()(config, StopSignals(), LocalRanks(folder / "alone"))
    yield folder


def run(folder: Path, model: Path, name: str, during: Callable[[], None]) -> TrainResult:
    """Train on two nodes, in a thread; `during` is called in this one."""
    config: Config = settings(folder, model, name, TWO_NODES)
    train = partial(run_on_cluster, with_engines=True, seconds=SOON)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, config, ScriptedRun(), folder / name / "checkpoints")
        during()
        result: TrainResult = training.result()
        return result


def nodes_of(cluster: Cluster, name: str) -> list[Any]:
    """Return the nodes of actors, whose processes are those of Ray's there."""
    found = []
    for node in cluster.worker_nodes:
        ray_process = node.all_processes["raylet"][0].process.pid
        if set(children(ray_process)).intersection(workers(name)):
            found.append(node)
    return found


def nothing_is_left() -> None:
    names = ("ray::EngineActor", "ray::_RankZero", "ray::_Follower")
    others = [scripted_servers, *(partial(workers, name) for name in names)]
    wait_for_end(lambda: [pid for processes in others for pid in processes()])


@pytest.mark.spec("update.colocated-nodes")
def test_each_node_has_engines_on_the_gpus_of_its_ranks(
    folder: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's GPUs are pretended; a node has one, which its rank has reserved."""
    seen: dict[str, Any] = {}

    def observe() -> None:
        wait_for_step(folder / "shared", 2)
        seen["engines"] = len(scripted_servers())
        seen["nodes"] = nodes_of(cluster, "ray::EngineActor")
        ranks = [*nodes_of(cluster, "ray::_RankZero"), *nodes_of(cluster, "ray::_Follower")]
        seen["ranks"] = len(set(ranks))

    with cluster_of([2, 2], monkeypatch, num_gpus=1) as cluster:
        outcome = run(folder, tiny_model_folder, "shared", observe)
        nothing_is_left()
    assert outcome.step == STEPS and seen["engines"] == 2
    assert len(seen["nodes"]) == seen["ranks"] == 2
    for engine in (0, 1):
        assert "GPUs: 0\n" in (folder / f"shared/engine_{engine}.log").read_text()
    same(folder / "alone", folder / "shared")
    last = rows(folder / "shared")[-1]
    for engine in (0, 1):
        assert last[f"sync/num_bytes_of_engine_{engine}"] == last["sync/num_bytes"] > 0
    assert last["sync/logprob_abs_diff_max"] < 1e-4  # the engine's float32 sums, in another order
    assert last["faults/engine_deaths"] == 0


@pytest.mark.spec("update.colocated-nodes")
@pytest.mark.parametrize("fault", ["server", "actor"])
def test_a_lost_engine_comes_back_colocated_with_its_rank(
    fault: str, folder: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"lost-{fault}"
    faults = {
        "server": lambda: kill_one(scripted_servers()),
        "actor": lambda: kill_one(workers("ray::EngineActor")),
    }
    with cluster_of([2, 2], monkeypatch):
        during = partial(after_step_2, folder / name, faults[fault], find_servers=scripted_servers)
        outcome = run(folder, tiny_model_folder, name, during)
        nothing_is_left()
    assert outcome.step == STEPS
    last = rows(folder / name)[-1]
    assert last["faults/engine_deaths"] == last["faults/engine_restarts"] == 1
    same(folder / "alone", folder / name)


@pytest.mark.spec("update.colocated-nodes")
def test_a_node_that_remains_has_its_engines(
    folder: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of rank 1 is lost while a batch is generated; the run goes on without it."""
    seen: dict[str, int] = {}

    with cluster_of([2, 2], monkeypatch) as cluster:

        def lose_node() -> None:
            wait_for_step(folder / "one-left", 2)
            (lost,) = nodes_of(cluster, "ray::_Follower")
            with held(folder):
                cluster.remove_node(lost, allow_graceful=False)
            wait_for_step(folder / "one-left", 5)
            seen["engines"] = len(scripted_servers())

        outcome = run(folder, tiny_model_folder, "one-left", lose_node)
        nothing_is_left()
    assert outcome.step == STEPS and seen == {"engines": 1}
    same(folder / "alone", folder / "one-left")
