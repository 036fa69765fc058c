"""Row layouts of other systems: padded to the batch's longest, or packed with torch's varlen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.ops.prefix_tree.attention import TreeAttention, autocast
from skyrl_fast.train.model import tree_forward
from skyrl_fast.train.model.forward_pass import MicroBatch


def padded_micro_batches(batch: StepBatch, budget: int) -> list[MicroBatch]:
    """Return groups of as many rows as fit in the budget when padded to the batch's longest."""
    width = int(batch.lengths.max())
    count = max(1, budget // width)
    cu, cu_responses = batch.cu_seqlens.tolist(), batch.cu_responses.tolist()
    micro_batches = []
    for first in range(0, batch.num_rows, count):
        rows = range(first, min(first + count, batch.num_rows))
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        hidden, targets, responses = [], [], []
        for place, row in enumerate(rows):
            tokens = batch.tokens[cu[row] : cu[row + 1]].long()
            start, end = cu_responses[row], cu_responses[row + 1]
            ids[place, : len(tokens)] = tokens
            trained = np.flatnonzero(batch.loss_mask[start:end].numpy())
            positions = len(tokens) - (end - start) + trained
            hidden.append(place * width + positions - 1)
            targets.append(tokens.numpy()[positions])
            responses.append(start - cu_responses[first] + trained)
        micro_batches.append(
            MicroBatch(
                input_ids=ids,
                hidden_index=torch.from_numpy(np.concatenate(hidden)),
                target_ids=torch.from_numpy(np.concatenate(targets)),
                response_index=torch.from_numpy(np.concatenate(responses)),
                rows=torch.arange(rows.start, rows.stop),
            )
        )
    return micro_batches


@contextlib.contextmanager
def varlen_attention(
    kernel: Callable[..., torch.Tensor] | None = None,
) -> Iterator[None]:
    """Compute rows without shared prefixes by a kernel with the arguments of torch's `varlen_attn`.

    None is that one, which runs only on CUDA.
    """
    if kernel is None:
        from torch.nn.attention.varlen import varlen_attn as kernel

    before = tree_forward.tree_attention
    known: list[tuple[TreeAttention, torch.Tensor, int]] = []  # of the current forward pass

    def row_attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: TreeAttention, **_: Any
    ) -> torch.Tensor:
        if not known or known[0][0] is not plan:
            known[:] = [(plan, *row_bounds(plan))]
        _, cu, longest = known[0]
        query, key, value = (autocast(x) for x in (query, key, value))
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        out = kernel(*rows, cu, cu, longest, longest, window_size=(-1, 0))  # causal
        return out.transpose(0, 1)[None]

    tree_forward.tree_attention = row_attention
    try:
        yield
    finally:
        tree_forward.tree_attention = before


def row_bounds(plan: TreeAttention) -> tuple[torch.Tensor, int]:
    """Return (N + 1,) int32 offsets of rows that share nothing, and the longest row's length.

    A row begins where a node does not attend to the previous one.
    """
    sees_the_last = plan.ends[:-1] > torch.arange(1, plan.num_nodes, device=plan.ends.device)
    starts = (~sees_the_last).nonzero().flatten() + 1
    ends = starts.new_tensor([plan.num_nodes])
    cu = torch.cat([torch.zeros_like(ends), starts, ends]).to(torch.int32)
    return cu, int(cu.diff().max())
