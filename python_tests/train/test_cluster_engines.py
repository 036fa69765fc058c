"""Engines on nodes of a Ray cluster, with real vLLM: results, placement, faults, what is left."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import ray
from _cluster_run import share_of_e, workers
from _engine_runs import (
    DRIVER,
    STEPS,
    after_step_2,
    kill_one,
    overrides_of,
    rows,
    run,
    same,
    servers,
    settings,
    wait_for_end,
    wait_for_step,
    write_prompts,
)
from _listening import listening
from _nodes import cluster_of
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from examples.asynchronous.soak import children
from skyrl_fast import train_agent
from skyrl_fast.train import cluster as cluster_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.vllm,
    pytest.mark.timeout(600),  # each starts a cluster and engines
]
RANKS = "trainer.placement.policy_num_nodes=2"
ENGINES = ["trainer.placement.colocate_all=false", "generator.inference_engine.num_engines=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """Prompts, and the run `alone` of one process."""
    folder = tmp_path_factory.mktemp("runs")
    write_prompts(folder)
    train_agent(settings(folder, tiny_model_folder, "alone"), reward=share_of_e)
    return folder


@pytest.fixture
def three_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes with room for a rank each, and one with room for two engines."""
    with cluster_of([1, 1, 2], monkeypatch) as cluster:
        yield cluster


def nothing_is_left() -> None:
    wait_for_end(lambda: workers("ray::EngineActor") + workers("ray::_RankZero"))


@pytest.mark.spec("update.nodes")
def test_engines_on_another_node_train_as_one_process(
    folder: Path, tiny_model_folder: Path, three_nodes: Cluster
) -> None:
    seen: dict[str, Any] = {}
    overrides = [RANKS, *ENGINES]
    during = partial(observe, folder / "shared", seen)
    outcome = run(folder, tiny_model_folder, "shared", *overrides, during=during)
    assert outcome.step == STEPS
    same(folder / "alone", folder / "shared")
    ranks, engines = seen["nodes"]
    assert len(ranks) == 2 and len(engines) == 1 and not ranks & engines
    address = ray.util.get_node_ip_address()
    assert seen["listening"] <= {hexadecimal(address), hexadecimal("127.0.0.1")}
    last = rows(folder / "shared")[-1]
    parameters = 0.1e6
    for engine in (0, 1):
        assert last[f"sync/num_bytes_of_engine_{engine}"] > 2 * parameters
        assert 0 < last[f"sync/update_seconds_of_engine_{engine}"] < 60
        assert "POST /v1/completions" not in (folder / f"shared/engine_{engine}.log").read_text()
    assert last["faults/engine_deaths"] == 0
    nothing_is_left()


def observe(run_path: Path, seen: dict[str, Any]) -> None:
    """Note where ranks and engines are, and what listens, in the middle of a run."""
    wait_for_step(run_path, 2)
    seen["nodes"] = nodes_of("STRICT_SPREAD"), nodes_of("PACK")
    found: set[str] = set()
    for process in servers():
        for one in (process, *children(process)):
            with contextlib.suppress(OSError):  # of another user, or ended
                found |= listening(one)
    seen["listening"] = found


def nodes_of(strategy: str) -> set[str]:
    """Return the nodes of a run's ranks (STRICT_SPREAD) or engines (PACK)."""
    groups = ray.util.placement_group_table().values()
    return {
        node
        for group in groups
        if group["state"] == "CREATED" and group["strategy"] == strategy
        for node in group["bundles_to_node_id"].values()
    }


def hexadecimal(address: str) -> str:
    """Return an IPv4 address as in /proc/net/tcp."""
    return bytes(reversed([int(part) for part in address.split(".")])).hex().upper()


@pytest.mark.spec("update.engine-lost")
@pytest.mark.parametrize("fault", ["server", "actor", "node"])
def test_a_lost_engine_is_started_again_and_nothing_is_lost(
    fault: str, folder: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node with engines is lost with both of them; another one has room a little later."""
    run_path = folder / f"lost-{fault}"
    with cluster_of([1, 1, 2], monkeypatch) as cluster:

        def lose_node() -> None:
            (engines,) = (n for n in cluster.worker_nodes if n.node_id in nodes_of("PACK"))
            cluster.remove_node(engines, allow_graceful=False)
            cluster.add_node(num_cpus=2)

        faults: dict[str, Callable[[], None]] = {
            "server": lambda: kill_one(servers()),
            "actor": lambda: kill_one(workers("ray::EngineActor")),
            "node": lose_node,
        }
        during = partial(after_step_2, run_path, faults[fault])
        overrides = [RANKS, *ENGINES]
        outcome = run(folder, tiny_model_folder, run_path.name, *overrides, during=during)
        assert outcome.step == STEPS
        last = rows(run_path)[-1]
        lost = 2 if fault == "node" else 1
        assert last["faults/engine_deaths"] == last["faults/engine_restarts"] == lost
        same(folder / "alone", run_path)
        nothing_is_left()


def test_a_lost_engine_comes_back_with_the_current_adapter(
    folder: Path, tiny_model_folder: Path, three_nodes: Cluster
) -> None:
    lora, run_path = "trainer.policy.model.lora.rank=4", folder / "lost-lora"
    config = settings(folder, tiny_model_folder, "alone-lora", lora)
    train_agent(config, reward=share_of_e)
    during = partial(after_step_2, run_path, lambda: kill_one(servers()))
    overrides = [RANKS, *ENGINES, lora]
    outcome = run(folder, tiny_model_folder, run_path.name, *overrides, during=during)
    last = rows(run_path)[-1]
    assert outcome.step == STEPS
    assert last["faults/engine_deaths"] == last["faults/engine_restarts"] == 1
    assert outcome.checkpoint is not None
    adapter = load_file(outcome.checkpoint / "policy/adapter_model.safetensors")
    assert last["sync/num_bytes_of_engine_0"] == sum(t.nbytes for t in adapter.values())
    same(folder / "alone-lora", run_path)
    nothing_is_left()


def test_an_engine_joins_when_a_node_does(
    folder: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = partial(cluster_module.run_on_cluster, seconds=cluster_module.ClusterSeconds(place=5.0))
    monkeypatch.setattr(cluster_module, "run_on_cluster", soon)
    run_path = folder / "joined"
    with cluster_of([1, 1], monkeypatch) as cluster:
        during = partial(after_step_2, run_path, partial(cluster.add_node, num_cpus=1))
        outcome = run(folder, tiny_model_folder, run_path.name, *ENGINES, during=during)
    assert outcome.step == STEPS
    first, *_, last = rows(run_path)
    assert (first["faults/engine_restarts"], last["faults/engine_restarts"]) == (0, 1)
    assert "sync/num_bytes_of_engine_1" in last
    same(folder / "alone", run_path)
    nothing_is_left()


@pytest.mark.spec("update.engine-exit")
def test_a_killed_driver_leaves_nothing_and_the_same_command_resumes(
    folder: Path, tiny_model_folder: Path, three_nodes: Cluster
) -> None:
    run_path = folder / "killed"
    (folder / "driver.py").write_text(DRIVER)
    command = [
        *(sys.executable, str(folder / "driver.py"), "trainer.resume_mode=latest", RANKS, *ENGINES),
        *overrides_of(folder, tiny_model_folder, run_path.name),
    ]
    environment = {**os.environ, "RAY_ADDRESS": three_nodes.address}
    with subprocess.Popen(command, env=environment) as driver:
        wait_for_step(run_path, 3)
        driver.kill()
    nothing_is_left()
    subprocess.run(command, env=environment, check=True)
    same(folder / "alone", run_path)
    nothing_is_left()
