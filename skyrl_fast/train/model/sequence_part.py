"""The part of a micro-batch that one of the ranks computes which share its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from skyrl_fast.train.model.forward_pass import MicroBatch
from skyrl_fast.train.parallel.sequence_ranks import SequencePart, SequenceRanks


def part_of(micro: MicroBatch, ranks: SequenceRanks) -> MicroBatch:
    """Return this rank's part of a micro-batch: L is padded to a multiple of the ranks."""
    if ranks.size == 1:
        return micro
    length = micro.input_ids.shape[1]
    size = -(-length // ranks.size)
    first = ranks.rank * size
    padding = size * ranks.size - length
    # `padded_trees` has padded the nodes, whose plan must be of all of them.
    assert micro.tree is None or padding == 0
    here = slice(first, first + size)
    sequence = micro.hidden_index // length
    position = micro.hidden_index % length
    places = ((position >= first) & (position < first + size)).nonzero()[:, 0]
    micro = padded(micro, padding)
    routes = micro.expert_indices
    mask = micro.router_padding_mask
    if routes is None:
        expert_indices = None
    else:
        expert_indices = routes[:, here]
    if mask is None:
        router_padding_mask = None
    else:
        router_padding_mask = mask[:, here]
    return replace(
        micro,
        input_ids=micro.input_ids[:, here],
        hidden_index=(sequence * size + position - first)[places],
        target_ids=micro.target_ids[places],
        expert_indices=expert_indices,
        router_padding_mask=router_padding_mask,
        **_kept_tokens(micro, places),
        part=SequencePart(ranks, first, places, len(micro.hidden_index)),
    )


def padded(micro: MicroBatch, extra: int) -> MicroBatch:
    """Add `extra` tokens without routes to each sequence; a tree remains as it is."""
    pad = torch.nn.functional.pad
    routes = micro.expert_indices
    mask = micro.router_padding_mask
    if routes is None:
        expert_indices = None
    else:
        expert_indices = pad(routes, (0, 0, 0, 0, 0, extra))
    if mask is None:
        router_padding_mask = None
    else:
        router_padding_mask = pad(mask, (0, extra), value=True)
    return replace(
        micro,
        input_ids=pad(micro.input_ids, (0, extra)),
        expert_indices=expert_indices,
        router_padding_mask=router_padding_mask,
    )


def _kept_tokens(micro: MicroBatch, places: torch.Tensor) -> dict[str, Any]:
    """Return the kept tokens of some entries, as fields of a `MicroBatch`."""
    if micro.kept_ids is None or micro.cu_kept is None:
        return {}
    lengths = micro.cu_kept.diff()
    chosen = torch.zeros(len(lengths), dtype=torch.bool)
    chosen[places] = True
    kept_ids = micro.kept_ids[torch.repeat_interleave(chosen, lengths)]
    cu = np.concatenate([[0], np.cumsum(lengths[places].numpy())])
    return {"kept_ids": kept_ids, "cu_kept": torch.from_numpy(cu)}
