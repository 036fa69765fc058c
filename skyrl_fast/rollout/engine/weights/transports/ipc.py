"""Weights by CUDA IPC: workers read the trainer's own GPU memory, and nothing is copied before.

The handles are those of torch's reductions, as plain values.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing import reductions

from skyrl_fast.rollout.engine.weights.receipt import SentWeights, WeightSyncError, dtype_name
from skyrl_fast.rollout.engine.weights.transfer import Weights, WorkerCall


class CudaIpc:
    """torch's calls for memory that processes share."""

    def synchronize(self) -> None:
        """Wait for the work of this process; the other one does not wait for its streams."""
        torch.accelerator.synchronize()

    def reduce(self, tensor: torch.Tensor) -> Any:
        return reductions.reduce_tensor(tensor)

    def rebuild(self, *arguments: Any) -> torch.Tensor:
        tensor: torch.Tensor = reductions.rebuild_cuda_tensor(*arguments)
        return tensor

    def collect(self) -> None:
        """Free memory that the other process has returned."""
        torch.cuda.ipc_collect()

    def name_gpu(self, device: torch.device) -> str:
        """Return the UUID of a device's GPU, which is the same in all processes."""
        return str(torch.cuda.get_device_properties(device).uuid)


CUDA = CudaIpc()


@contextmanager
def send_by_ipc(
    weights: Weights, dtype: torch.dtype | None = None, *, cuda: CudaIpc = CUDA
) -> Iterator[WorkerCall]:
    """Hand over the trainer's tensors, which workers of the same GPUs read.

    Their processes must see the GPUs under the same numbers. They cast the weights.

    Args:
        weights: on a GPU, not to be changed in the context.

    Raises:
        WeightSyncError: there are none, some are not on a GPU, or CUDA does not share memory here.
    """
    tensors = dict(weights)  # held until the context ends
    elsewhere = []
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda":
            elsewhere.append(name)
    if elsewhere or not tensors:
        raise WeightSyncError(
            f"weight_sync_backend: ipc needs all weights on a GPU; not there: {elsewhere[:8]}. "
            "Set it to file"
        )
    cuda.synchronize()
    try:
        handles = [[name, *make_handle(tensor, cuda)] for name, tensor in tensors.items()]
    except RuntimeError as error:  # raised by CUDA
        raise WeightSyncError(
            "weight_sync_backend: ipc: CUDA does not share the memory of this process with others: "
            f"{_first_line(error)}. Set it to file"
        ) from error
    sent = SentWeights()
    for name, tensor in tensors.items():
        sent.add(name, tensor)
    yield WorkerCall("ipc", [handles], sent)
    cuda.collect()


def _share_a_number() -> None:
    make_handle(torch.zeros(1, device="cuda"), CUDA)
    CUDA.collect()


def find_ipc_fault(
    share: Callable[[], None] = _share_a_number, environment: Mapping[str, str] = os.environ
) -> str:
    """Return why CUDA does not share memory here, as in WSL2 and some containers; "" if it does.

    Memory of expandable segments is shared by a system call that containers refuse to its reader.
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").lower():
            return f"{name} asks for expandable segments"
    try:
        share()
    except RuntimeError as error:
        return _first_line(error)
    return ""


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def receive_by_ipc(
    handles: Iterable[list[Any]], cuda: CudaIpc = CUDA
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that share the trainer's memory."""
    for name, size, stride, offset, dtype, *storage in handles:
        tensor = cuda.rebuild(
            torch.Tensor,
            torch.Size(size),
            tuple(stride),
            offset,
            torch.TypedStorage,
            getattr(torch, dtype),
            *storage,
        )
        yield name, tensor


def finish_ipc(cuda: CudaIpc = CUDA) -> None:
    """Return when all is read, before the trainer continues."""
    cuda.synchronize()
    cuda.collect()


def make_handle(tensor: torch.Tensor, cuda: CudaIpc) -> list[Any]:
    """Return what another process needs to read the tensor while it exists here."""
    # The arguments of rebuild_cuda_tensor.
    _, (_, size, stride, offset, _, dtype, *storage) = cuda.reduce(tensor.detach())
    return [[*size], [*stride], offset, dtype_name(dtype), *storage]
