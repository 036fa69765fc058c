"""Tensors in another process's GPU memory (CUDA IPC), by torch's reductions as plain values.

vLLM sends the arguments of its calls without pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing import reductions


def cuda_handle(tensor: torch.Tensor) -> list[Any]:
    """Return what another process needs to read the tensor while it exists here."""
    # The arguments of rebuild_cuda_tensor.
    _, (_, size, stride, offset, _, dtype, *storage) = reductions.reduce_tensor(tensor.detach())
    return [[*size], [*stride], offset, str(dtype).removeprefix("torch."), *storage]


def tensors_of_handles(handles: Iterable[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that share another process's memory.

    Args:
        handles: for each the name, then what `cuda_handle` returned.
    """
    for name, size, stride, offset, dtype, *storage in handles:
        tensor = reductions.rebuild_cuda_tensor(
            torch.Tensor,
            torch.Size(size),
            tuple(stride),
            offset,
            torch.TypedStorage,
            getattr(torch, dtype),
            *storage,
        )
        yield name, tensor
