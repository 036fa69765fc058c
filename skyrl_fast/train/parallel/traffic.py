"""Counters of what a rank exchanges with the others: messages and bytes by kind.

Bytes are those that this rank receives from, or sends to, the others in a ring: of a tensor of S
bytes that N ranks gather or reduce, S (N - 1) / N. Packet headers, and the scalars of gradient
norms, are not counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

CALLS = "calls"  # calls of methods on all ranks, with arguments: one message to each
ROWS = "rows"  # arguments of which each rank gets its part: the rows that it trains
RESULTS = "results"  # results of calls, from the other ranks to rank 0
LAYERS = "layers"  # weights of a layer, gathered for a pass
GRADIENTS = "gradients"  # gradients of a layer, reduced after a backward pass
ENGINE = "engine"  # weights, gathered for a weight sync
CHECKPOINT = "checkpoint"  # weights, gathered for a checkpoint
SEQUENCES = "sequences"  # tokens and heads, exchanged by ranks that share a pass
KINDS = (CALLS, ROWS, RESULTS, LAYERS, GRADIENTS, ENGINE, CHECKPOINT, SEQUENCES)

# torch 2.13 has renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Traffic:
    """Counts since the last `take`."""

    def __init__(self) -> None:
        self._messages: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def add(self, kind: str, num_bytes: int, messages: int = 1) -> None:
        """Count messages of this many bytes together."""
        self._messages[kind] += messages
        self._bytes[kind] += num_bytes

    def take(self) -> dict[str, float]:
        """Return the counts as metrics, and start again from 0."""
        found = {f"traffic/{kind}_messages": float(self._messages[kind]) for kind in KINDS}
        found |= {f"traffic/{kind}_bytes": float(self._bytes[kind]) for kind in KINDS}
        self._messages.clear()
        self._bytes.clear()
        return found


class _Counted:
    """FSDP2's default allocation, for a collective that is counted."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedGather(_Counted):
    """FSDP2's gather of a layer's weights; see `FSDPModule.set_custom_all_gather`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        self._traffic.add(LAYERS, output_tensor.nbytes - input_tensor.nbytes)
        return all_gather(output_tensor, input_tensor, group, async_op)


class CountedReduction(_Counted):
    """FSDP2's reduction of a layer's gradients; see `FSDPModule.set_custom_reduce_scatter`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._traffic.add(GRADIENTS, input_tensor.nbytes - output_tensor.nbytes)
        return _reduce_scatter(output_tensor, input_tensor, op, group, async_op)
