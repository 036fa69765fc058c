"""`RayEngine`: an engine's server on a node of a Ray cluster, started again where it is lost.

An actor starts the server and says when it has exited. Ray ends the actors with the process that
created them.

Design: docs/design/020-several-gpus.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyrl_fast.rollout.engine.engine_server import EngineServer, ServerAccess
from skyrl_fast.rollout.engine.protocol import NoRoomError
from skyrl_fast.rollout.engine.started_engine import StartedEngine, StartedServer
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.system.tasks import ignore_result

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
ROOM_SECONDS = 5.0  # for a node to have room at the start of a run, which has waited before


@dataclass(frozen=True, slots=True)
class EngineBundle:
    """A bundle of a placement group, in which an engine runs.

    Args:
        group, index: the bundle. Ray moves one that has only an engine if its node is lost.
        resources: what the engine takes of it, by Ray's names; None: all of it.
        gpus_of_ranks: ids of GPUs that ranks there have reserved, and that the engine uses, too.
    """

    group: Any
    index: int
    resources: Mapping[str, float] | None = None
    gpus_of_ranks: tuple[str, ...] = ()

    @property
    def taken(self) -> Mapping[str, float]:
        """What the engine takes of it, by Ray's names."""
        if self.resources is not None:
            return self.resources
        taken: Mapping[str, float] = self.group.bundle_specs[self.index]
        return taken


class EngineActor:
    """Starts a server on this node; it exits with this process, however that ends.

    Args:
        make_setup: called on the engine's node, whose folders may differ from the trainer's; its
            `log_file` is the server's log.
        access: who may use the server.
        folder: working directory, for relative paths.
        gpus_of_ranks: ids of GPUs that it uses next to those that Ray gives it.
        make_server: makes the server.
    """

    def __init__(
        self,
        make_setup: Callable[[], VllmSetup],
        access: ServerAccess,
        *,
        folder: str,
        gpus_of_ranks: Sequence[str] = (),
        make_server: Callable[..., EngineServer] = EngineServer,
    ) -> None:
        enter(folder)
        if gpus_of_ranks:
            # Ray has given these to the ranks alone. Before torch looks for GPUs, here and in the
            # server, which inherits it.
            os.environ[VISIBLE_GPUS] = ",".join([*gpus_of_ranks, *reserved_gpus()])
        self._server = make_server(make_setup, access)

    def serve(self) -> str:
        """Start the server on this node's address alone; return its URL, not answering yet."""
        import ray

        # The thread that this is lives as long as the process.
        return self._server.start(str(ray.util.get_node_ip_address()))

    def ending(self) -> str:
        """Wait for the server's exit; return its exit code and the end of its log."""
        return self._server.wait()


class RayEngine(StartedEngine):
    """A server that this class starts on a node of the cluster, and again after it died."""

    def __init__(
        self,
        number: int,
        bundle: EngineBundle,
        make_setup: Callable[[], VllmSetup],
        access: ServerAccess,
        *,
        make_server: Callable[..., EngineServer] = EngineServer,
        **options: Any,
    ) -> None:
        super().__init__(number, access, **options)
        self._bundle = bundle
        self._make_setup = make_setup
        self._make_server = make_server

    async def start(self) -> None:
        starting = self._begin()
        group = self._bundle.group
        if not starting.done() and not await asyncio.to_thread(group.wait, ROOM_SECONDS):
            raise NoRoomError(f"no node with {self._bundle.taken} free")
        await super().start()

    def _request_server(self) -> StartedServer:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        spec = self._bundle.taken
        actor = (
            ray.remote(EngineActor)
            .options(
                num_cpus=spec.get("CPU", 0),
                num_gpus=spec.get("GPU", 0),
                max_concurrency=2,  # a thread waits for the server's exit
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._bundle.group, placement_group_bundle_index=self._bundle.index
                ),
            )
            .remote(
                self._make_setup,
                self.access,
                folder=os.getcwd(),
                gpus_of_ranks=self._bundle.gpus_of_ranks,
                make_server=self._make_server,
            )
        )
        return StartedServer(_watch(actor.serve), _watch(actor.ending), partial(ray.kill, actor))


def reserved_gpus() -> list[str]:
    """Return the ids of the GPUs that Ray has given to this actor."""
    import ray

    return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


def enter(folder: str) -> None:
    """Make it this process's working directory, for relative paths, if the node has it."""
    with contextlib.suppress(OSError):
        os.chdir(folder)


def _watch(method: Any) -> asyncio.Future[Any]:
    """Return the result of an actor's method, which may never be awaited."""
    future = asyncio.wrap_future(method.remote().future())
    future.add_done_callback(ignore_result)
    return future
