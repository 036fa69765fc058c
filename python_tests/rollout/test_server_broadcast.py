"""Weights by a broadcast to servers, whose workers are threads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import torch
from test_weight_broadcast import Llm, few_seconds, make_sync, needs_vllm, no_sending_thread

from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.engine.weights.group import WeightsGroup
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transfer import by_broadcast

__all__ = ["few_seconds"]  # a fixture for all tests here


SENT = {"w": torch.ones(1), "large": torch.linspace(0, 1, 1 << 16)}


class Server(RemoteEngine):
    """A server of fakes, connected for real."""

    def __init__(self, url: str = "http://a:1") -> None:
        transport = httpx.MockTransport(self.respond)
        super().__init__(url, weight_sync="gloo", trainer="127.0.0.1", transport=transport)
        self.llm = Llm()

    async def respond(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if path != "/collective_rpc":
            return httpx.Response(200, json={})
        call = json.loads(request.content)
        method = call["method"]
        if method in ("return_kept_logprobs_only", "weights_dtype"):
            answer = "float32" if method == "weights_dtype" else None
            return httpx.Response(200, json={"results": [answer] * 2})
        try:
            results = await self.llm.collective_rpc(method, tuple(call["args"]))
        except ValueError as error:
            return httpx.Response(500, text=str(error))
        return httpx.Response(200, json={"results": results})

    async def prompt_logprobs(self, token_ids: Any) -> list[float]:
        return [0.0] * (len(token_ids) - 1)


@needs_vllm
@pytest.mark.spec("async.weight-broadcast", "async.cluster-weights")
def test_each_server_has_a_group_of_its_own() -> None:
    one, other = Server(), Server("http://b:1")
    pool = EnginePool([one, other], transfer=by_broadcast)

    async def go() -> None:
        await pool.start()
        for _ in range(2):
            await pool.update(SENT, make_sync)
        await pool.close()

    asyncio.run(go())
    for engine in (one, other):
        assert engine.llm.calls == ["join_weights_group", *["load_weights_broadcast"] * 2]
        for worker in engine.llm.workers:
            assert torch.equal(worker.model.loaded["large"], SENT["large"])
    assert {n: r.num_bytes for n, r in pool.reports.items()} == dict.fromkeys((0, 1), 4 + (4 << 16))
    assert no_sending_thread()


async def loaded(engine: Server, fault: str = "") -> None:
    await engine.start()
    engine.llm.fault = fault
    assert engine._sender is not None
    engine._sender._group._seconds = 1.0
    with by_broadcast(SENT, None) as call:
        await asyncio.wait_for(engine.load_weights(call), 60)


@pytest.mark.spec("async.weight-broadcast")
def test_an_error_of_a_servers_loader_ends_the_broadcast() -> None:
    wanted = "the server http://a:1 could not load the new weights: .* unknown layer"
    with pytest.raises(WeightSyncError, match=wanted):
        asyncio.run(loaded(Server(), "refuses"))
    assert no_sending_thread()


@needs_vllm
@pytest.mark.spec("async.weight-broadcast")
@pytest.mark.parametrize("fault", ["truncated", "swapped", "changed"])
def test_a_broken_transfer_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket without its end, a tensor in another order, one bit."""
    send = WeightsGroup.send

    def broken(self: WeightsGroup, infos: Any, tensors: Any) -> None:
        sent = dict(tensors)
        if fault == "swapped":
            sent = {"w": SENT["large"][1:2], "large": SENT["large"].roll(1)}
        elif fault == "changed":
            sent["large"] = SENT["large"].clone()
            sent["large"].view(torch.int32)[77] ^= 1
        send(self, list(infos)[:1] if fault == "truncated" else infos, sent)

    monkeypatch.setattr(WeightsGroup, "send", broken)
    wanted = "did not receive|loaded other values than the trainer's: large"
    with pytest.raises((WeightSyncError, EngineDeadError), match=wanted):
        asyncio.run(loaded(Server()))
    assert no_sending_thread()
