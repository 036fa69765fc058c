"""Only the elements that changed: exact, after any updates, deaths and restarts."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from test_server_broadcast import Server
from test_weight_broadcast import few_seconds, make_sync, needs_vllm, no_sending_thread

from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.weights.bucket import Bucket, Message, packed
from skyrl_fast.rollout.engine.weights.bucket_source import SentWeights
from skyrl_fast.rollout.engine.weights.delta import KeptBuckets, apply, changes
from skyrl_fast.rollout.engine.weights.group import WeightsGroup
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transfer import by_broadcast

__all__ = ["few_seconds"]  # a fixture for all tests here

CPU = torch.device("cpu")
BUCKET = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def bucket_of(weights: dict[str, torch.Tensor]) -> Bucket:
    (bucket,) = packed(weights.items(), None, device=CPU)
    return bucket


# --- a bucket -------------------------------------------------------------------------------------


@pytest.mark.spec("async.weight-delta")
def test_changes_by_hand() -> None:
    before = bucket_of({"w": torch.zeros(40), "b": torch.arange(12, dtype=torch.int64)})
    after = {"w": torch.zeros(40), "b": torch.arange(12, dtype=torch.int64)}
    after["w"][3], after["w"][7], after["b"][5] = 1.5, -0.0, 50
    found = changes(before, bucket_of(after))
    assert found is not None
    counts, data = found
    assert counts == [2, 1]  # the sign of zero counts
    # 2 indices and 2 floats, then an index and an int64, each from a multiple of 16 on
    assert data.numel() == 4 * 16
    assert data[:8].view(torch.int32).tolist() == [3, 7]
    assert data[16:24].view(torch.float32).tolist() == [1.5, -0.0]
    assert data[32:36].view(torch.int32).tolist() == [5]
    assert data[48:56].view(torch.int64).tolist() == [50]


@pytest.mark.spec("async.weight-delta")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.2])
def test_applied_changes_are_the_bits_of_the_next_version(dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 2, (3, 1000), generator=generator)
    before = {"w": numbers.to(dtype), "scalar": numbers[0, 0].to(dtype), "none": torch.zeros(0)}
    after = {name: value.clone() for name, value in before.items()}
    changed = torch.rand(3, 1000, generator=generator) < share
    after["w"][changed] = (1 - numbers[changed]).to(dtype)
    if dtype.is_floating_point and share:
        after["w"][0, :2] = torch.tensor([float("nan"), -0.0], dtype=dtype)
    found = changes(bucket_of(before), bucket_of(after))
    assert found is not None
    result = bucket_of(before)
    apply(result, *found)
    for (name, tensor), (_, wanted) in zip(
        result.tensors(), bucket_of(after).tensors(), strict=True
    ):
        assert torch.equal(bits(tensor), bits(wanted)), name


@pytest.mark.spec("async.weight-delta")
def test_a_bucket_is_sent_completely_where_changes_have_more_bytes_or_tensors_differ() -> None:
    before = {"w": torch.zeros(1000)}
    half, less = torch.zeros(1000), torch.zeros(1000)
    half[::2] = 1.0  # 8 bytes each in place of 4
    less[: 1000 // 2 - 10] = 1.0
    assert changes(bucket_of(before), bucket_of({"w": half})) is None
    assert changes(bucket_of(before), bucket_of({"w": less})) is not None
    assert changes(bucket_of(before), bucket_of({"v": torch.zeros(1000)})) is None
    assert changes(bucket_of(before), bucket_of({"w": torch.zeros(10, 100)})) is None


@pytest.mark.spec("async.weight-delta")
def test_changes_of_another_bucket_are_refused() -> None:
    kept, infos = KeptBuckets(), [["w", "float32", [4]]]
    with pytest.raises(ValueError, match="wanted changes of a bucket that was kept"):
        kept.changed(0, infos, [0], torch.empty(0, dtype=torch.uint8))
    kept.keep(0, bucket_of({"w": torch.zeros(2, 2)}))
    with pytest.raises(ValueError, match="wanted changes of a bucket that was kept"):
        kept.changed(0, infos, [0], torch.empty(0, dtype=torch.uint8))


# --- engines --------------------------------------------------------------------------------------


def start() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed": torch.randn(60, 64, generator=generator),
        "layer.a": torch.randn(2000, generator=generator).bfloat16(),
        "layer.b": torch.randn(33, 7, generator=generator).half(),
        "steps": torch.arange(40),
        "scale": torch.tensor(1.0),
        "w": torch.ones(1),
    }


def step(weights: dict[str, torch.Tensor], draw: random.Random) -> None:
    """Change some elements, a tensor, all, or none."""
    share = draw.choice([0.0, 0.001, 0.02, 0.5, 1.0])
    for name in draw.sample([*weights], draw.randint(1, len(weights))):
        flat = weights[name].view(-1)
        changed = torch.rand(flat.shape[0]) < share
        flat[changed] = torch.randn(int(changed.sum())).mul(100).to(flat.dtype)
        if flat.is_floating_point() and draw.random() < 0.2:
            flat[draw.randrange(len(flat))] = draw.choice([float("nan"), -0.0, float("inf")])


def sent(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights as they are sent."""
    return {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


def num_bytes(weights: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in sent(weights).values())


def holds(server: Server, weights: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(bits(worker.model.loaded[name]), bits(tensor))
        for worker in server.llm.workers
        for name, tensor in sent(weights).items()
    )


@needs_vllm
@pytest.mark.spec("async.weight-delta")
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 20))]
)
def test_engines_have_the_trainers_bits_after_any_updates_and_deaths(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    weights, servers = start(), [Server(f"http://{name}:1", "bfloat16") for name in "abc"]
    transfer = partial(by_broadcast, bucket_bytes=BUCKET, sent=SentWeights())
    pool = EnginePool(servers, transfer=transfer, max_restarts=100)
    modes = set()

    async def go() -> None:
        await pool.start()
        for _ in range(8):
            step(weights, draw)
            if draw.random() < 0.4:
                draw.choice(servers).llm.fault = "dies in a bucket"
            whole = num_bytes(weights)
            await asyncio.wait_for(pool.update(weights, make_sync), 60)
            for number, report in pool.reports.items():
                assert holds(servers[number], weights)
                modes.add(report.num_bytes < whole)
            if draw.random() < 0.3:
                await asyncio.wait_for(pool.repair(weights, make_sync), 60)
        await pool.update(weights, make_sync)
        await pool.update(weights, make_sync)
        await pool.close()

    asyncio.run(go())
    assert all(holds(server, weights) for server in servers)
    assert [report.num_bytes for report in pool.reports.values()] == [0, 0, 0]
    assert modes == {True, False}
    assert no_sending_thread()


@needs_vllm
@pytest.mark.spec("async.weight-delta")
def test_an_engine_that_is_restarted_gets_all_and_the_others_what_changed() -> None:
    weights, servers = start(), [Server(f"http://{name}:1", "bfloat16") for name in "ab"]
    transfer = partial(by_broadcast, bucket_bytes=BUCKET, sent=SentWeights())
    pool = EnginePool(servers, transfer=transfer)
    sizes = []

    async def go() -> None:
        await pool.start()
        for fault in ("", "dies in a bucket", "", ""):
            weights["embed"][0, :3] += 1.0
            servers[0].llm.fault = fault
            await pool.update(weights, make_sync)
            sizes.append({number: r.num_bytes for number, r in sorted(pool.reports.items())})
        await pool.close()

    asyncio.run(go())
    whole = num_bytes(weights)
    assert sizes == [{0: whole, 1: whole}, {1: 32}, {0: whole, 1: 32}, {0: 32, 1: 32}]
    assert all(holds(server, weights) for server in servers)


def dropped(messages: list[Message]) -> list[Message]:
    return messages[1:]


def truncated(messages: list[Message]) -> list[Message]:
    first = messages[0]
    assert first.counts is not None
    (only,) = [count for count in first.counts if count]
    counts = [count and count - 1 for count in first.counts]
    return [replace(first, counts=counts, data=cut(first.data, only)), *messages[1:]]


def cut(data: torch.Tensor, count: int) -> torch.Tensor:
    """Return the changes without the last of `count`, of four bytes each."""
    kept = 4 * (count - 1)
    size = kept + -kept % 16
    values = data[data.numel() // 2 :]
    return torch.cat([data[:size], values[:size]])


def other_places(messages: list[Message]) -> list[Message]:
    messages[0].data[:4].view(torch.int32)[0] += 1
    return messages


def other_values(messages: list[Message]) -> list[Message]:
    messages[0].data[-16:].view(torch.int32)[0] ^= 1
    return messages


def swapped(messages: list[Message]) -> list[Message]:
    first, second = messages[:2]
    return [replace(first, data=second.data), replace(second, data=first.data), *messages[2:]]


BREAK: dict[str, Any] = {
    "dropped": dropped,
    "truncated": truncated,
    "other places": other_places,
    "other values": other_values,
    "swapped": swapped,
}


@needs_vllm
@pytest.mark.spec("async.weight-delta", "sync.receipts")
@pytest.mark.parametrize("fault", BREAK)
def test_broken_changes_are_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    send = WeightsGroup.send
    weights = {"w": torch.zeros(2000), "v": torch.zeros(2000)}
    server = Server()
    transfer = partial(by_broadcast, bucket_bytes=BUCKET, sent=SentWeights())
    pool = EnginePool([server], transfer=transfer)

    def broken(self: WeightsGroup, messages: Any) -> None:
        found = [replace(one, data=one.data.clone()) for one in messages]
        assert [one.counts for one in found] == [[5], [5]]
        send(self, BREAK[fault](found))

    async def go() -> None:
        await pool.start()
        await pool.update(weights, make_sync)
        weights["w"][10:20:2] = 1.0
        weights["v"][30:40:2] = 2.0
        monkeypatch.setattr(WeightsGroup, "send", broken)
        await pool.update(weights, make_sync)

    wanted = "did not receive: w|other values than the trainer's: [vw]|bucket that was kept"
    with pytest.raises((WeightSyncError, EngineDeadError), match=wanted):
        asyncio.run(go())
    assert no_sending_thread()


@needs_vllm
@pytest.mark.spec("async.weight-delta")
def test_after_a_gather_that_failed_all_is_sent() -> None:
    weights, server, last = start(), Server(dtype="bfloat16"), SentWeights()
    with (
        pytest.raises(KeyError, match="layer"),
        by_broadcast(Failing(weights), None, bucket_bytes=BUCKET, sent=last) as call,
    ):
        assert call.buckets is not None
        list(call.buckets.on(CPU))
    assert last.version is None
    pool = EnginePool([server], transfer=partial(by_broadcast, sent=last))

    async def go() -> None:
        await pool.start()
        await pool.update(weights, make_sync)
        await pool.close()

    asyncio.run(go())
    assert holds(server, weights)


class Failing:
    """Weights whose gather fails in the middle."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights

    def __iter__(self) -> Any:
        yield from [*self._weights.items()][:3]
        raise KeyError("layer")
