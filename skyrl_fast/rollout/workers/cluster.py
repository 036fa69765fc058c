"""Environments and agents on the nodes of a Ray cluster: an actor per node runs their processes.

Tool calls and sandboxes then use the CPUs of other nodes than the trainer's. Deadlines, limits and
checks are those of `processes.py`, applied on the node. A node that is lost ends the calls of its
handlers; the next ones are made on others, and on nodes that join.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from skyrl_fast.rollout.workers.processes import ProcessWorker, ProcessWorkers
from skyrl_fast.rollout.workers.protocol import CallResult, HandlerSettings
from skyrl_fast.system.printable import MAX_FAILURE, log_line
from skyrl_fast.system.ray_connection import connect_ray, import_ray

log = logging.getLogger(__name__)

PLACE_SECONDS = 120.0  # for a first node to have room
REFRESH_SECONDS = 10.0  # between looks for nodes that joined
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What an actor takes of its node."""

    setting: str
    num_cpus: int
    max_calls: int


class ClusterWorkers:
    """The actors of a run, on each node that has CPUs for one.

    Raises:
        ValueError: Ray is missing, or see `ProcessWorkers`.
    """

    def __init__(self, settings: HandlerSettings, share: NodeShare) -> None:
        ProcessWorkers(settings)  # raises here, not on a node
        self._settings = settings
        self._share = share
        self._section = share.setting.partition(".")[0]
        self._ray = import_ray(f"{self._section}.workers: cluster")
        self._connection = ExitStack()
        self._nodes: dict[str, _ClusterNode] = {}
        self._looked = float("-inf")
        self._lock = threading.Lock()  # of all above

    async def address(self) -> str:
        await asyncio.to_thread(self._connect)
        return str(self._ray.util.get_node_ip_address())

    async def acquire(self) -> ClusterWorker:
        """Return a worker on the node with the fewest; an OSError says why there is none."""
        deadline = time.monotonic() + PLACE_SECONDS
        while True:
            ready = await asyncio.to_thread(self._ready_nodes)
            if not ready:
                if time.monotonic() > deadline:
                    raise OSError(
                        f"{self._share.setting}: expected a node with {self._share.num_cpus} CPUs "
                        f"free within {PLACE_SECONDS:g} s, got nodes with {self._resources()}"
                    )
                await asyncio.sleep(POLL_SECONDS)
                continue
            node = min(ready, key=lambda each: each.num_workers)
            node.num_workers += 1
            call = node.actor.acquire.remote()
            try:
                return ClusterWorker(self, node, await call)
            except BaseException as error:  # also if the caller is cancelled
                node.num_workers -= 1
                if isinstance(error, asyncio.CancelledError):
                    self.cancel(call)
                if isinstance(error, self._ray.exceptions.RayTaskError):
                    raise OSError(f"{error.cause}") from error
                if not isinstance(error, self._ray.exceptions.RayError):
                    raise
                self.lose(node, error)

    async def close(self) -> None:
        nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            self._ray.kill(node.actor)
        await asyncio.to_thread(self._connection.close)

    def cancel(self, call: Any) -> None:
        self._ray.cancel(call)

    def lose(self, node: _ClusterNode, error: BaseException) -> str:
        """Use this node's actor no more; return what happened to it."""
        text = log_line(f"node {node.address}: {type(error).__name__}: {error}")[:MAX_FAILURE]
        if self._nodes.get(node.name) is node:
            del self._nodes[node.name]
            self._looked = float("-inf")  # a living node gets a new actor
            log.warning("%s: processes were lost with %s", self._section, text)
        return text

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, self._ray.exceptions.RayError)

    def _connect(self) -> None:
        with self._lock:
            if not self._ray.is_initialized():
                self._connection.enter_context(connect_ray(self._ray))

    def _ready_nodes(self) -> list[_ClusterNode]:
        self._connect()
        with self._lock:
            now = time.monotonic()
            if now - self._looked > REFRESH_SECONDS:
                self._looked = now
                self._add_nodes()
            nodes = list(self._nodes.values())  # the event loop may lose one
            for node in nodes:
                node.is_ready = node.is_ready or bool(self._ray.wait([node.started], timeout=0)[0])
            return [node for node in nodes if node.is_ready]

    def _add_nodes(self) -> None:
        """Start an actor on each node that has none; it waits for its CPUs."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node in self._ray.nodes():
            name, cpus = node["NodeID"], node["Resources"].get("CPU", 0)
            if not node["Alive"] or name in self._nodes or cpus < self._share.num_cpus:
                continue
            strategy = NodeAffinitySchedulingStrategy(name, soft=False)
            options = {"num_cpus": self._share.num_cpus, "scheduling_strategy": strategy}
            actor_class = self._ray.remote(_NodeActor).options(**options)
            actor = actor_class.remote(self._settings, self._share.max_calls)
            address = node["NodeManagerAddress"]
            self._nodes[name] = _ClusterNode(name, address, actor, actor.is_ready.remote())

    def _resources(self) -> list[float]:
        nodes = self._ray.nodes()
        return [node["Resources"].get("CPU", 0) for node in nodes if node["Alive"]]


class ClusterWorker:
    """Runs one handler in a process of a node."""

    def __init__(self, cluster: ClusterWorkers, node: _ClusterNode, number: int) -> None:
        self._cluster, self._node, self._number = cluster, node, number
        self.usable = True  # false: the process is gone, and its handler with it

    async def call(self, what: str, argument: Any, timeout: float | None) -> CallResult:
        """Answer as `Worker.call`, without the wait for the node's workers; None: no deadline."""
        if not self.usable:
            return CallResult(failure=f"{what}: its process was killed")
        try:
            call = self._node.actor.call.remote(self._number, what, argument, timeout)
        except Exception as error:  # of any type: the row's objects are pickled
            text = f"{what}: the row cannot be sent to a process: {error}"
            return CallResult(failure=text[:MAX_FAILURE])
        try:
            answer: _NodeAnswer = await call
        except asyncio.CancelledError:
            self._cluster.cancel(call)
            self._leave()
            raise
        except Exception as error:
            if not self._cluster.is_loss(error):
                raise
            self._leave()
            return CallResult(failure=f"{what}: {self._cluster.lose(self._node, error)}")
        if not answer.usable:
            self._leave()
        if answer.late is not None:
            raise TimeoutError(answer.late)
        return answer.outcome

    def release(self) -> None:
        if self.usable:
            self._node.actor.release.remote(self._number)
            self._leave()

    def _leave(self) -> None:
        if self.usable:
            self._node.num_workers -= 1
        self.usable = False


