"""Weights by a broadcast: buckets, order, and peers that die, are stuck or refuse."""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _listening import LOOPBACK as LOOPBACK_HEX
from _listening import listening
from _weights import CPU, ScriptedEngine, no_sending_thread

from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.weights import group as weights_group
from skyrl_fast.rollout.engine.weights.buckets import Bucket, pack_buckets, read_header
from skyrl_fast.rollout.engine.weights.group import (
    LOOPBACK,
    GroupSeconds,
    WeightsGroup,
    listening_store,
    store_at,
)
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError, tensor_digest
from skyrl_fast.rollout.engine.weights.transports import broadcast as broadcast
from skyrl_fast.rollout.engine.weights.transports.broadcast import (
    receive_by_broadcast,
    send_buckets,
    send_by_broadcast,
)


def all_buckets(weights: dict[str, torch.Tensor]) -> list[Bucket]:
    return list(pack_buckets(weights.items(), None, device=CPU, bucket_bytes=BUCKET))


WEIGHTS = {
    "a": torch.linspace(-1, 1, 300).reshape(30, 10),  # larger than a bucket
    "b": torch.arange(3),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "c": torch.linspace(0, 1, 7),
    "d": torch.tensor([True, False, True]),
}
BUCKET = 64


def connected(size: int, **options: Any) -> list[WeightsGroup]:
    """Return the members of a group, the trainer first, all in this process."""
    groups = [WeightsGroup("gloo", rank=r, size=size, device=CPU, **options) for r in range(size)]
    store, port = listening_store()
    threads = [
        threading.Thread(target=group.connect, args=(store_at(LOOPBACK, port),))
        for group in groups[1:]
    ]
    for thread in threads:
        thread.start()
    groups[0].connect(store)
    for thread in threads:
        thread.join()
    return groups


@pytest.mark.spec("async.weight-broadcast")
def test_all_workers_receive_the_cast_tensors_in_order() -> None:
    trainer, *workers = connected(3)
    with send_by_broadcast(WEIGHTS, torch.bfloat16, bucket_bytes=BUCKET) as call:
        assert (call.method, call.arguments) == ("load_weights_broadcast", [])
        received: list[Any] = [None, None]

        def receive(worker: int) -> None:
            received[worker] = list(receive_by_broadcast(workers[worker]))

        threads = [threading.Thread(target=receive, args=(worker,)) for worker in range(2)]
        for thread in threads:
            thread.start()
        send_buckets(trainer, call.buckets)
        for thread in threads:
            thread.join()
        assert call.sent.num_bytes == 600 + 24 + 2 + 0 + 14 + 3
    for worker in received:
        assert [name for name, _ in worker] == [*WEIGHTS]
        assert {name: tensor_digest(tensor) for name, tensor in worker} == call.sent.digests
        found = dict(worker)
        assert torch.equal(found["a"], WEIGHTS["a"].bfloat16())
        assert torch.equal(found["b"], WEIGHTS["b"]) and float(found["scalar"]) == 2.5
    assert listening(os.getpid()) <= {LOOPBACK_HEX}


def test_a_worker_receives_the_next_bucket_while_it_loads_one() -> None:
    trainer, worker = connected(2)
    sent = [threading.Event() for _ in range(4)]

    def messages() -> Iterator[Bucket]:
        for message, event in zip(all_buckets(WEIGHTS), sent, strict=False):
            yield message
            event.set()

    sending = threading.Thread(target=lambda: send_buckets(trainer, messages()))
    sending.start()
    receiving = receive_by_broadcast(worker)
    name, _ = next(receiving)
    assert name == "a" and sent[1].wait(60)  # "a" is a bucket
    assert [name for name, _ in receiving] == [*WEIGHTS][1:]
    sending.join(60)
    assert [event.is_set() for event in sent] == [True, True, True, False]


@pytest.mark.parametrize(
    "infos",
    [
        [["w", "load", [2]]],  # a function of torch
        [["w", "float32", [-1]]],
        [["w", "float32", [True]]],
        [["w", "float32", [1] * 9]],
        [["w", "float32"]],
        ["w"],
        {"w": 1},
        "w",
    ],
)
def test_workers_receive_names_dtypes_and_shapes_only(infos: Any) -> None:
    sent = [["w", "bfloat16", [2, 3]], ["s", "float32", []]]
    assert read_header(Bucket(sent, torch.empty(0)).header()) == sent
    with pytest.raises(ValueError, match="expected names, dtypes and shapes"):
        read_header(json.dumps(infos))


