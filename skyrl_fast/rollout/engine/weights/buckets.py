"""Buckets: tensors packed one after another, as they are broadcast.

One broadcast of 128 MiB in place of hundreds of small ones; what a worker needs to unpack it, its
header, goes through the group's store.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skyrl_fast.rollout.engine.weights.receipt import dtype_name

# Name, dtype and shape of a tensor.
TensorInfo = Sequence[Any]

BUCKET_BYTES = 128 << 20  # size of a bucket; a larger tensor is one by itself
ALIGNMENT = 16  # bytes; of the tensors in a bucket
MAX_DIMENSIONS = 8  # dimensions of a tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Several tensors packed into one byte buffer; `data` is (bytes,) uint8."""

    infos: list[TensorInfo]
    data: torch.Tensor

    @classmethod
    def empty(cls, infos: list[TensorInfo], device: torch.device) -> Bucket:
        size = sum(map(_num_bytes, infos))
        return cls(infos, torch.empty(size, dtype=torch.uint8, device=device))

    @classmethod
    def within(cls, memory: torch.Tensor, infos: list[TensorInfo]) -> Bucket:
        size = sum(map(_num_bytes, infos))
        assert size <= memory.numel()
        return cls(infos, memory[:size])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors by name, which share the bucket's memory."""
        start = 0
        for info in self.infos:
            name, _, shape = info
            size = torch.Size(shape).numel() * dtype_of(info).itemsize
            yield name, self.data[start : start + size].view(dtype_of(info)).view(shape)
            start += align_up(size)

    def header(self) -> str:
        return json.dumps(self.infos)


def pack_buckets(
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None,
    *,
    device: torch.device,
    bucket_bytes: int = BUCKET_BYTES,
    slots: Sequence[torch.Tensor] = (),
) -> Iterator[Bucket]:
    """Yield all tensors in buckets, in their order; floating-point ones cast to `dtype`, if any.

    Args:
        slots: memory of the buckets, in turn, (bytes,) uint8; none: each has new memory.
    """
    turns = itertools.cycle(slots)
    for group in _group_tensors(weights, dtype, bucket_bytes):
        infos = [info for info, _ in group]
        if slots:
            bucket = Bucket.within(next(turns), infos)
        else:
            bucket = Bucket.empty(infos, device)
        _pack(group, bucket)
        yield bucket
        del bucket


def _pack(group: list[tuple[TensorInfo, torch.Tensor]], bucket: Bucket) -> None:
    """Copy these tensors to a bucket; the list is empty then, so that they can be freed."""
    for (_, view), (_, tensor) in zip(bucket.tensors(), group, strict=True):
        view.copy_(tensor)
    group.clear()


def _group_tensors(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, most_bytes: int
) -> Iterator[list[tuple[TensorInfo, torch.Tensor]]]:
    group: list[tuple[TensorInfo, torch.Tensor]] = []
    total = 0
    for name, tensor in weights:
        if dtype is not None and tensor.is_floating_point():
            sent = dtype
        else:
            sent = tensor.dtype
        info = [name, dtype_name(sent), list(tensor.shape)]
        size = _num_bytes(info)
        if group and total + size > most_bytes:
            yield group
            group = []
            total = 0
        group.append((info, tensor))
        total += size
    if group:
        yield group


def read_header(text: str) -> list[TensorInfo]:
    """Return the infos of `Bucket.header`; ValueError if the text is none."""
    match json.loads(text):
        case [*infos] if all(map(_is_tensor_info, infos)):
            return infos
    raise ValueError(f"expected names, dtypes and shapes of tensors, got {text[:200]}")


def _is_tensor_info(info: Any) -> bool:
    match info:
        case [str(), str(dtype), list(shape)]:
            # From the network: `getattr` must not return a function of torch.
            sizes = all(type(size) is int and size >= 0 for size in shape)
            known = isinstance(getattr(torch, dtype, None), torch.dtype)
            return sizes and known and len(shape) <= MAX_DIMENSIONS
    return False


def dtype_of(info: TensorInfo) -> torch.dtype:
    dtype = getattr(torch, info[1])
    assert isinstance(dtype, torch.dtype)
    return dtype


def align_up(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT


def _num_bytes(info: TensorInfo) -> int:
    return align_up(torch.Size(info[2]).numel() * dtype_of(info).itemsize)
