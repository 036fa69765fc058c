"""Weights that an engine of this machine reads from the trainer's own main memory.

The policy's parameters move once into an unnamed file in memory, of which the engine's process maps
a private copy: nothing is written in an update, and nothing is copied before the loader does. Only
processes of this user can open the file, by a path that is not one of a folder.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from skyrl_fast.rollout.engine.weights.buckets import align_up, dtype_of
from skyrl_fast.rollout.engine.weights.receipt import SentWeights, WeightSyncError, dtype_name
from skyrl_fast.rollout.engine.weights.transfer import Weights, WorkerCall, distinct_tensors
from skyrl_fast.rollout.engine.weights.transports.file import send_by_file

_NAME = "skyrl_fast-weights"


class SharedMemory:
    """The memory of a policy's parameters, as transport of its weights.

    Weights that are not in it, or that engines want in another dtype, go by `send_by_file`.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._memory: mmap.mmap | None = None
        self._first = 0  # address of its first byte

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move parameters and buffers into the memory, in place; nothing the second time."""
        if self._file is not None:
            return
        tensors = list(tensors)
        starts = []
        size = 0
        for tensor in tensors:
            starts.append(size)
            size += align_up(tensor.nbytes)
        self._file = os.memfd_create(_NAME)
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)
        all_bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._first = all_bytes.data_ptr()
        for start, tensor in zip(starts, tensors, strict=True):
            part = all_bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            part.copy_(tensor.detach())
            tensor.data = part

    @contextmanager
    def __call__(self, weights: Weights, dtype: torch.dtype | None = None) -> Iterator[WorkerCall]:
        """Hand over where the tensors are, which must not change in the context.

        They are read once where they are in the memory. WeightSyncError if there are none.
        """
        tensors = dict(distinct_tensors(weights))
        if not tensors:
            raise WeightSyncError("there are no weights to hand over")
        if not all(self._holds(tensor, dtype) for tensor in tensors.values()):
            with send_by_file(tensors, dtype, unnamed=True) as call:
                yield call
            return
        sent = SentWeights()
        parts = []
        for name, tensor in tensors.items():
            sent.add(name, tensor)
            info = [name, dtype_name(tensor.dtype), list(tensor.shape)]
            parts.append([*info, tensor.data_ptr() - self._first if tensor.numel() else 0])
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        yield WorkerCall("memory", [path, parts], sent)

    def _holds(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
        if self._memory is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return False
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            return False
        start = tensor.data_ptr() - self._first
        return not tensor.numel() or 0 <= start <= len(self._memory) - tensor.nbytes


def receive_from_memory(path: str, parts: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of the trainer's memory, each with what `TensorInfo` has and its offset."""
    file = os.open(path, os.O_RDONLY)
    try:
        # Private: what a loader would write stays in this process.
        memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)
    for *info, offset in parts:
        shape = torch.Size(info[2])
        if not shape.numel():
            yield info[0], torch.empty(shape, dtype=dtype_of(info))
            continue
        tensor = torch.frombuffer(memory, dtype=dtype_of(info), count=shape.numel(), offset=offset)
        yield info[0], tensor.view(shape)