@dataclass(slots=True, eq=False)
class _ClusterNode:
    """A node with an actor, which may still wait for its CPUs."""

    name: str
    address: str
    actor: Any
    started: Any  # pending until the actor runs
    is_ready: bool = False
    num_workers: int = 0


@dataclass(frozen=True, slots=True)
class _NodeAnswer:
    """What an actor returns of a call; `late`: the calls in which a late one was, if known."""

    outcome: CallResult
    usable: bool
    late: str | None = None


class _NodeActor:
    def __init__(self, settings: HandlerSettings, workers: int) -> None:
        self._processes = ProcessWorkers(settings)
        self._workers: dict[int, ProcessWorker] = {}
        self._numbers = itertools.count()
        self._slots = asyncio.Semaphore(workers)

    async def is_ready(self) -> bool:
        return True

    async def acquire(self) -> int:
        number = next(self._numbers)
        self._workers[number] = await self._processes.acquire()
        return number

    async def call(
        self, number: int, what: str, argument: Any, timeout: float | None
    ) -> _NodeAnswer:
        worker, outcome, late = self._workers[number], CallResult(), None
        try:
            async with self._slots:
                outcome = await worker.call(what, argument, timeout)
        except TimeoutError as error:
            late = str(error)
        finally:
            if not worker.usable:
                del self._workers[number]
        return _NodeAnswer(outcome, worker.usable, late)

    async def release(self, number: int) -> None:
        self._workers.pop(number).release()
