"""All weights in buckets on every rank's GPU, where the rank's engine reads them by CUDA IPC.

The ranks gather a layer together, and each packs what it has gathered: the same bytes. A bucket is
one call on all ranks, between which rank 0 makes other calls.

Design: docs/design/020-several-gpus.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from skyrl_fast.rollout.engine.weights.buckets import Bucket, TensorInfo, align_up, pack_buckets
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.tensor_file import num_bytes
from skyrl_fast.rollout.engine.weights.transfer import distinct_tensors
from skyrl_fast.rollout.engine.weights.transports.rank_ipc import (
    SLOTS,
    Handle,
    RankBuckets,
    share_bytes,
)
from skyrl_fast.train.parallel.export import checkpoint_names
from skyrl_fast.train.parallel.ranks import RankError, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import cast_weight, full_weight, weights_of
from skyrl_fast.train.parallel.traffic import ENGINE


@dataclass(slots=True)
class OutgoingBuckets:
    """The buckets of this rank, until the process ends.

    torch never frees memory whose reader has died before it has given it back, so that buckets of
    each sync would add up.

    Args:
        memory: (bytes,) uint8, of `SLOTS` buckets.
        handle: by which other processes open it.
        number: of the pass over all weights whose buckets are made.
    """

    memory: torch.Tensor
    handle: Handle
    number: int = 0
    buckets: Iterator[Bucket] | None = None


def share_buckets(
    owner: Any,
    infos: Sequence[TensorInfo],
    *,
    dtype: torch.dtype | None,
    groups: Sequence[Sequence[str]],
    bucket_bytes: int,
) -> RankBuckets:
    """Return the ranks' buckets of a policy's weights.

    Args:
        infos: what is going to be sent.
        dtype: that floating-point tensors are cast to; None: as they are.
        groups: names of weights that are gathered together, such as a layer's.
        bucket_bytes: size of a bucket; a larger tensor is one by itself.
    """
    largest = max(align_up(num_bytes([info])) for info in infos)
    handles = _allocate(owner, max(bucket_bytes, largest))

    def pack() -> Iterator[Bucket]:
        number = _begin(owner, dtype, groups, bucket_bytes)
        try:
            while (bucket := _next_of(owner, number)) is not None:
                yield bucket
                del bucket
        finally:
            with suppress(RankError):  # ranks that have ended hold nothing
                _drop(owner, number)

    return RankBuckets(dict(handles), pack)


@run_on_all_ranks
def _allocate(owner: Any, slot_bytes: int) -> list[tuple[str, Handle]]:
    """Allocate buckets where there are none; return the UUID and the handle of each rank's."""
    cuda = owner.cuda_ipc
    outgoing = owner.outgoing
    size = SLOTS * align_up(slot_bytes)
    if outgoing is None or outgoing.memory.numel() < size:
        if owner.device.type == "cuda":
            # A part of a larger block would keep that block as long as the buckets exist.
            torch.cuda.empty_cache()
        memory = torch.empty(size, dtype=torch.uint8, device=owner.device)
        number = 0 if outgoing is None else outgoing.number
        outgoing = owner.outgoing = OutgoingBuckets(memory, share_bytes(memory, cuda), number)
    return owner.ranks.gather([(cuda.name_gpu(owner.device), outgoing.handle)], from_each=True)


@run_on_all_ranks
def _begin(
    owner: Any, dtype: torch.dtype | None, groups: Sequence[Sequence[str]], bucket_bytes: int
) -> int:
    """Begin a pass over all weights, which ends the one before; return its number."""
    outgoing = owner.outgoing
    outgoing.number += 1
    outgoing.buckets = pack_buckets(
        distinct_tensors(_gathered(owner, dtype, groups)),
        dtype,
        device=owner.device,
        bucket_bytes=bucket_bytes,
        slots=outgoing.memory.chunk(SLOTS),
    )
    return int(outgoing.number)


def _next_of(owner: Any, number: int) -> Bucket | None:
    """Return the next bucket of a pass when all ranks have filled it. None: there is none left.

    Raises:
        WeightSyncError: another pass has begun, which has the buckets.
    """
    current, bucket = _fill_next(owner, number)
    if current != number:
        raise WeightSyncError(
            f"weight_sync_backend: ipc: expected pass {number} over the weights, got {current}: "
            "another one has begun"
        )
    return bucket


@run_on_all_ranks
def _fill_next(owner: Any, number: int) -> tuple[int, Bucket | None]:
    """Fill the next bucket, if the pass is the newest; return the newest, and the bucket."""
    outgoing = owner.outgoing
    bucket: Bucket | None = None
    if outgoing.buckets is not None and outgoing.number == number:
        bucket = next(outgoing.buckets, None)
    owner.cuda_ipc.synchronize()  # readers do not wait for this process's streams
    owner.ranks.gather([])
    return outgoing.number, bucket


@run_on_all_ranks
def _drop(owner: Any, number: int) -> None:
    """Free what a pass holds that has not reached its end: a layer, and tensors to be packed."""
    outgoing = owner.outgoing
    if outgoing.number == number:
        outgoing.buckets = None


def _gathered(
    owner: Any, dtype: torch.dtype | None, groups: Sequence[Sequence[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all full weights under the names of a checkpoint, a group at a time, on every rank."""
    weights = dict(weights_of(owner.root))
    for names in groups:
        layer = {}
        for name in names:
            # Without a name, which would hold it while the next one is gathered.
            layer[name] = cast_weight(
                full_weight(weights[name], owner.ranks, ENGINE, owner.idle), dtype
            )
        layer = checkpoint_names(owner.model, layer)
        while layer:
            name = next(iter(layer))
            yield name, layer.pop(name)
