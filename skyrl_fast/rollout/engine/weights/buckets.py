"""Buckets: tensors packed one after another, as they are broadcast."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skyrl_fast.rollout.engine.weights.digest import dtype_name

# Of a tensor: its name, dtype and shape.
TensorInfo = Sequence[Any]

BUCKET_BYTES = 128 << 20  # of a bucket; a larger tensor is one by itself
ALIGNMENT = 16  # bytes; of the tensors in a bucket
MAX_DIMENSIONS = 8  # of a tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors in one.

    Args:
        infos: of each.
        data: (bytes,) uint8.
    """

    infos: list[TensorInfo]
    data: torch.Tensor

    @classmethod
    def empty(cls, infos: list[TensorInfo], device: torch.device) -> Bucket:
        """Return a bucket without values for these tensors."""
        size = sum(map(_num_bytes, infos))
        return cls(infos, torch.empty(size, dtype=torch.uint8, device=device))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors by name, which share the bucket's memory."""
        start = 0
        for info in self.infos:
            name, _, shape = info
            size = torch.Size(shape).numel() * dtype_of(info).itemsize
            yield name, self.data[start : start + size].view(dtype_of(info)).view(shape)
            start += aligned(size)

    def header(self) -> str:
        """Return what a worker needs to receive the bucket."""
        return json.dumps(self.infos)


def packed(
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None,
    *,
    device: torch.device,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[Bucket]:
    """Yield all tensors in buckets, in their order.

    Args:
        dtype: that floating-point tensors are cast to; None: as they are.
        device: of the buckets.
        bucket_bytes: at most, unless it is one tensor.
    """
    for group in _groups(weights, dtype, bucket_bytes):
        yield _pack(group, device)


def _pack(group: list[tuple[TensorInfo, torch.Tensor]], device: torch.device) -> Bucket:
    """Return a bucket with these tensors; the list is empty then, so that they can be freed."""
    bucket = Bucket.empty([info for info, _ in group], device)
    for (_, view), (_, tensor) in zip(bucket.tensors(), group, strict=True):
        view.copy_(tensor)
    group.clear()
    return bucket


def _groups(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, most_bytes: int
) -> Iterator[list[tuple[TensorInfo, torch.Tensor]]]:
    group: list[tuple[TensorInfo, torch.Tensor]] = []
    total = 0
    for name, tensor in weights:
        sent = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        info = [name, dtype_name(sent), list(tensor.shape)]
        size = _num_bytes(info)
        if group and total + size > most_bytes:
            yield group
            group, total = [], 0
        group.append((info, tensor))
        total += size
    if group:
        yield group


def read_header(text: str) -> list[TensorInfo]:
    """Return the infos of `Bucket.header`.

    Raises:
        ValueError: the text is none.
    """
    match json.loads(text):
        case [*infos] if all(map(_is_tensor_info, infos)):
            return infos
    raise ValueError(f"expected names, dtypes and shapes of tensors, got {text[:200]}")


def _is_tensor_info(info: Any) -> bool:
    match info:
        case [str(), str(dtype), list(shape)]:
            sizes = all(type(size) is int and size >= 0 for size in shape)
            known = isinstance(getattr(torch, dtype, None), torch.dtype)
            return sizes and known and len(shape) <= MAX_DIMENSIONS
    return False


def dtype_of(info: TensorInfo) -> torch.dtype:
    """Return the dtype of a tensor."""
    found = getattr(torch, info[1])
    assert isinstance(found, torch.dtype)
    return found


def aligned(num_bytes: int) -> int:
    """Return the bytes from the start of something in a bucket to that of the next."""
    return num_bytes + -num_bytes % ALIGNMENT


def _num_bytes(info: TensorInfo) -> int:
    return aligned(torch.Size(info[2]).numel() * dtype_of(info).itemsize)
