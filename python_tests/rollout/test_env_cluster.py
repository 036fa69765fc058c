"""Environments on the nodes of a Ray cluster, here several on one machine."""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_envs
import pytest

from skyrl_fast.config import EnvironmentConfig
from skyrl_fast.rollout.env.errors import EnvError, EnvTimeoutError
from skyrl_fast.rollout.env.factory import EnvFactory, EnvSession
from skyrl_fast.rollout.env.protocol import Env, EnvStep
from skyrl_fast.rollout.workers import cluster as cluster_module

SCRIPTED = f"{process_envs.__file__}:Scripted"
MESSAGES = [{"role": "user", "content": "begin"}]
SHORT = 3.0  # seconds of a call, which takes milliseconds
# Each starts a cluster.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A node that is too small for environments, and two that are not."""
    pytest.importorskip("ray")
    from _nodes import cluster_of

    monkeypatch.setattr(cluster_module, "REFRESH_SECONDS", 0.5)
    with cluster_of([1, 2, 2], monkeypatch) as nodes:
        yield nodes


def environments(**options: Any) -> EnvFactory:
    config = {"env_class": SCRIPTED, "workers": "cluster", "num_workers_per_node": 2}
    return EnvFactory(EnvironmentConfig(**config | options), longest_text=1_000_000)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def begun(factory: EnvFactory, **row: Any) -> EnvSession:
    session = await factory.make(SCRIPTED, row)
    await session.init(MESSAGES)
    return session


async def seen(session: EnvSession) -> dict[str, Any]:
    return json.loads((await session.step("a")).messages[0]["content"])


def alive(name: str) -> bool:
    import ray

    return any(node["Alive"] and node["NodeID"] == name for node in ray.nodes())


async def servers_of(sessions: list[EnvSession]) -> Counter[int]:
    """Return how many environments each node's fork server has."""
    answers = await asyncio.gather(*map(seen, sessions))
    return Counter(parent_of(answer["pid"]) for answer in answers)


async def until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


@pytest.mark.spec("run.env-cluster")
async def test_environments_are_spread_over_the_nodes_with_room(nodes: Any) -> None:
    factory = environments()
    first = await begun(factory)
    await until(lambda: all(n.is_ready for n in factory._workers._ready_nodes()))
    await until(lambda: len(factory._workers._ready_nodes()) == 2)
    sessions = [first, *[await begun(factory) for _ in range(7)]]
    servers = await servers_of(sessions)
    assert sorted(servers.values()) == [4, 4]
    for session in sessions:
        await session.close()
    again = await servers_of([await begun(factory) for _ in range(8)])
    assert again == servers  # the same processes
    nodes.add_node(num_cpus=2)
    await until(lambda: len(factory._workers._ready_nodes()) == 3)
    more = await servers_of([await begun(factory) for _ in range(4)])
    assert len(more) == 1 and not more.keys() & servers.keys()
    await factory.close()
    pids = servers.keys() | more.keys()
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.spec("run.env-cluster")
async def test_faults_are_those_of_processes(nodes: Any) -> None:
    factory = environments(timeout_seconds=SHORT)
    with pytest.raises(EnvTimeoutError, match=r"step did not return within 3 s"):
        await (await begun(factory, do="hold_lock")).step("a")
    assert factory.num_abandoned == 1
    for do, text in (
        ("raise", "step raised RuntimeError: the database is locked"),
        ("exit", r"step: its process exited \(3\)"),
        ("segfault", "its process was killed by SIGSEGV"),
    ):
        with pytest.raises(EnvError, match=text):
            await (await begun(factory, do=do)).step("a")
    with pytest.raises(EnvError, match="cannot be sent to a process"):
        await factory.make(SCRIPTED, {"row": (i for i in range(2))})
    # More hang than a node has workers: the wait for one is not part of a call's time.
    hanging = [await begun(factory, do="hang") for _ in range(5)]
    results = await asyncio.gather(*(s.step("a") for s in hanging), return_exceptions=True)
    assert [type(result) for result in results] == [EnvTimeoutError] * 5
    stopped = await begun(factory, do="hang")
    call = asyncio.create_task(stopped.step("a"))
    await asyncio.sleep(0.5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    healthy = await begun(factory)
    assert (await seen(healthy))["turns"] == 1
    assert await healthy.metrics() == {"turns": 1}
    await factory.close()


async def test_a_lost_node_ends_its_environments_only(nodes: Any) -> None:
    from _nodes import node_with

    factory = environments()
    sessions = [await begun(factory)]
    await until(lambda: len(factory._workers._ready_nodes()) == 2)
    sessions += [await begun(factory) for _ in range(3)]
    answers = [await seen(session) for session in sessions]
    lost = node_with(nodes, 2)
    nodes.remove_node(lost, allow_graceful=False)
    await until(lambda: not alive(lost.node_id))
    results = await asyncio.gather(*map(seen, sessions), return_exceptions=True)
    failures = [r for r in results if isinstance(r, EnvError)]
    assert len(failures) == 2 and all("step: node " in str(r) for r in failures)
    assert sum(isinstance(r, dict) and r["turns"] == 2 for r in results) == 2
    living = {parent_of(r["pid"]) for r in results if isinstance(r, dict)}
    assert len(living) == 1
    more = await servers_of([await begun(factory) for _ in range(3)])
    assert more.keys() == living
    assert len({answer["pid"] for answer in answers}) == 4
    await factory.close()


async def test_without_room_the_error_says_what_was_wanted(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "PLACE_SECONDS", 1.0)

    factory = environments(num_workers_per_node=3)
    with pytest.raises(EnvError, match=r"num_workers_per_node: expected a node with 3 CPUs"):
        await factory.make(SCRIPTED, {})
    await factory.close()


class Local(Env):
    def step(self, action: str) -> EnvStep:
        return EnvStep(0.0, True, os.uname().nodename)


def test_classes_of_the_main_module_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Local", Local, raising=False)
    with pytest.raises(ValueError, match="other processes can import"):
        EnvFactory(EnvironmentConfig(workers="cluster"), make_env=Local)


def test_ray_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"environment.workers: cluster: expected Ray: pip in"):
        EnvFactory(EnvironmentConfig(workers="cluster"))
