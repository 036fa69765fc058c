"""`StartedEngine`: a server that the run starts, and starts again where it is lost.

The server is that of `skyrl-fast engine`, used as any `RemoteEngine`. Where it runs, a subclass
says: `NodeEngine` on this machine, `RayEngine` on a cluster.

Design: docs/design/020-several-gpus.md.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl_fast.rollout.engine.engine_server import EngineServer, ServerAccess
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.group import IPC
from skyrl_fast.system.network_interface import LOOPBACK
from skyrl_fast.system.tasks import ignore_result

log = logging.getLogger(__name__)

NO_URL = "http://nowhere"  # until the server has an address


@dataclass(frozen=True, slots=True)
class StartedServer:
    """A server, from the request for it on.

    Args:
        url: follows when its process has started.
        ended: why it ended, once it has.
        end: ends it.
    """

    url: asyncio.Future[str]
    ended: asyncio.Future[str]
    end: Callable[[], object]


class StartedEngine(RemoteEngine):
    """A server that this class starts, and again after it died.

    Args:
        number: of the engine among the run's.
        access: who may use its servers, and how they get weights.
        weight_sync: see `RemoteEngine`.
        start_seconds: for a server to answer once its process has started.
        options: of `RemoteEngine`.
    """

    starts_with_model = True  # its server is always a new one
    weight_syncs = (*RemoteEngine.weight_syncs, IPC)  # its server may be on the trainer's GPUs

    def __init__(
        self,
        number: int,
        access: ServerAccess,
        *,
        weight_sync: str | None,
        start_seconds: float = 600.0,
        **options: Any,
    ) -> None:
        super().__init__(NO_URL, api_key=access.key, weight_sync=weight_sync, **options)
        self.name = f"engine {number}"
        self.access = access
        self._start_seconds = start_seconds
        self._server: StartedServer | None = None
        self._starting: asyncio.Task[None] | None = None

    @abstractmethod
    def _request_server(self) -> StartedServer:
        """Begin to start a server, without waiting."""

    async def start(self) -> None:
        starting = self._begin()
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
            self._server = self._request_server()
            self._starting = asyncio.create_task(self._wait_until_healthy(self._server))
        return self._starting

    async def _wait_until_healthy(self, server: StartedServer) -> None:
        try:
            self._url = await server.url
        except EngineDeadError:
            raise
        except Exception as error:  # Ray's: of the actor's start, or its node was lost
            raise EngineDeadError(f"{self.name} did not start: {shorten(error)}") from error
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
        server = self._server
        self._server = None
        if server is not None:
            for waiting in (server.url, server.ended):
                waiting.cancel()
            server.end()

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

    def _get_server(self) -> StartedServer:
        if self._server is None:
            raise EngineDeadError(f"{self.name} is not running: await engine.start() first")
        return self._server

    def _refuse_ended(self, server: StartedServer) -> None:
        if server.ended.done():
            if server.ended.cancelled():
                text = "stopped"
            else:
                text = _describe_end(server.ended)
            raise EngineDeadError(f"{self.name} at {self._url}: {text}")


class NodeEngine(StartedEngine):
    """An engine's server on this machine, a child process.

    Args:
        make_server: makes the server; called for each start.
    """

    def __init__(
        self,
        number: int,
        setup: VllmSetup,
        access: ServerAccess,
        *,
        make_server: Callable[[Callable[[], VllmSetup], ServerAccess], EngineServer] = EngineServer,
        **options: Any,
    ) -> None:
        super().__init__(number, access, **options)
        self.setup = setup
        self._make_server = make_server

    def _request_server(self) -> StartedServer:
        loop = asyncio.get_running_loop()
        url: asyncio.Future[str] = loop.create_future()
        server = self._make_server(lambda: self.setup, self.access)
        url.set_result(server.start(LOOPBACK))
        return StartedServer(url, _watch_exit(server), server.kill)


def _watch_exit(server: EngineServer) -> asyncio.Future[str]:
    """Return why a server ended, once it has."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()
    ended.add_done_callback(ignore_result)

    def tell(reason: str) -> None:
        if not ended.done():
            ended.set_result(reason)

    def wait() -> None:
        reason = server.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, reason)

    # A thread that the interpreter does not wait for: the server ends after this process.
    threading.Thread(target=wait, name="engine exit", daemon=True).start()
    return ended


def _describe_end(ended: asyncio.Future[str]) -> str:
    error = ended.exception()
    if error is None:
        return ended.result()
    return shorten(error)


def shorten(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:400]}"
