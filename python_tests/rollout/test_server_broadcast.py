"""Weights by a broadcast to servers, whose workers are threads."""

import asyncio
import copy
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from _weights import ADAPTER, FEW_SECONDS, Server, make_probe, no_sending_thread

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.remote import COMPLETIONS, LOAD_ADAPTER
from skyrl_fast.rollout.engine.weights import receipt
from skyrl_fast.rollout.engine.weights.buckets import Bucket
from skyrl_fast.rollout.engine.weights.group import GroupSeconds, WeightsGroup
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError, tensor_digest
from skyrl_fast.rollout.engine.weights.transports import broadcast as broadcast
from skyrl_fast.rollout.engine.weights.transports.broadcast import send_by_broadcast
from skyrl_fast.rollout.engine.weights.transports.file import send_by_file
from skyrl_fast.train.parallel.ranks import RankError

SENT = {
    "w": torch.ones(1),
    "large": torch.linspace(0, 1, 1 << 16),
    "also large": torch.linspace(1, 2, 1 << 16),
}


BUCKET = 1024  # each tensor is sent alone
READY = replace(FEW_SECONDS, ready=20.0)  # the first load of a process takes more than one
FAULTY = GroupSeconds(ready=1.0, notice=0.1)  # of a server that is to fail


@pytest.mark.vllm
@pytest.mark.spec("async.cluster-weights")
async def test_each_server_has_a_group_of_its_own() -> None:
    one, other = Server(), Server("http://b:1")
    pool = EnginePool([one, other], transport=send_by_broadcast)

    await pool.start()
    for _ in range(2):
        await pool.update(SENT, make_probe)
    await pool.close()
    for engine in (one, other):
        assert engine.llm.calls == ["join_weights_group", *["load_weights_broadcast"] * 2]
        for worker in engine.llm.workers:
            assert torch.equal(worker.model.loaded["large"], SENT["large"])
    assert {n: r.num_bytes for n, r in pool.reports.items()} == dict.fromkeys(
        (0, 1), 4 + 2 * (4 << 16)
    )
    assert no_sending_thread()


async def loaded(engine: Server, fault: str = "") -> None:
    await engine.start()
    engine.llm.fault = fault
    with send_by_broadcast(SENT, None, bucket_bytes=BUCKET) as call:
        await asyncio.wait_for(engine.load_weights(call), 60)


@pytest.mark.spec("async.weight-broadcast")
def test_an_error_of_a_servers_loader_ends_the_broadcast() -> None:
    wanted = "the server http://a:1 could not load the new weights: .* unknown layer"
    with pytest.raises(WeightSyncError, match=wanted):
        asyncio.run(loaded(Server(seconds=READY), "refuses"))
    assert no_sending_thread()


def swapped(buckets: list[Bucket]) -> list[Bucket]:
    """Return buckets with each other's values, in a chain of equal sizes."""
    first, second = buckets[1:3]
    return [buckets[0], replace(first, data=second.data), replace(second, data=first.data)]


def changed(buckets: list[Bucket]) -> list[Bucket]:
    buckets[1].data.view(torch.int32)[77] ^= 1  # one bit
    return buckets


def in_another_order(buckets: list[Bucket]) -> list[Bucket]:
    buckets[1].data.copy_(buckets[1].data.view(torch.int32).roll(1).view(torch.uint8))
    return buckets


BREAK: dict[str, Any] = {
    "truncated": lambda buckets: buckets[:-1],
    "dropped": lambda buckets: [buckets[0], *buckets[2:]],
    "swapped": swapped,
    "changed": changed,
    "in another order": in_another_order,
}