def test_buckets_are_limited_and_their_tensors_aligned() -> None:
    buckets = list(pack_buckets(WEIGHTS.items(), None, device=CPU, bucket_bytes=BUCKET))
    names = [[name for name, _, _ in bucket.infos] for bucket in buckets]
    # 1200 bytes; 24 -> 32, 4 -> 16, 0, and 28 -> 32 would be too many; 28 -> 32, 3 -> 16
    assert names == [["a"], ["b", "scalar", "empty"], ["c", "d"]]
    assert [bucket.data.numel() for bucket in buckets] == [1200, 48, 48]
    addresses = [tensor.data_ptr() for _, tensor in buckets[2].tensors()]
    assert addresses[1] - addresses[0] == 32
    assert list(pack_buckets([], None, device=CPU)) == []


def test_tied_weights_are_sent_once() -> None:
    tied = torch.ones(3)
    with send_by_broadcast({"embed": tied, "head": tied.detach()}, None) as call:
        (bucket,) = call.buckets
        assert bucket.infos == [["embed", "float32", [3]]]
    with (
        pytest.raises(WeightSyncError, match="no weights to hand over"),
        send_by_broadcast({}, None) as call,
    ):
        list(call.buckets)


def test_a_worker_that_does_not_receive_is_an_error_in_time() -> None:
    trainer, worker = connected(2, seconds=GroupSeconds(ready=0.5))
    large = {"w": torch.zeros(4 << 20)}  # more than the sockets hold
    with pytest.raises(
        TimeoutError, match=r"weight_sync_backend=gloo: ranks \[1\] of 2 .* within 0\.5 s"
    ):
        send_buckets(trainer, all_buckets(large))
    with pytest.raises(RuntimeError, match="aborted"):  # it ends at once, too
        next(receive_by_broadcast(worker))


def test_nccl_raises_before_its_watchdog_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake of torch's class: NCCL needs a GPU for each member."""
    events: list[Any] = []
    store = torch.distributed.HashStore()
    for meeting in (1, 2, 3):  # to join, to connect, and for the bucket
        for worker in (1, 2):
            store.set(f"{worker} at {meeting}", "")

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            events.append((store, rank, size, options._timeout.total_seconds()))

        def broadcast(self, data: torch.Tensor, root: int) -> Any:
            events.extend([data.dtype, root])
            return SimpleNamespace(is_completed=lambda: len(events) < 4, wait=events.append)

        def abort(self) -> None:
            events.append("abort")

    monkeypatch.setattr(weights_group.dist, "ProcessGroupNCCL", Nccl, raising=False)
    seconds = GroupSeconds(move=0.1)
    group = WeightsGroup("nccl", rank=0, size=3, device=CPU, seconds=seconds)
    group.connect(store)
    # With a time-out, or it would not wait for the GPU.
    assert events == [(store, 0, 3, 0.2), torch.uint8, 0, timedelta(seconds=0.1)]
    with pytest.raises(TimeoutError, match=r"weight_sync_backend=nccl: .* within 0\.1 s"):
        send_buckets(group, all_buckets(WEIGHTS))
    assert events[-1] == "abort"
    group.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        send_buckets(group, all_buckets(WEIGHTS))


# --- members that do not come ---------------------------------------------------------------------


def test_members_that_do_not_come_are_named() -> None:
    soon = GroupSeconds(join=0.1)
    store, _ = listening_store()
    store.set("2 at 1", "")
    with pytest.raises(
        TimeoutError, match=r"=gloo: ranks \[1, 3\] of 4 .* not ready .* within 0\.1 s"
    ):
        WeightsGroup("gloo", rank=0, size=4, device=CPU, seconds=soon).connect(store)
    with pytest.raises(RuntimeError, match="aborted"):  # one that comes later
        WeightsGroup("gloo", rank=1, size=4, device=CPU, seconds=soon).connect(store)


def test_a_member_that_dies_while_it_connects_is_an_error() -> None:
    seconds = GroupSeconds(move=0.5)
    store = torch.distributed.HashStore()
    store.set("1 at 1", "")
    with pytest.raises(RuntimeError, match="timeout"):
        WeightsGroup("gloo", rank=0, size=2, device=CPU, seconds=seconds).connect(store)


