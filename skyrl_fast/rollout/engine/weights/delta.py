"""What changed in a bucket: flat int32 indices and new values of each tensor, as in vLLM's patches.

After a small optimizer step most weights are the same bits in bfloat16. Values replace others and
are not added, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from skyrl_fast.rollout.engine.weights.bucket import Bucket, TensorInfo, aligned, dtype_of

INDEX = torch.int32
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def changes(before: Bucket, after: Bucket) -> tuple[list[int], torch.Tensor] | None:
    """Return the number of changed elements of each tensor, and their indices and values.

    None if the bucket itself has fewer bytes, or other tensors than before.

    Args:
        before: on any device.
        after: on the device of the result, (bytes,) uint8.
    """
    if before.infos != after.infos:
        return None
    old = Bucket(before.infos, before.data.to(after.data.device))
    tensors = [_bits(tensor) for _, tensor in after.tensors()]
    masks = [_bits(one) != other for (_, one), other in zip(old.tensors(), tensors, strict=True)]
    counts = [int(torch.count_nonzero(mask)) for mask in masks]
    size = _num_bytes(after.infos, counts)
    largest = max((tensor.numel() for tensor in tensors), default=0)
    if size >= after.data.numel() or largest > torch.iinfo(INDEX).max:
        return None
    data = empty_changes(after.infos, counts, after.data.device)
    parts = _parts(after.infos, counts, data)
    for tensor, mask, (indices, values) in zip(tensors, masks, parts, strict=True):
        if indices.numel():
            changed = mask.nonzero()[:, 0]
            indices.copy_(changed)
            values.copy_(tensor[changed])
    return counts, data


def apply(bucket: Bucket, counts: Sequence[int], data: torch.Tensor) -> None:
    """Change the elements of a bucket to those that `changes` returned; on one device."""
    parts = _parts(bucket.infos, counts, data)
    for (_, tensor), (indices, values) in zip(bucket.tensors(), parts, strict=True):
        _bits(tensor)[indices.long()] = values


def empty_changes(
    infos: Sequence[TensorInfo], counts: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return memory for so many changed elements of each tensor."""
    return torch.empty(_num_bytes(infos, counts), dtype=torch.uint8, device=device)


class KeptBuckets:
    """The last version of all buckets, in main memory."""

    def __init__(self) -> None:
        self._buckets: dict[int, Bucket] = {}

    def get(self, number: int) -> Bucket | None:
        """Return a bucket."""
        return self._buckets.get(number)

    def keep(self, number: int, bucket: Bucket) -> None:
        """Keep a bucket in place of the one with this number; on a CPU its memory is shared."""
        self._buckets[number] = Bucket(bucket.infos, bucket.data.cpu())

    def changed(
        self, number: int, infos: list[TensorInfo], counts: Sequence[int], data: torch.Tensor
    ) -> Bucket:
        """Apply changes to a bucket; return it on the device of `data`.

        Raises:
            ValueError: it has other tensors.
        """
        kept = self._buckets.get(number)
        if kept is None or kept.infos != infos:
            raise ValueError(f"wanted changes of a bucket that was kept, got those of {infos[:3]}")
        apply(kept, counts, data.cpu())
        return Bucket(infos, kept.data.to(data.device))


def _parts(
    infos: Sequence[TensorInfo], counts: Sequence[int], data: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield indices and values of each tensor, which share the memory of `data`."""
    start = 0
    for info, count in zip(infos, counts, strict=True):
        found = []
        for dtype in (INDEX, _BITS[dtype_of(info).itemsize]):
            size = count * dtype.itemsize
            found.append(data[start : start + size].view(dtype))
            start += aligned(size)
        yield found[0], found[1]


def _num_bytes(infos: Sequence[TensorInfo], counts: Sequence[int]) -> int:
    return sum(
        aligned(count * INDEX.itemsize) + aligned(count * dtype_of(info).itemsize)
        for info, count in zip(infos, counts, strict=True)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flat tensor as integers: NaN and the sign of zero count."""
    return tensor.view(-1).view(_BITS[tensor.dtype.itemsize])