@pytest.mark.vllm
@pytest.mark.parametrize("fault", BREAK)
def test_a_broken_transfer_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    send = broadcast.send_buckets

    def send_broken(group: WeightsGroup, buckets: Any) -> None:
        send(group, BREAK[fault](list(copy.deepcopy([*buckets]))))

    monkeypatch.setattr(broadcast, "send_buckets", send_broken)
    wanted = "did not receive|loaded other values than the trainer's: (also )?large"
    with pytest.raises((WeightSyncError, EngineDeadError), match=wanted):
        asyncio.run(loaded(Server(seconds=READY)))
    assert no_sending_thread()


# --- several engines ------------------------------------------------------------------------------


class Gathered:
    """Weights that are gathered when they are read; `error` is raised in the middle."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.reads = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.reads += 1
        for number, (name, tensor) in enumerate(SENT.items()):
            if number == 1 and self.error is not None:
                raise self.error
            yield name, tensor.clone()


def update_of(
    servers: list[Server], weights: Any, fault: str = "", *, updates: int = 1
) -> EnginePool:
    """Return the pool after updates; the first server has a fault in the first of them."""
    pool = EnginePool(servers, transport=partial(send_by_broadcast, bucket_bytes=BUCKET))

    async def go() -> None:
        await pool.start()
        if fault:
            servers[0].llm.fault = fault
        for _ in range(updates):
            await asyncio.wait_for(pool.update(weights, make_probe), 60)
        await pool.close()

    asyncio.run(go())
    return pool


def received(server: Server) -> bool:
    loaded = [worker.model.loaded for worker in server.llm.workers]
    return all(torch.equal(one[name], SENT[name]) for one in loaded for name in SENT)


@pytest.mark.vllm
@pytest.mark.spec("async.weight-overlap")
def test_each_bucket_is_made_once_for_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[str] = []

    def counted(tensor: torch.Tensor) -> str:
        if threading.current_thread().name == "weights":  # not those of the workers
            digested.append(str(tensor.shape))
        return tensor_digest(tensor)

    monkeypatch.setattr(receipt, "tensor_digest", counted)
    weights, servers = Gathered(), [Server(f"http://{name}:1") for name in "abc"]
    pool = update_of(servers, weights)
    assert weights.reads == 1
    assert len(digested) == len(SENT)
    assert all(map(received, servers))
    assert {report.num_bytes for report in pool.reports.values()} == {4 + 2 * (4 << 16)}
    assert no_sending_thread()


@pytest.mark.vllm
@pytest.mark.parametrize("fault", ["hangs", "dies in a bucket"])
def test_an_engine_that_stops_in_an_update_holds_up_no_other(
    fault: str,
) -> None:
    servers = [Server("http://a:1", seconds=FAULTY), Server("http://b:1"), Server("http://c:1")]
    pool = update_of(servers, Gathered(), fault)
    assert [received(server) for server in servers[1:]] == [True, True]
    assert {*pool.reports} == {1, 2}
    assert pool.faults["engine_deaths"] == 1
    assert no_sending_thread()


@pytest.mark.vllm
def test_all_engines_that_come_back_get_the_weights_from_the_start() -> None:
    weights, server = Gathered(), Server(seconds=FAULTY)
    pool = update_of([server], weights, "dies in a bucket")
    assert received(server)
    assert weights.reads == 2
    assert pool.faults["engine_restarts"] == 1


@pytest.mark.vllm
def test_an_error_while_weights_are_gathered_is_raised_by_its_name() -> None:
    error = RankError("rank 1 has exited")
    with pytest.raises(RankError, match="rank 1 has exited"):
        update_of([Server(), Server("http://b:1")], Gathered(error))
    assert no_sending_thread()


# --- a fault at each call of an update ------------------------------------------------------------

CALLS = ("/pause", "load", "/reset_prefix_cache", "/resume")  # of an update, to one server
OF_ADAPTERS = ("/pause", "load", LOAD_ADAPTER, "/reset_prefix_cache", "/resume")
FAULTS = ("500", "half", "reset", "hang")
SLOW = pytest.mark.slow


@pytest.mark.vllm
@pytest.mark.spec(
    *("async.server-return", "async.engine-restart", "async.engine-silence", "lora.servers")
)
@pytest.mark.parametrize("transport", ["file", pytest.param("gloo", marks=SLOW)])
@pytest.mark.parametrize(
    ("calls", "call", "fault"),
    [
        (calls, *case)
        for calls in (CALLS, OF_ADAPTERS)
        for case in [*product(range(len(calls)), FAULTS), (calls.index("load"), "wrong digest")]
    ],
)
async def test_a_server_with_a_fault_at_a_call_of_an_update_is_left_out_until_it_is_repaired(
    calls: tuple[str, ...], call: int, fault: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = ADAPTER if calls is OF_ADAPTERS else None
    options: dict[str, Any] = {"weight_sync": transport, "adapter": adapter}
    seconds = GroupSeconds(notice=0.1)
    servers = [Server(f"http://{name}:1", seconds=seconds, **options) for name in "ab"]
    send = send_by_file if transport == "file" else send_by_broadcast
    engines = EnginePool(servers, transport=send)
    wait = engines._call

    async def short_wait(member: Any, call: Any, seconds: float) -> Any:
        if member.engine is servers[0]:  # the other one may be slow
            seconds = 1.0 if transport == "file" else 5.0
        return await wait(member, call, seconds)

    async def update() -> None:
        await engines.interrupt()
        await asyncio.wait_for(engines.update(SENT, make_probe), 60)

    await engines.start()
    started = len(servers[0].asked)
    servers[0].fault_at = started + call, fault
    with monkeypatch.context() as patch:
        if fault == "hang":
            patch.setattr(engines, "_call", short_wait)
        await update()
    asked = servers[0].asked[started:]
    assert servers[0].fault_at is None and asked[call].startswith(calls[call]), asked
    assert received(servers[1]) and not servers[1].paused and 1 in engines.reports
    if engines.reports.keys() == {1}:
        assert engines.faults["engine_deaths"] == 1
        servers[0].healthy = True
        await engines.repair(SENT, make_probe)
    for _ in range(2):
        assert engines.reports.keys() == {0, 1}
        assert all(map(received, servers)) and not any(s.paused for s in servers)
        for server in servers:
            for worker in server.llm.workers:
                worker.model.loaded = {}
        await update()
    for server in servers:
        names = server.adapters
        assert len({*names}) == len(names) and (len(names) > 2) == (adapter is not None)
        assert server.serves == (names[-1] if names else None)
    await engines.close()
    assert no_sending_thread()


@pytest.mark.spec("async.server-return", "lora.servers")
def test_a_killed_server_has_the_current_adapter_before_it_serves_again() -> None:
    """Killed while it generates, and started anew by someone: it has no adapter then."""
    servers = [Server(f"http://{name}:1", weight_sync="file", adapter=ADAPTER) for name in "ab"]
    engines = EnginePool(servers, transport=send_by_file)

    async def sample(session: str) -> None:
        await engines.generate([1, 2], SamplingParams(), session_id=session, policy_version=1)

    async def go() -> None:
        await engines.start()
        for _ in range(2):
            await engines.update(SENT, make_probe)
        killed, other = servers
        killed.kill()
        for session in "pqrs":
            await sample(session)
        assert engines.faults["engine_deaths"] == 1
        assert {*other.sampled} == {other.adapters[-1]}
        assert killed.sampled == []
        asked = len(killed.asked)
        await engines.repair(SENT, make_probe)
        assert received(killed) and engines.faults["engine_restarts"] == 1
        for session in "tuvw":
            await sample(session)
        after = killed.asked[asked:]
        assert (
            after.index("load_weights_file") < after.index(LOAD_ADAPTER) < after.index(COMPLETIONS)
        )
        # each by the last name, of a version that the process that died has never had
        assert {*killed.sampled} == {killed.adapters[-1]}
        assert len({*killed.adapters}) == len(killed.adapters) == 3
        await engines.close()

    asyncio.run(go())
    assert no_sending_thread()
