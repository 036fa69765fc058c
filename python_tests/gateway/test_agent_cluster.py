"""Agents on the nodes of a Ray cluster, here several on one machine."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import process_agents
import pytest
from _agents import (
    CALL,
    FORKS,
    SOLVE,
    python,
    read_pids,
    says_hello,
    steps,
    task_of,
    wait_until_gone,
)
from _cluster_run import processes, workers
from _gateway import Played, gateways, played, says_length
from fake_envs import FakePrompt

from skyrl_fast.config import AgentConfig
from skyrl_fast.gateway.agents.command import CommandAgent
from skyrl_fast.gateway.agents.function import FunctionAgent
from skyrl_fast.gateway.agents.task import BlackBox
from skyrl_fast.gateway.messages import Outcome
from skyrl_fast.gateway.start import black_box
from skyrl_fast.rollout.env.errors import EnvError
from skyrl_fast.rollout.workers import cluster as cluster_module

pytest.importorskip("openai")
pytest.importorskip("starlette")
# Each starts a cluster.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(300),
    pytest.mark.spec("gateway.agent-cluster"),
]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A node that is too small for agents, and two that are not."""
    pytest.importorskip("ray")
    from _nodes import cluster_of

    monkeypatch.setattr(cluster_module, "REFRESH_SECONDS", 0.5)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", tempfile.gettempdir())  # its sockets need a short path
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # of the nodes, for folders of commands
    with cluster_of([1, 2, 2], monkeypatch) as nodes:
        yield nodes


class OnNodes(BlackBox):
    """An agent on two nodes, both of which are ready at its start."""

    def __init__(self, **options: Any) -> None:
        config = {"workers": "cluster", "num_cpus_per_node": 2}
        self.agent: Any = black_box(AgentConfig(**config | options))

    async def start(self) -> str:
        address = await self.agent.start()
        deadline = time.monotonic() + 60
        while len(self.agent._workers._ready_nodes()) < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        return address

    async def run(self, task: Any) -> Outcome:
        return await self.agent.run(task)

    async def close(self) -> None:
        await self.agent.close()


def agent_processes() -> list[int]:
    """Return fork servers and the processes that they forked."""
    return processes(lambda command: b"fork_server" in command)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_agents_are_spread_and_give_the_same_steps_as_in_the_trainer(
    nodes: Any, tiny_tokenizer: Any
) -> None:
    import ray

    prompts = [FakePrompt(str(n), messages=[says_hello(n)]) for n in range(8)]
    options: Any = {"prompts": prompts, "answer": says_length(tiny_tokenizer)}
    here = played(FunctionAgent(process_agents.solve), tiny_tokenizer, **options)
    there = played(OnNodes(function=SOLVE), tiny_tokenizer, **options)
    assert gateways[-1].url.startswith(f"http://{ray.util.get_node_ip_address()}:")
    assert steps(there) == steps(here)
    servers = Counter(t.env_metrics["parent"] for t in there.trajectories)
    assert sorted(servers.values()) == [4, 4]
    command = {"command": python(CALL + "\nsys.exit(3)"), "verifier": python("pass")}
    here = played(
        CommandAgent(command["command"], verifier=command["verifier"]), tiny_tokenizer, **options
    )
    there = played(OnNodes(**command), tiny_tokenizer, **options)
    assert steps(there) == steps(here)
    assert [t.steps[0].reward for t in there.trajectories] == [1.0] * 8
    agent = OnNodes(command=python(CALL + "\nprint('oh no')"), reward_file="out.json")
    out = played(agent, tiny_tokenizer, max_retries=0)
    assert "out.json: no such file; exit code 0; output: oh no" in str(out.only.failure)
    until(lambda: not agent_processes() and not workers("ray::_NodeActor"))


