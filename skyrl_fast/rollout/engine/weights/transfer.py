"""How new weights reach an engine's processes: a file, handles of CUDA memory (IPC), a broadcast.

Each way the engines get a call of their worker extension, which several of them can make, and
which can be repeated as long as the context is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.rollout.engine.weights.cuda_handles import cuda_handle
from skyrl_fast.rollout.engine.weights.digest import tensor_digest
from skyrl_fast.rollout.engine.weights.file import WeightsFile, cast_weight, distinct_tensors
from skyrl_fast.rollout.engine.weights.group import tensor_infos
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError

Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A call of `WeightUpdateExtension` that loads weights; its answer is a `Receipt`.

    Args:
        method: its name.
        argument: a path, handles or `tensor_infos`: text, bytes, numbers and lists of them.
        digests: of the tensors by name, to be found in the receipt.
        tensors: by name, which the trainer broadcasts while the call runs; empty: none.
        num_bytes: of the tensors, as an engine reads them.
    """

    method: str
    argument: Any
    digests: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_bytes: int = 0


# Called with the weights and the engines' dtype (None: several).
WeightTransfer = Callable[[Weights, torch.dtype | None], AbstractContextManager[WorkerCall]]


@asynccontextmanager
async def handed_over(
    transfer: WeightTransfer, weights: Weights, dtype: torch.dtype | None
) -> AsyncIterator[WorkerCall]:
    """Start a transfer in a thread; yield its call, valid in the context."""
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, transfer(weights, dtype))


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
    return WorkerCall("load_weights_file", str(path), digests, num_bytes=num_bytes)


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
    yield WorkerCall("load_weights_ipc", handles, digests, num_bytes=size)
    torch.cuda.ipc_collect()


@contextmanager
def by_broadcast(weights: Weights, dtype: torch.dtype | None) -> Iterator[WorkerCall]:
    """Broadcast the trainer's own tensors over an engine's `WeightsGroup`, cast on their device.

    Args:
        weights: not to be changed in the context.
        dtype: of the floating-point tensors that are sent; None: as they are.

    Raises:
        WeightSyncError: there are none.
    """
    tensors, digests, size = {}, {}, 0
    for name, tensor in distinct_tensors(weights):
        sent = cast_weight(tensor, dtype)
        tensors[name], digests[name] = tensor, tensor_digest(sent)
        size += sent.nbytes
    if not tensors:
        raise WeightSyncError("there are no weights to hand over")
    infos = tensor_infos(tensors, dtype)
    yield WorkerCall("load_weights_broadcast", infos, digests, tensors, size)
