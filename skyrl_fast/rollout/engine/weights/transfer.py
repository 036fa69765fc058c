"""How new weights reach an engine's processes: a file, handles of CUDA memory (IPC), a broadcast.

Each way the engines get a call of their worker extension, which several of them can make at once,
and which can be repeated as long as the context is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.rollout.engine.weights.bucket_source import Buckets, BucketSource
from skyrl_fast.rollout.engine.weights.buckets import BUCKET_BYTES
from skyrl_fast.rollout.engine.weights.digest import tensor_digest
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.transports.file import WeightsFile, distinct_tensors
from skyrl_fast.rollout.engine.weights.transports.ipc import cuda_handle
from skyrl_fast.system.torch_threads import end_torch_threads

# By name. They are read again for an engine that is restarted, unless they are an iterator.
Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A call of `WeightUpdateExtension` that loads weights; its answer is a `Receipt`.

    Args:
        method: its name.
        argument: a path, or handles: text, bytes, numbers and lists of them; None: it has none.
        digests: of the tensors by name, to be found in the receipt; complete when an engine has
            received them.
        file_bytes: of the tensors, unless they are broadcast.
        source: of what the trainer broadcasts while the call runs; None: nothing.
        buckets: of the source, for one engine.
    """

    method: str
    argument: Any
    digests: Mapping[str, str]
    file_bytes: int = 0
    source: BucketSource | None = None
    buckets: Buckets | None = None

    @property
    def arguments(self) -> list[Any]:
        """All arguments."""
        return [] if self.argument is None else [self.argument]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that an engine has read."""
        return self.file_bytes if self.buckets is None else self.buckets.num_bytes

    def for_engines(self, number: int) -> list[WorkerCall]:
        """Return the calls of engines that load at the same time.

        Each must be made, or closed: a bucket is sent to all of them before the next but one.
        """
        if self.source is None:
            return [self] * number
        return [replace(self, buckets=buckets) for buckets in self.source.read_by(number)]

    def close(self) -> None:
        """Do not let the other engines wait for this one any more."""
        if self.buckets is not None:
            self.buckets.close()


# Called with the weights and the engines' dtype (None: several).
WeightTransfer = Callable[[Weights, torch.dtype | None], AbstractContextManager[WorkerCall]]


@asynccontextmanager
async def handed_over(
    transfer: WeightTransfer, weights: Weights, dtype: torch.dtype | None
) -> AsyncIterator[WorkerCall]:
    """Start a transfer in a thread; yield its call, valid in the context."""
    with ExitStack() as stack:

        def start() -> WorkerCall:
            try:
                return stack.enter_context(transfer(weights, dtype))
            finally:
                end_torch_threads()

        yield await asyncio.to_thread(start)


def by_file(folder: str | None = None, *, unnamed: bool = False) -> WeightTransfer:
    """Return a transfer by a safetensors file.

    Args:
        folder, unnamed: see `WeightsFile`.
    """

    @contextmanager
    def transfer(weights: Weights, dtype: torch.dtype | None) -> Iterator[WorkerCall]:
        with WeightsFile(folder, unnamed=unnamed) as file:
            file.write(weights, dtype=dtype)
            yield file_call(file.path, file.digests, num_bytes=file.num_bytes)

    return transfer


def file_call(path: Path, digests: Mapping[str, str], *, num_bytes: int = 0) -> WorkerCall:
    """Return the call that loads a safetensors file with tensors of these digests."""
    return WorkerCall("load_weights_file", str(path), digests, num_bytes)


@contextmanager
def by_ipc(weights: Weights, dtype: torch.dtype | None = None) -> Iterator[WorkerCall]:
    """Hand over the trainer's own tensors by CUDA IPC: nothing is copied before the engine reads.

    The engine's processes must see the same GPUs under the same numbers. They cast the weights.

    Args:
        weights: on a GPU, not to be changed in the context.
        dtype: unused.

    Raises:
        WeightSyncError: there are none, or some are not on a GPU.
    """
    tensors = dict(weights)  # held until the context ends
    elsewhere = [name for name, tensor in tensors.items() if tensor.device.type != "cuda"]
    if elsewhere or not tensors:
        raise WeightSyncError(
            f"weight_sync_backend: ipc needs all weights on a GPU; not there: {elsewhere[:8]}. "
            "Set it to file"
        )
    torch.cuda.synchronize()  # the engine does not wait for this process's streams
    handles = [[name, *cuda_handle(tensor)] for name, tensor in tensors.items()]
    digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    yield WorkerCall("load_weights_ipc", handles, digests, size)
    torch.cuda.ipc_collect()


@contextmanager
def by_broadcast(
    weights: Weights,
    dtype: torch.dtype | None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[WorkerCall]:
    """Broadcast the trainer's tensors over engines' `WeightsGroup`s, while they are gathered.

    Each bucket is made once for all engines: gathered, cast on its device, packed, and its tensors'
    digests computed, while the engines receive the one before.

    Args:
        weights: not to be changed in the context.
        dtype: of the floating-point tensors that are sent; None: as they are.
        bucket_bytes: of one broadcast.

    Raises:
        WeightSyncError: there are none.
    """
    if isinstance(weights, Iterator):
        weights = dict(distinct_tensors(weights))
    source = BucketSource(weights, dtype, bucket_bytes=bucket_bytes)
    call = WorkerCall("load_weights_broadcast", None, source.digests, source=source)
    try:
        yield call.for_engines(1)[0]
    except Exception:
        source.refuse_failure()
        raise
    finally:
        source.close()
