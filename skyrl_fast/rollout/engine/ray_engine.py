"""`RayEngine`: an engine's server on a node of a Ray cluster, started again where it is lost.

The server is that of `skyrl-fast engine`, used as any `RemoteEngine`; an actor starts it and says
when it has exited. Ray ends the actors with the process that created them.

Design: docs/design/020-several-gpus.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl_fast.rollout.engine.engine_actor import EngineActor
from skyrl_fast.rollout.engine.protocol import EngineDeadError, NoRoomError
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.system.tasks import ignore_result

log = logging.getLogger(__name__)

ROOM_SECONDS = 5.0  # for a node to have room at the start of a run, which has waited before
NO_URL = "http://nowhere"  # until the server has an address


@dataclass(frozen=True, slots=True)
class EngineBundle:
    """A bundle of a placement group, all of it for one engine; Ray moves it if its node is lost."""

    group: Any
    index: int


@dataclass(frozen=True, slots=True)
class ActorServer:
    """A server, from its request to Ray on; its URL follows when its process has started."""

    actor: Any
    url: asyncio.Future[str]
    ended: asyncio.Future[str]


class RayEngine(RemoteEngine):
    """A server that this class starts on a node of the cluster, and again after it died.

    Args:
        trainer: address of this node, which the engines' nodes reach.
        weights_folder: that trainer and engines share, for "file".
        start_seconds: for a server to answer once its node has room.
    """

    starts_with_model = True  # its server is always a new one

    def __init__(
        self,
        number: int,
        bundle: EngineBundle,
        make_setup: Callable[[], VllmSetup],
        *,
        weight_sync: str | None,
        trainer: str,
        weights_folder: str | None = None,
        start_seconds: float = 600.0,
        **options: Any,
    ) -> None:
        key = secrets.token_urlsafe(32)
        super().__init__(NO_URL, api_key=key, weight_sync=weight_sync, trainer=trainer, **options)
        self.name = f"engine {number}"
        self._bundle = bundle
        self._start_seconds = start_seconds
        self.actor_arguments = {
            "key": key,
            "trainer": None if weight_sync == "file" else trainer,
            "weights_folder": weights_folder,
            "folder": os.getcwd(),
        }
        self._make_setup = make_setup
        self._server: ActorServer | None = None
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        starting = self._begin()
        group = self._bundle.group
        if not starting.done() and not await asyncio.to_thread(group.wait, ROOM_SECONDS):
            raise NoRoomError(f"no node with {group.bundle_specs[self._bundle.index]} free")
        try:
            await asyncio.shield(starting)
        finally:
            if starting.done():
                self._starting = None
        await super().start()

    def check_running(self) -> None:
        self._refuse_ended(self._get_server())

    async def comes_back(self) -> bool:
        return self._begin().done()

    async def restart(self) -> None:
        await super().close()
        await self.start()

    async def close(self) -> None:
        await super().close()
        starting = self._starting
        self._starting = None
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        self._end()

    def _begin(self) -> asyncio.Task[None]:
        """Begin to start a server, unless that was begun; the one before is ended."""
        if self._starting is None:
            self._end()
            self._server = self._request_actor()
            self._starting = asyncio.create_task(self._wait_until_healthy(self._server))
        return self._starting

    def _request_actor(self) -> ActorServer:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        spec = self._bundle.group.bundle_specs[self._bundle.index]
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
            .remote(self._make_setup, **self.actor_arguments)
        )
        return ActorServer(actor, _watch(actor.serve), _watch(actor.ending))

    async def _wait_until_healthy(self, server: ActorServer) -> None:
        try:
            self._url = await server.url
        except Exception as error:  # Ray's: of the actor's start, or its node was lost
            raise EngineDeadError(f"{self.name} did not start: {_shorten(error)}") from error
        deadline = time.monotonic() + self._start_seconds
        while reason := await self._unhealthy_reason():
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"{self.name} at {self._url} did not answer within {self._start_seconds:g} s: "
                    f"{reason}"
                )
            await asyncio.sleep(self._limits.start_poll)
        log.info("%s runs at %s", self.name, self._url)

    def _end(self) -> None:
        import ray

        server = self._server
        self._server = None
        if server is not None:
            for waiting in (server.url, server.ended):
                waiting.cancel()
            ray.kill(server.actor)

    async def _unhealthy_reason(self) -> str:
        self.check_running()
        return await super()._unhealthy_reason()

    async def _answer(self, method: str, path: str, **arguments: Any) -> Any:
        # A lost node does not close its connections.
        server = self._get_server()
        answer = asyncio.create_task(super()._answer(method, path, **arguments))
        try:
            await asyncio.wait({answer, server.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._refuse_ended(server)
            return await answer
        finally:
            answer.cancel()

    def _get_server(self) -> ActorServer:
        if self._server is None:
            raise EngineDeadError(f"{self.name} is not running: await engine.start() first")
        return self._server

    def _refuse_ended(self, server: ActorServer) -> None:
        if server.ended.done():
            if server.ended.cancelled():
                text = "stopped"
            else:
                text = _describe_end(server.ended)
            raise EngineDeadError(f"{self.name} at {self._url}: {text}")


def _describe_end(ended: asyncio.Future[str]) -> str:
    error = ended.exception()
    if error is None:
        return ended.result()
    return _shorten(error)


def _watch(method: Any) -> asyncio.Future[Any]:
    """Return the result of an actor's method, which may never be awaited."""
    future = asyncio.wrap_future(method.remote().future())
    future.add_done_callback(ignore_result)
    return future


def _shorten(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:400]}"
