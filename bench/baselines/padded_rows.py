"""Rows as others lay them out: padded to the batch's longest, or packed with torch's varlen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.ops.tree_attention import TreeAttention
from skyrl_fast.train import tree_forward
from skyrl_fast.train.forward_pass import MicroBatch
from skyrl_fast.train.policy import Policy


def padded_micro_batches(batch: StepBatch, budget: int) -> list[MicroBatch]:
    """As many rows at a time as fit in the budget when each is as long as the batch's longest."""
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
def varlen_attention(policy: Policy) -> Iterator[None]:
    """Rows without anything shared go through torch's varlen flash attention; CUDA only."""
    from torch.nn.attention.varlen import varlen_attn

    before = tree_forward.tree_attention
    bounds: dict[int, tuple[torch.Tensor, int]] = {}

    def of_rows(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: TreeAttention, **_: Any
    ) -> torch.Tensor:
        if id(plan) not in bounds:
            bounds.clear()
            bounds[id(plan)] = _row_bounds(plan)
        cu, longest = bounds[id(plan)]
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        out = varlen_attn(*rows, cu, cu, longest, longest, window_size=(-1, 0))  # causal
        return out.transpose(0, 1)[None]

    tree_forward.tree_attention = of_rows
    try:
        yield
    finally:
        tree_forward.tree_attention = before


def _row_bounds(plan: TreeAttention) -> tuple[torch.Tensor, int]:
    """Offsets of rows that share nothing: a row begins where nothing before it reaches."""
    sees: Any = plan.mask.mask_mod
    numbers = torch.arange(plan.num_nodes, device=plan.mask.kv_indices.device)
    before = numbers[1:] - 1
    starts = numbers[1:][~sees(0, 0, numbers[1:], before)]
    ends = torch.tensor([plan.num_nodes], device=numbers.device)
    cu = torch.cat([numbers[:1], starts, ends]).to(torch.int32)
    return cu, int(cu.diff().max())