def test_a_worker_that_refuses_ends_the_wait_of_all() -> None:
    async def go() -> threading.Thread:
        sender = broadcast.BroadcastSender("gloo", num_workers=2)
        _, _, port, size = sender.join_arguments
        other = WeightsGroup("gloo", rank=1, size=size, device=CPU)
        joining = threading.Thread(
            target=errors_of, args=(other.connect, store_at(LOOPBACK, port), errors)
        )
        joining.start()

        async def refuse() -> None:
            raise ValueError("no such backend")

        with pytest.raises(ValueError, match="no such backend"):
            await sender.connect(refuse())
        return joining

    def errors_of(call: Any, argument: Any, errors: list[str]) -> None:
        try:
            call(argument)
        except RuntimeError as error:
            errors.append(str(error))

    errors: list[str] = []
    joining = asyncio.run(go())
    joining.join(60)
    assert errors == ["the broadcast of weights was aborted"]
    assert no_sending_thread()


FAILED_JOIN = """
import asyncio
from skyrl_fast.rollout.engine.weights.transports.broadcast import BroadcastSender

async def go():
    try:
        async with asyncio.timeout(0.1):
            await BroadcastSender("gloo", num_workers=1).connect(asyncio.sleep(600))
    except TimeoutError:
        print("left")

asyncio.run(go())
"""


def test_a_process_ends_after_a_join_that_failed() -> None:
    result = subprocess.run(
        [sys.executable, "-c", FAILED_JOIN], capture_output=True, text=True, timeout=100
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "left\n", "")


# --- with the engine and the worker's extension --------------------------------------------------


SENT = {"w": torch.ones(1), "large": torch.linspace(0, 1, 8 << 20)}


async def load(engine: ScriptedEngine) -> None:
    await engine.start()
    with send_by_broadcast(SENT) as call:
        await engine.load_weights(call)


def test_workers_that_hang_count_as_dead() -> None:
    engine = ScriptedEngine(seconds=GroupSeconds(ready=0.5, notice=0.1))

    async def go() -> None:
        await engine.start()
        engine.llms[0].fault = "hangs"
        with send_by_broadcast(SENT, None) as call:
            await engine.load_weights(call)

    with pytest.raises(
        EngineDeadError, match=r"did not load weights: TimeoutError: .* within 0\.5 s"
    ):
        asyncio.run(go())


def test_an_engine_without_a_group_refuses_a_broadcast() -> None:
    with pytest.raises(
        WeightSyncError, match="expected one of nccl, gloo, ipc at the engine's start"
    ):
        asyncio.run(load(ScriptedEngine("file")))


# --- two processes -------------------------------------------------------------------------------


def receive_one_bucket(port: int, kill: bool, results: Any) -> None:
    """Receive as a worker in another process, which may die in the middle."""
    group = WeightsGroup("gloo", rank=1, size=2, device=CPU)
    group.connect(store_at(LOOPBACK, port))
    found = {}
    for name, tensor in receive_by_broadcast(group):
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        found[name] = tensor_digest(tensor)
    results.send(found)


@pytest.mark.parametrize("kill", [False, True], ids=["lives", "killed"])
def test_two_processes(kill: bool) -> None:
    weights = {**WEIGHTS, "large": torch.ones(8 << 20)}
    store, port = listening_store()
    with send_by_broadcast(weights, torch.bfloat16, bucket_bytes=BUCKET) as call:
        spawn = multiprocessing.get_context("spawn")
        results, there = spawn.Pipe(duplex=False)
        arguments = (port, kill, there)
        process = spawn.Process(target=receive_one_bucket, args=arguments, daemon=True)
        process.start()
        there.close()
        # If it is killed: there is no engine that notices the death.
        seconds = GroupSeconds(ready=1.0 if kill else 60.0)
        group = WeightsGroup("gloo", rank=0, size=2, device=CPU, seconds=seconds)
        group.connect(store)
        if kill:
            with pytest.raises((RuntimeError, TimeoutError), match=r"by peer|ranks \[1\]"):
                send_buckets(group, call.buckets)
        else:
            send_buckets(group, call.buckets)
            assert results.recv() == call.sent.digests
        process.join(30)
        assert process.exitcode == (-signal.SIGKILL if kill else 0)
