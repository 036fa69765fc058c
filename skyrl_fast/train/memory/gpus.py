"""The GPUs of this machine, as a memory plan sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from skyrl_fast.rollout.engine.weights.transports.ipc import find_ipc_fault


class Gpus(Protocol):
    """Those that a run may use, by number."""

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each; none on a machine without a GPU."""

    def free_bytes(self, gpu: int) -> int:
        """Return the bytes of one that this process can still use."""

    def ipc_fault(self) -> str:
        """Return why CUDA does not share memory between processes here; "" if it does."""


class CudaGpus:
    """Those that torch finds."""

    @property
    def sizes(self) -> Sequence[int]:
        if not torch.cuda.is_available():
            return ()
        gpus = range(torch.cuda.device_count())
        return [int(torch.cuda.get_device_properties(gpu).total_memory) for gpu in gpus]

    def free_bytes(self, gpu: int) -> int:
        # What torch's allocator holds here is free for this process.
        return torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu)

    def ipc_fault(self) -> str:
        return find_ipc_fault()


@dataclass(frozen=True, slots=True)
class GpusOfNode:
    """A node's GPUs, of which this process sees its own; the others are taken to be like that.

    Args:
        seen: by this process.
        number: of the node's GPUs that the run has.
    """

    seen: Gpus
    number: int

    @property
    def sizes(self) -> Sequence[int]:
        return [*self.seen.sizes[:1]] * self.number

    def free_bytes(self, gpu: int) -> int:
        return self.seen.free_bytes(0)

    def ipc_fault(self) -> str:
        return self.seen.ipc_fault()


HERE = CudaGpus()
