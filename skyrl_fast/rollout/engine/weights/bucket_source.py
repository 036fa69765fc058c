"""The buckets of a weight update, made once for all engines that load them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from skyrl_fast.rollout.engine.weights.bucket import Bucket, Message, packed
from skyrl_fast.rollout.engine.weights.delta import KeptBuckets, changes
from skyrl_fast.rollout.engine.weights.digest import tensor_digest
from skyrl_fast.rollout.engine.weights.file import distinct_tensors
from skyrl_fast.rollout.engine.weights.prefetch import Prefetch, Reader
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError


class SentWeights:
    """What was sent last to all engines, in main memory: they get what has changed since.

    Args:
        version: a number of these weights; None: none were sent completely.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._kept = KeptBuckets()
        self._versions = 0

    def take(self) -> tuple[int | None, KeptBuckets]:
        """Return version and buckets, and have none until `put`."""
        found = (self.version, KeptBuckets() if self.version is None else self._kept)
        self.version = None
        return found

    def put(self, kept: KeptBuckets, same_as: int | None) -> None:
        """Set buckets that were sent completely.

        Args:
            same_as: the version that they are; None: another one.
        """
        self._versions += same_as is None
        self._kept, self.version = kept, self._versions if same_as is None else same_as


@dataclass(frozen=True, slots=True)
class _Made:
    """A bucket, and what has changed in it since a version; None: it is sent to all engines."""

    bucket: Bucket
    num_bytes: int
    since: int | None = None
    changed: Message | None = None
    kept: bool = False

    def message(self, version: int | None) -> tuple[Message, int]:
        """Return what an engine with this version gets, and the bytes of it."""
        if self.changed is not None and version is not None and version == self.since:
            return self.changed, self.changed.data.numel()
        return Message(self.bucket.infos, self.bucket.data, kept=self.kept), self.num_bytes


class BucketSource:
    """Weights to broadcast.

    Args:
        weights: by name; iterated once for each `read_by`.
        dtype, bucket_bytes: see `packed`.
        sent: what was sent before, replaced by these weights; None: all is sent.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype | None,
        *,
        bucket_bytes: int,
        sent: SentWeights | None = None,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._sent = sent
        self._device = torch.device("cpu")
        self._pass: Prefetch[_Made] | None = None
        self.digests: dict[str, str] = {}  # of the tensors in all buckets made so far, by name

    @property
    def version(self) -> int | None:
        """Number of the weights, when all of them were made."""
        return None if self._sent is None else self._sent.version

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
        if self._sent is None:
            yield from map(self._digested, buckets)
        else:
            since, kept = self._sent.take()
            same_as = since  # engines that are up need nothing when another one is restarted
            for number, bucket in enumerate(buckets):
                made = self._compared(self._digested(bucket), number, since, kept)
                if made.changed is None or made.changed.data.numel():
                    same_as = None
                yield made
                del bucket, made
            self._sent.put(kept, same_as)
        if not self.digests:
            raise WeightSyncError("there are no weights to hand over")

    def _digested(self, bucket: Bucket) -> _Made:
        tensors = dict(bucket.tensors())
        self.digests.update((name, tensor_digest(tensor)) for name, tensor in tensors.items())
        return _Made(bucket, sum(tensor.nbytes for tensor in tensors.values()))

    def _compared(self, made: _Made, number: int, since: int | None, kept: KeptBuckets) -> _Made:
        before, bucket, message = kept.get(number), made.bucket, None
        if before is not None and (found := changes(before, bucket)) is not None:
            counts, data = found
            message = Message(bucket.infos, data, counts)
            kept.changed(number, bucket.infos, counts, data.cpu())
        else:
            kept.keep(number, bucket)
        return _Made(bucket, made.num_bytes, since, message, kept=True)


class Buckets:
    """The buckets for one engine; iterate once.

    Args:
        source: makes them.
        reader: of the source.
    """

    def __init__(self, source: BucketSource, reader: Reader[_Made]) -> None:
        self._source = source
        self._reader = reader
        self._held: int | None = None
        self.num_bytes = 0  # of what was sent so far

    @property
    def version(self) -> int | None:
        """Number of the weights that the engine has, when it has received all buckets."""
        return self._source.version

    def on(self, device: torch.device, held: int | None = None) -> Buckets:
        """Return these buckets, on a device, for an engine that holds this version."""
        self._source.on(device)
        self._held = held
        return self

    def __iter__(self) -> Iterator[Message]:
        """Yield what the engine gets, which is freed when all have received it."""
        for made in self._reader:
            message, num_bytes = made.message(self._held)
            self.num_bytes += num_bytes
            del made
            yield message
            del message

    def close(self) -> None:
        """Let the other engines continue without this one."""
        self._reader.close()
