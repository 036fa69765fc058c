"""Weights by CUDA IPC from the rank on each worker's GPU, with real processes on both sides."""

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _shared_gpus import DTYPE, ProcessEngine, SharedGpu, make_policy
from _weights import no_sending_thread

from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.vllm_engine import Vllm
from skyrl_fast.rollout.engine.weights.buckets import pack_buckets
from skyrl_fast.rollout.engine.weights.group import IPC, SECONDS, WeightsGroup
from skyrl_fast.rollout.engine.weights.probe import WeightProbe
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transports.broadcast import receive_buckets, send_buckets
from skyrl_fast.rollout.engine.weights.transports.rank_ipc import (
    check_rank_ipc_call,
    open_bytes,
    receive_by_rank_ipc,
    send_by_rank_ipc,
    share_bytes,
)
from skyrl_fast.train.flow.gpu_sharing import ThenMakeRoom
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.parallel.ranks import SINGLE_RANK

NO_GPU_OF_MINE = json.dumps({"GPU-0": [64, 0, "aa", 64, 0, False, "bb", 0, "cc", True]})
BUCKET = 2048  # bytes: most weights are alone in one, of which the largest is the size
send = partial(send_by_rank_ipc, bucket_bytes=BUCKET)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    """Return a policy on two ranks, with GPUs GPU-0 and GPU-1."""
    folder = tmp_path_factory.mktemp("ranks")
    with start_ranks(2, make_policy, cuda=False, starter=LocalRanks(folder)) as ranks:
        yield make_policy(ranks)


def values_of(policy: Policy) -> dict[str, np.ndarray]:
    """Return the bytes of all weights as engines get them by a file."""
    weights = dict(policy.named_weights(DTYPE))
    return {name: value.to(DTYPE).view(torch.uint8).numpy() for name, value in weights.items()}


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def make_probe(engine: Any) -> WeightProbe:
    """Return a probe that all engines pass whose logprobs are 0."""
    answers = [([0.0], 1.0)]
    return WeightProbe(engine, probe=[[1, 2]], trainer_logprobs=lambda _: answers, dtype=DTYPE)


@asynccontextmanager
async def running(*engines: ProcessEngine) -> AsyncIterator[EnginePool]:
    """Start engines, and end their processes."""
    pool = EnginePool(engines, transport=send)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
    assert no_sending_thread()


def handles_of(policy: Policy) -> dict[str, Any]:
    """Return the handles of both ranks."""
    return dict(policy.named_weights(DTYPE).share(DTYPE, BUCKET).handles)


@pytest.mark.spec("async.rank-ipc")
async def test_each_engine_reads_all_weights_of_the_rank_on_its_gpu(policy: Policy) -> None:
    engines = [ProcessEngine("GPU-0"), ProcessEngine("GPU-1")]
    handles = handles_of(policy)
    wanted = values_of(policy)
    async with running(*engines) as pool:
        for _ in range(2):
            await pool.update(policy.named_weights(DTYPE), make_probe)
        for number, engine in enumerate(engines):
            ((opened, values),) = await engine.loaded()
            assert equal(values, wanted)
            # Once in each update, and by the same handle.
            assert opened == [handles[f"GPU-{number}"][2]] * 2
    assert handles["GPU-0"] != handles["GPU-1"]
    num_bytes = sum(value.nbytes for value in wanted.values())
    assert {report.num_bytes for report in pool.reports.values()} == {num_bytes}
    assert policy.outgoing is not None
    assert policy.cuda_ipc.shared == [policy.outgoing.memory.numel()]  # type: ignore[attr-defined]


@pytest.mark.spec("async.rank-ipc")
async def test_workers_of_one_engine_read_different_ranks(policy: Policy) -> None:
    engine = ProcessEngine("GPU-1", "GPU-0")
    handles = handles_of(policy)
    wanted = values_of(policy)
    async with running(engine) as pool:
        await pool.update(policy.named_weights(DTYPE), make_probe)
        for gpu, (opened, values) in zip(engine.gpus, await engine.loaded(), strict=True):
            assert opened == [handles[gpu][2]]
            assert equal(values, wanted)


@pytest.mark.spec("async.rank-ipc")
async def test_a_worker_on_a_gpu_without_a_rank_is_an_error_that_names_both(
    policy: Policy,
) -> None:
    engine = ProcessEngine("GPU-9")
    wanted = r"on a GPU of the trainer's ranks \(GPU-0, GPU-1\), got one on GPU-9"
    sending = send(policy.named_weights(DTYPE), DTYPE)
    async with running(engine):
        with sending as call, pytest.raises(WeightSyncError, match=wanted):
            await asyncio.wait_for(engine.load_weights(call), 60)


