"""Weights by CUDA IPC from several ranks: each gathers all of them, on the GPU of its engine.

The trainer has two buckets on each rank's GPU, which the ranks fill together. A worker opens those
on its own GPU, found by UUID, as each process may see the GPUs under other numbers. It copies a
bucket when the trainer says through the `WeightsGroup` that it is full, and is waited for: so a
bucket is filled again once all workers have copied it. Rank 0's copy gives the digests.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from skyrl_fast.rollout.engine.weights.buckets import BUCKET_BYTES, Bucket
from skyrl_fast.rollout.engine.weights.group import WeightsGroup
from skyrl_fast.rollout.engine.weights.prefetch import AHEAD
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transfer import Weights
from skyrl_fast.rollout.engine.weights.transports.broadcast import (
    BroadcastCall,
    BucketSource,
    receive_buckets,
    send_from,
)
from skyrl_fast.rollout.engine.weights.transports.ipc import CUDA, CudaIpc, make_handle

SLOTS = AHEAD + 1  # buckets of a rank: the one that workers copy, and those being filled

# What another process needs to open bytes of a GPU: their number, and how torch shares them.
Handle = Sequence[Any]


@dataclass(frozen=True, slots=True)
class RankBuckets:
    """The buckets of all ranks.

    Args:
        handles: of each rank's memory, which has `SLOTS` buckets of equal sizes, by its GPU's UUID.
        pack: fills buckets on all ranks, one of each in turn, from the start each time; yields
            those of this rank, complete on all of them.
    """

    handles: Mapping[str, Handle]
    pack: Callable[[], Iterator[Bucket]]


@runtime_checkable
class RankWeights(Protocol):
    """Weights that several ranks gather."""

    def share(self, dtype: torch.dtype | None, bucket_bytes: int) -> RankBuckets:
        """Return the ranks' buckets of the weights.

        Args:
            dtype: that floating-point tensors are cast to; None: as they are.
            bucket_bytes: size of a bucket; a larger tensor is one by itself.
        """


@contextmanager
def send_by_rank_ipc(
    weights: Weights, dtype: torch.dtype | None = None, *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[BroadcastCall]:
    """Let all ranks fill buckets on their GPUs, for `BroadcastSender.send`.

    Every engine gets the handles of all ranks, and each of its workers opens that of its GPU.

    Raises:
        WeightSyncError: the weights are none that several ranks gather.
    """
    if not isinstance(weights, RankWeights):
        raise WeightSyncError(
            "weight_sync_backend: ipc: expected weights that several ranks gather, got "
            f"{type(weights).__name__}. Set it to file"
        )
    shared = weights.share(dtype, bucket_bytes)
    handles = json.dumps(shared.handles)
    source = BucketSource(lambda _: shared.pack(), transport="rank_ipc", arguments=[handles])
    with send_from(source) as call:
        yield call


def share_bytes(memory: torch.Tensor, cuda: CudaIpc = CUDA) -> Handle:
    """Return the handle of (bytes,) uint8 on a GPU, as JSON has it."""
    _, _, offset, _, _, *storage = make_handle(memory, cuda)
    values = [value.hex() if isinstance(value, bytes) else value for value in storage]
    return [memory.numel(), offset, *values]


def open_bytes(handle: Handle, device: torch.device, cuda: CudaIpc = CUDA) -> torch.Tensor:
    """Return the memory of a handle, which is on this device."""
    size, offset, shared, total, start, grad, counter, counter_offset, event, waits = handle
    memory = cuda.rebuild(
        torch.Tensor,
        torch.Size([size]),
        (1,),
        offset,
        torch.TypedStorage,
        torch.uint8,
        device.index,  # the other process may have another number for it
        bytes.fromhex(shared),
        total,
        start,
        grad,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        waits,
    )
    assert isinstance(memory, torch.Tensor)
    return memory


def receive_by_rank_ipc(
    text: str, group: WeightsGroup, cuda: CudaIpc = CUDA
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that the rank of this worker's GPU gathers; see `receive_by_broadcast`.

    Raises:
        RuntimeError: no rank has the GPU of the worker, or as by a broadcast.
    """
    try:
        memory = _open_own(read_handles(text), group.device, cuda)
    except BaseException:
        group.give_up()  # the trainer and the other workers wait for this one
        raise
    slots = itertools.cycle(memory.chunk(SLOTS))
    del memory

    def read(data: torch.Tensor) -> None:
        data.copy_(next(slots)[: data.numel()])
        cuda.synchronize()  # the rank fills it again then

    yield from receive_buckets(group, read=read)


def _open_own(handles: Mapping[str, Handle], device: torch.device, cuda: CudaIpc) -> torch.Tensor:
    """Return the memory of the rank on this device's GPU."""
    gpu = cuda.name_gpu(device)
    if gpu not in handles:
        raise RuntimeError(
            "weight_sync_backend=ipc: expected a worker on a GPU of the trainer's ranks "
            f"({', '.join(handles)}), got one on {gpu}"
        )
    return open_bytes(handles[gpu], device, cuda)


def read_handles(text: str) -> dict[str, Handle]:
    """Return handles by UUID; ValueError if the text has none."""
    handles = json.loads(text)
    if isinstance(handles, dict) and handles and all(map(_is_handle, handles.values())):
        return handles
    raise ValueError(f"expected handles of GPU memory by UUID, got {text[:200]}")


def check_rank_ipc_call(
    arguments: list[Any], folders: Sequence[Path], trainer: str | None
) -> list[Any] | None:
    match arguments:
        case [str(text)] if trainer is not None:
            try:
                return [json.dumps(read_handles(text))]
            except (ValueError, RecursionError):
                return None
    return None


def _is_handle(value: Any) -> bool:
    match value:
        case [
            int(size),
            int(offset),
            str(shared),
            int(total),
            int(start),
            False,
            str(counter),
            int(place),
            str(event),
            bool(),
        ]:
            numbers = (size, offset, total, start, place)
            texts = (shared, counter, event)
            is_size = 0 < size <= total and size % SLOTS == 0
            return is_size and all(map(_is_number, numbers)) and all(map(_is_hex, texts))
    return False


def _is_number(value: int) -> bool:
    return not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_hex(text: str) -> bool:
    try:
        return bool(text) and bytes.fromhex(text).hex() == text
    except ValueError:
        return False
