"""Input of one forward pass, and the positions of its logprobs in the batch.

A response tokens of a batch, n sequences of length L, or 1 of T nodes, M trained tokens. Routes: D
layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.ops import _backend
from skyrl_fast.train.parallel.sequence_ranks import SequencePart


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass.

    Args:
        input_ids: (n, L) int64, padded on the right. Tokens never attend to later ones, so causal
            attention needs no mask and positions count from 0.
        hidden_index: (M,) int64 into the (n * L) hidden states: those that predict a trained token.
        target_ids: (M,) int64, the trained tokens.
        response_index: (M,) int64 into the response tokens of `rows`.
        rows: int64, rows of the batch that are trained here, ascending.
        expert_indices: (n, L, D, K) recorded routes; None: no replay.
        router_padding_mask: (n, L) bool, True where a token has no recorded route; None with it.
        tree: the input is (1, T) nodes of prefix trees; None: sequences.
        copies: (M,) int64 into `hidden_index` and `target_ids`, if these are deduplicated, as rows
            can share tokens; None: they have one entry per trained token.
        kept_ids, cu_kept: the tokens that each entry of `target_ids` was sampled from, as for
            `linear_logprob`; None: the vocabulary.
        part: which of the tokens these are, where several ranks share them; then M is the number
            of hidden states here. None: all.
    """

    input_ids: torch.Tensor
    hidden_index: torch.Tensor
    target_ids: torch.Tensor
    response_index: torch.Tensor
    rows: torch.Tensor
    expert_indices: torch.Tensor | None = None
    router_padding_mask: torch.Tensor | None = None
    tree: NodeTree | None = None
    copies: torch.Tensor | None = None
    kept_ids: torch.Tensor | None = None
    cu_kept: torch.Tensor | None = None
    part: SequencePart | None = None

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all trained tokens, from those of the entries computed here."""
        if self.part is not None:
            values = self.part.joined(values)
        if self.copies is None:
            return values
        return values[_backend.to_device_of(self.copies, values)]


@dataclass(frozen=True, slots=True)
class NodeTree:
    """The prefix trees whose nodes are a micro-batch's input; see `build_prefix_tree`.

    Args:
        parents, ends: (T,) int32.
        positions: (1, T) int64, the node's depth.
    """

    parents: torch.Tensor
    ends: torch.Tensor
    positions: torch.Tensor


def response_positions(batch: StepBatch, micro: MicroBatch) -> torch.Tensor:
    """Return (M,) int64 positions of the pass's trained tokens among the response tokens.

    Args:
        batch: the rows that the pass is of, A response tokens.
        micro: one of its forward passes, as of `Policy.passes`.
    """
    return positions_from(batch.cu_responses[micro.rows], batch, micro)


def positions_from(starts: torch.Tensor, batch: StepBatch, micro: MicroBatch) -> torch.Tensor:
    """Return (M,) int64 positions of the pass's trained tokens, where its rows begin elsewhere.

    Args:
        starts: integers, the position of the first response token of each of `micro.rows`.
        batch, micro: as for `response_positions`.
    """
    lengths = batch.response_lengths[micro.rows].to(torch.int64)
    local_starts = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(starts.to(torch.int64) - local_starts, lengths)
    return micro.response_index + shift[micro.response_index]
