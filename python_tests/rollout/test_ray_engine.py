"""An engine on a cluster: its server's starts, ends and restarts, with a fake of Ray's actors."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.engine_server import ServerAccess
from skyrl_fast.rollout.engine.pool import EnginePool, PoolSeconds
from skyrl_fast.rollout.engine.protocol import EngineDeadError, NoRoomError
from skyrl_fast.rollout.engine.ray_engine import EngineBundle, RayEngine
from skyrl_fast.rollout.engine.remote import ServerLimits
from skyrl_fast.rollout.engine.started_engine import StartedServer
from skyrl_fast.rollout.engine.vllm_start import VllmSetup

CHOICE = {"token_ids": [3], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}


QUICK = PoolSeconds(poll=0.01)


class Engine(RayEngine):
    """Its actors are started and ended by the test: server n has the address http://server-n."""

    def __init__(
        self,
        *,
        room: bool = True,
        comes: bool = True,
        start_seconds: float = 5.0,
        key: str = "a key",
    ) -> None:
        group = SimpleNamespace(bundle_specs=[{"CPU": 1.0}], wait=lambda seconds: room)
        super().__init__(
            7,
            EngineBundle(group, 0),
            lambda: VllmSetup("m"),
            ServerAccess(key),
            weight_sync=None,
            start_seconds=start_seconds,
            transport=httpx.MockTransport(self.respond),
            limits=ServerLimits(start_poll=0.01),
        )
        self.comes = comes
        self.requested: list[StartedServer] = []
        self.killed: list[int] = []
        self.asked: list[str] = []
        self.keys: set[str] = set()
        self.stuck = asyncio.Event()  # set while a completion gets no answer
        self.healthy = True

    def _request_server(self) -> StartedServer:
        loop = asyncio.get_running_loop()
        number = len(self.requested)
        server = StartedServer(
            loop.create_future(), loop.create_future(), lambda: self.killed.append(number)
        )
        self.requested.append(server)
        if self.comes:
            server.url.set_result(f"http://server-{number + 1}")
        return server

    async def respond(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/health":
            return httpx.Response(200 if self.healthy else 503)
        self.asked.append(f"{request.url.host} {path}")
        self.keys.add(request.headers["authorization"])
        if path == "/v1/completions":
            while self.stuck.is_set():
                await asyncio.sleep(0.01)
        body: Any = {"data": [{"id": "m"}]} if path == "/v1/models" else {"choices": [CHOICE]}
        return httpx.Response(200, json=body)


def ask(engine: RayEngine | EnginePool) -> Coroutine[Any, Any, Any]:
    sampling = SamplingParams(max_generate_length=1)
    return engine.generate([1, 2], sampling, session_id="s", policy_version=0)


@pytest.mark.spec("update.engine-lost")
async def test_a_request_ends_with_its_server_and_goes_to_the_next_one() -> None:
    """A node that is lost closes no connection, so only Ray says that it is gone."""

    engine = Engine()
    pool = EnginePool([engine], seconds=QUICK)
    await pool.start()
    engine.stuck.set()
    waiting = asyncio.create_task(ask(pool))
    while not any("completions" in path for path in engine.asked):
        await asyncio.sleep(0.01)
    engine.requested[0].ended.set_result("its server exited with code -9")
    while not pool.activity():
        await asyncio.sleep(0.01)
    assert "engine 7 at http://server-1: its server exited with code -9" in pool.activity()[0]
    engine.stuck.clear()
    await asyncio.wait_for(pool.wait_for_fault(), 5)
    assert engine.killed == [0]
    await pool.restart()
    assert (await asyncio.wait_for(waiting, 5)).token_ids == [3]
    assert engine.asked[-1] == "server-2 /v1/completions"
    assert pool.faults == {"engine_deaths": 1, "engine_restarts": 1, "requests_sent_again": 1}
    await pool.close()
    assert engine.killed == [0, 1]


async def test_an_engine_that_is_given_up_leaves_no_server() -> None:
    engine = Engine()
    pool = EnginePool([engine], max_restarts=1, seconds=QUICK)
    await pool.start()
    for _ in range(2):
        engine.requested[-1].ended.set_result("its server exited with code -9")
        await asyncio.wait_for(pool.wait_for_fault(), 5)
        if len(engine.requested) < 3:
            await pool.restart()
    with pytest.raises(EngineDeadError, match="no engine is left"):
        await pool.restart()
    assert len(engine.requested) == 3 and engine.killed == [0, 1, 2]


@pytest.mark.spec("async.engine-room")
async def test_an_engine_without_room_starts_when_there_is() -> None:
    engine = Engine(room=False, comes=False)
    with pytest.raises(NoRoomError, match=r"no node with {'CPU': 1.0} free"):
        await engine.start()
    assert not await engine.comes_back() and len(engine.requested) == 1
    engine.requested[0].url.set_result("http://late")
    while not await engine.comes_back():
        await asyncio.sleep(0.01)
    await engine.restart()
    assert (await ask(engine)).token_ids == [3]
    assert engine.asked[0] == "late /v1/models" and len(engine.requested) == 1
    await engine.close()


@pytest.mark.parametrize("reason", ["exits", "actor", "silent"])
def test_a_server_that_does_not_start_says_why(reason: str) -> None:
    async def go() -> None:
        engine = Engine(comes=reason != "actor", start_seconds=0.05)
        engine.healthy = False
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0.01)
        if reason == "exits":
            engine.requested[0].ended.set_result("its server exited with code 1; engine.log ends")
        elif reason == "actor":
            engine.requested[0].url.set_exception(RuntimeError("the node\n  is lost"))
        await starting

    wanted = {
        "exits": "engine 7 at http://server-1: its server exited with code 1; engine.log ends",
        "actor": "engine 7 did not start: RuntimeError: the node is lost",
        "silent": "engine 7 at http://server-1 did not answer within 0.05 s: it answered 503",
    }
    with pytest.raises(EngineDeadError, match=wanted[reason]):
        asyncio.run(go())


async def test_requests_have_the_key_of_their_server() -> None:
    for key in ("one", "another"):
        engine = Engine(key=key)
        await engine.start()
        await ask(engine)
        assert engine.keys == {f"Bearer {key}"}
        await engine.close()
