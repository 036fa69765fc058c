"""The buckets of a weight update, made once for all engines that load them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from skyrl_fast.rollout.engine.weights.buckets import Bucket, packed
from skyrl_fast.rollout.engine.weights.digest import tensor_digest
from skyrl_fast.rollout.engine.weights.prefetch import Prefetch, Reader
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transports.file import distinct_tensors


@dataclass(frozen=True, slots=True)
class _Made:
    """A bucket, and the bytes of its tensors, without what aligns them."""

    bucket: Bucket
    num_bytes: int


class BucketSource:
    """Weights to broadcast.

    Args:
        weights: by name; iterated once for each `read_by`.
        dtype, bucket_bytes: see `packed`.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype | None,
        *,
        bucket_bytes: int,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._device = torch.device("cpu")
        self._pass: Prefetch[_Made] | None = None
        self.digests: dict[str, str] = {}  # of the tensors in all buckets made so far, by name

    def read_by(self, number: int) -> list[Buckets]:
        """Return the buckets for so many engines; those of an earlier call end."""
        self.close()
        self._pass = Prefetch(self._made, number)
        return [Buckets(self, reader) for reader in self._pass.readers]

    def on(self, device: torch.device) -> None:
        """Set the device of the buckets; all engines have the same backend."""
        self._device = device

    def refuse_failure(self) -> None:
        """Raise the error of the weights' iterator, if there was one."""
        if self._pass is not None and self._pass.error is not None:
            raise self._pass.error

    def close(self) -> None:
        """End what is being made."""
        if self._pass is not None:
            self._pass.close()

    def _made(self) -> Iterator[_Made]:
        tensors = distinct_tensors(self._weights)
        buckets = packed(tensors, self._dtype, device=self._device, bucket_bytes=self._bucket_bytes)
        yield from map(self._digested, buckets)
        if not self.digests:
            raise WeightSyncError("there are no weights to hand over")

    def _digested(self, bucket: Bucket) -> _Made:
        tensors = dict(bucket.tensors())
        self.digests.update((name, tensor_digest(tensor)) for name, tensor in tensors.items())
        return _Made(bucket, sum(tensor.nbytes for tensor in tensors.values()))


class Buckets:
    """The buckets for one engine; iterate once.

    Args:
        source: makes them.
        reader: of the source.
    """

    def __init__(self, source: BucketSource, reader: Reader[_Made]) -> None:
        self._source = source
        self._reader = reader
        self.num_bytes = 0  # of what was sent so far

    def on(self, device: torch.device) -> Buckets:
        """Return these buckets, on a device."""
        self._source.on(device)
        return self

    def __iter__(self) -> Iterator[Bucket]:
        """Yield what the engine gets, which is freed when all have received it."""
        for made in self._reader:
            self.num_bytes += made.num_bytes
            bucket = made.bucket
            del made
            yield bucket
            del bucket

    def close(self) -> None:
        """Let the other engines continue without this one."""
        self._reader.close()