@pytest.mark.spec("async.rank-ipc")
async def test_an_engine_that_dies_in_an_update_gets_the_weights_alone_later(
    policy: Policy,
) -> None:
    killed = ProcessEngine("GPU-0", dies_at=4)
    other = ProcessEngine("GPU-1")
    wanted = values_of(policy)
    async with running(killed, other) as pool:
        await asyncio.wait_for(pool.update(policy.named_weights(DTYPE), make_probe), 120)
        assert {*pool.reports} == {1}
        assert pool.faults["engine_deaths"] == 1
        ((_, values),) = await other.loaded()
        assert equal(values, wanted)
        await asyncio.wait_for(pool.repair(policy.named_weights(DTYPE), make_probe), 120)
        assert {*pool.reports} == {0, 1}
        ((opened, values),) = await killed.loaded()
        assert equal(values, wanted)
        assert len(opened) == 1
        ((opened, _),) = await other.loaded()
        assert len(opened) == 1  # it has served meanwhile


# --- what the ranks pack --------------------------------------------------------------------------


def packed(shared: Any) -> dict[str, np.ndarray]:
    """Return the bytes of a pass over the buckets of rank 0."""
    found = {}
    for bucket in shared.pack():
        for name, tensor in bucket.tensors():
            found[name] = tensor.clone().view(torch.uint8).numpy()
    return found


def test_buckets_take_turns_in_memory_that_is_allocated_once(policy: Policy) -> None:
    shared = policy.named_weights(DTYPE).share(DTYPE, BUCKET)
    assert policy.outgoing is not None
    memory = policy.outgoing.memory
    half = memory.numel() // 2
    first = memory.data_ptr()
    places = [bucket.data.data_ptr() - first for bucket in shared.pack()]
    assert len(places) > 4
    assert places == [half * (number % 2) for number in range(len(places))]
    largest = max(value.nbytes for value in values_of(policy).values())
    assert half == max(BUCKET, largest + -largest % 16)
    assert policy.named_weights(DTYPE).share(DTYPE, BUCKET).handles == shared.handles
    assert policy.outgoing.memory is memory


def test_another_pass_ends_the_one_before(policy: Policy) -> None:
    shared = policy.named_weights(DTYPE).share(DTYPE, BUCKET)
    before = shared.pack()
    next(before)
    others = shared.pack()
    first = next(others)
    with pytest.raises(WeightSyncError, match="another one has begun"):
        next(before)  # and takes none of the others' buckets
    names = list(first.infos)
    for bucket in others:
        names += bucket.infos
    assert [name for name, _, _ in names] == [*values_of(policy)]


@pytest.mark.spec("async.rank-ipc")
def test_room_is_made_when_all_weights_are_packed_and_absent_ones_come_from_main_memory(
    policy: Policy,
) -> None:
    wanted = values_of(policy)

    def make_room() -> None:
        room.append(len(found))
        policy.move_to_host()

    room: list[int] = []
    found: dict[str, Any] = {}
    shared = ThenMakeRoom(make_room, policy.named_weights(DTYPE)).share(DTYPE, BUCKET)
    for bucket in shared.pack():
        assert not room
        for name, tensor in bucket.tensors():
            found[name] = tensor.clone().view(torch.uint8).numpy()
    assert room == [len(wanted)]
    assert equal(found, wanted)
    assert policy.idle is not None and not policy.idle.is_loaded
    assert equal(packed(policy.named_weights(DTYPE).share(DTYPE, BUCKET)), wanted)
    policy.move_to_device()


def test_a_single_rank_and_plain_tensors_have_no_buckets() -> None:
    alone = make_policy(SINGLE_RANK).named_weights()
    with pytest.raises(WeightSyncError, match="expected several ranks and a policy without an"):
        send(alone).__enter__()
    with pytest.raises(WeightSyncError, match="expected weights that several ranks gather, got d"):
        send({"w": torch.zeros(1)}).__enter__()


async def test_an_engine_in_no_group_is_refused(policy: Policy) -> None:
    engine = ProcessEngine("GPU-0")
    llm: Any = SimpleNamespace(errored=False, collective_rpc=lambda *_: None)
    engine.vllm = Vllm(llm, dict, dict, None, (ValueError,), KeyError)
    sending = send(policy.named_weights(DTYPE), DTYPE)
    wanted = "expected one of nccl, gloo, ipc at the engine"
    with sending as call, pytest.raises(WeightSyncError, match=wanted):
        await engine.load_weights(call)