def test_late_agents_are_killed_with_what_they_started(
    nodes: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    prompts = [
        FakePrompt(do, env_extras={"do": do, "pids": str(tmp_path / do)})
        for do in ("hang", "hold_lock")
    ]
    out = played(
        OnNodes(function=SOLVE), tiny_tokenizer, prompts=prompts, trajectory_timeout_seconds=20
    )
    assert [(t.stop_reason, len(t.steps)) for t in out.trajectories] == [("timeout", 1)] * 2
    for prompt in prompts:
        wait_until_gone(read_pids(tmp_path / prompt.uid))


async def test_a_cancelled_agent_is_killed_with_what_it_started(nodes: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    agent = OnNodes(command=python(FORKS % (str(pids), 600)))
    running = asyncio.create_task(agent.run(task_of({})))
    while not (pids.exists() and " " in pids.read_text()):
        assert not running.done()
        await asyncio.sleep(0.05)
    assert folders(tmp_path) != []
    running.cancel()
    await asyncio.wait([running])
    wait_until_gone(read_pids(pids))
    until(lambda: folders(tmp_path) == [])
    await agent.close()


def folders(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "tmp").glob("skyrl_fast_agent_*"))


def kill_an_actor(nodes: Any) -> None:
    os.kill(workers("ray::_NodeActor")[0], signal.SIGKILL)


def lose_a_node(nodes: Any) -> None:
    from _nodes import node_with

    nodes.remove_node(node_with(nodes, 2), allow_graceful=False)


@pytest.mark.parametrize("fault", [kill_an_actor, lose_a_node])
def test_agents_of_a_lost_worker_or_node_are_tried_again(
    fault: Callable[[Any], None], nodes: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Ray removes nodes in the main thread alone, so agents are played in another one."""
    hold = tmp_path / "hold"
    hold.touch()
    prompts = [
        FakePrompt(
            str(n), env_extras={"do": "hold", "hold": str(hold), "once": str(tmp_path / str(n))}
        )
        for n in range(4)
    ]
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(
            played, OnNodes(function=SOLVE), tiny_tokenizer, prompts=prompts, max_retries=1
        )
        until(lambda: playing.done() or all((tmp_path / str(n)).exists() for n in range(4)))
        try:
            before = agent_processes()
            assert len(before) == 2 * (1 + 2)
            fault(nodes)
            until(lambda: len(set(agent_processes()) & set(before)) == 3)  # they end with an actor
        finally:
            hold.unlink()
        out: Played = playing.result()
    assert [(t.failure, len(t.steps)) for t in out.trajectories] == [(None, 2)] * 4
    assert out.runner.faults["retried_trajectories"] == 2
    assert out.runner.faults["environment_errors"] == 2
    until(lambda: not agent_processes())


DRIVER = """
import asyncio, sys
from skyrl_fast.config import AgentConfig
from skyrl_fast.gateway.agents.task import AgentTask
from skyrl_fast.gateway.start import black_box
command = [sys.executable, "-I", "-S", "-c", sys.argv[1]]
agent = black_box(AgentConfig(command=command, workers="cluster", num_cpus_per_node=2))
asyncio.run(agent.run(AgentTask({}, "http://gateway", "key", "policy")))
"""


def test_nothing_is_left_of_a_killed_driver(nodes: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, FORKS % (str(pids), 600)],
        env={**os.environ, "RAY_ADDRESS": nodes.address},
    )
    until(lambda: driver.poll() is not None or (pids.exists() and " " in pids.read_text()))
    driver.kill()
    driver.wait()
    wait_until_gone(read_pids(pids))
    until(lambda: not agent_processes() and folders(tmp_path) == [])


def test_errors_say_what_is_missing(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A node without room, and one without the function's file."""
    monkeypatch.setattr(cluster_module, "PLACE_SECONDS", 1.0)
    file = tmp_path / "mine.py"
    file.write_text("def solve(task): return 1.0\n")

    async def failure(**options: Any) -> str:
        agent = OnNodes(**options)
        if "function" in options:
            file.unlink()
        try:
            with pytest.raises(EnvError) as error:
                await agent.run(task_of({}))
            return str(error.value)
        finally:
            await agent.close()

    wanted = "agent: agent.num_cpus_per_node: expected a node with 3 CPUs free"
    assert asyncio.run(failure(command=["ls"], num_cpus_per_node=3)).startswith(wanted)
    monkeypatch.setattr(cluster_module, "PLACE_SECONDS", 60.0)
    said = asyncio.run(failure(function=f"{file}:solve"))
    assert said.startswith("agent: the fork server did not start: cannot import")
    assert f"no Python file: {file}" in said