# --- the group, and handles -----------------------------------------------------------------------


@pytest.mark.spec("async.rank-ipc")
def test_a_bucket_is_free_when_all_workers_have_copied_it() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    groups = [WeightsGroup(IPC, rank=r, size=3, device=torch.device("cpu")) for r in range(3)]
    connecting = [threading.Thread(target=group.connect, args=(store,)) for group in groups]
    for thread in connecting:
        thread.start()
    for thread in connecting:
        thread.join()
    data = torch.zeros(1)
    trainer, quick, slow = (threading.Thread(target=g.broadcast, args=(data,)) for g in groups)
    trainer.start()
    quick.start()
    trainer.join(0.3)
    assert trainer.is_alive()
    slow.start()
    for thread in (trainer, quick, slow):
        thread.join(30)
        assert not thread.is_alive()


def test_a_handle_is_text_and_opened_on_the_readers_device() -> None:
    cuda = SharedGpu("GPU-0")
    memory = torch.arange(64, dtype=torch.uint8)
    handle = json.loads(json.dumps(share_bytes(memory, cuda)))
    opened = open_bytes(handle, torch.device("cpu"), cuda)
    assert torch.equal(opened, memory)
    memory[3] = 200
    assert opened[3] == 200
    text = json.dumps({"GPU-0": handle})
    assert check_rank_ipc_call([text], [], "127.0.0.1") == [text]
    for wrong in (
        [],
        [text, text],
        [{}],
        ["{}"],
        ["[]"],
        ["{"],
        [json.dumps({"GPU-0": handle[:-1]})],
        [json.dumps({"GPU-0": [-64, *handle[1:]]})],
        [json.dumps({"GPU-0": [63, *handle[1:]]})],
        [json.dumps({"GPU-0": [0, *handle[1:]]})],
        [json.dumps({"GPU-0": [handle[0], True, *handle[2:]]})],
        [json.dumps({"GPU-0": [handle[0], 1 << 80, *handle[2:]]})],
        [json.dumps({"GPU-0": [*handle[:2], "", *handle[3:]]})],
        [json.dumps({"GPU-0": [*handle[:2], "no hex", *handle[3:]]})],
    ):
        assert check_rank_ipc_call(wrong, [], "127.0.0.1") is None, wrong
    assert check_rank_ipc_call([text], [], None) is None


def test_a_pass_that_is_left_holds_no_weights(policy: Policy) -> None:
    before = policy.named_weights(DTYPE).share(DTYPE, BUCKET).pack()
    next(before)
    assert policy.outgoing is not None and policy.outgoing.buckets is not None
    before.close()
    assert policy.outgoing.buckets is None


@pytest.mark.spec("async.rank-ipc")
@pytest.mark.parametrize("fails", ["opening", "copying"])
def test_members_do_not_wait_for_a_worker_that_failed(fails: str) -> None:
    """A call of vLLM's workers ends when the first one does, whichever failed."""
    store = dist.HashStore()
    groups = [WeightsGroup(IPC, rank=rank, size=3, device=torch.device("cpu")) for rank in range(3)]

    def copy(data: torch.Tensor) -> None:
        raise RuntimeError("the GPU is lost")

    def receive(group: WeightsGroup) -> None:
        if group is groups[1]:
            deque(receive_buckets(group, read=lambda data: None), maxlen=0)
        elif fails == "copying":
            deque(receive_buckets(group, read=copy), maxlen=0)
        else:
            deque(receive_by_rank_ipc(NO_GPU_OF_MINE, group, SharedGpu("GPU-9")), maxlen=0)

    def send_all() -> None:
        tensors = [(f"w{number}", torch.ones(100)) for number in range(5)]
        buckets = pack_buckets(tensors, None, device=torch.device("cpu"), bucket_bytes=400)
        send_buckets(groups[0], buckets)

    with ThreadPoolExecutor(3) as pool:
        for joined in [pool.submit(group.connect, store) for group in groups]:
            joined.result()
        started = time.monotonic()
        waiting = [pool.submit(send_all), *(pool.submit(receive, group) for group in groups[1:])]
        faults = [str(one.exception()) for one in waiting]
    assert time.monotonic() - started < SECONDS.ready / 10
    assert all("aborted" in fault for fault in faults[:2])
    assert ("the GPU is lost" if fails == "copying" else "got one on GPU-9") in faults[2]
