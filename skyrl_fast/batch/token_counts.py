"""Tokens of a forward pass over a batch, for each form of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from skyrl_fast.batch.step_batch import StepBatch
from skyrl_fast.ops.merge.steps import merge_flat_steps
from skyrl_fast.ops.prefix_tree.tree import prefix_tree_size


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a batch without padding.

    Args:
        rows: tokens of all rows, separately.
        merged: tokens of the rows after merging consecutive steps.
        tree: nodes of the batch's prefix tree, one for each distinct prefix of a row.
    """

    rows: int
    merged: int
    tree: int


def token_counts(batch: StepBatch) -> TokenCounts:
    """Return the tokens of each form of the rows, without running a model; linear in tokens.

    Args:
        batch: merging is counted without drift.

    Example:
        >>> batch = StepBatch.from_generator_output(
        ...     {"prompt_token_ids": [[1], [1, 2, 3], [1]], "response_ids": [[2], [4], [2]],
        ...      "rewards": [0.0, 1.0, 0.0], "loss_masks": [[1], [1], [1]],
        ...      "trajectory_ids": [("a", 0), ("a", 0), ("a", 1)],
        ...      "is_last_step": [False, True, True]})
        >>> token_counts(batch)
        TokenCounts(rows=8, merged=6, tree=4)
    """
    tokens = batch.tokens
    cu = batch.cu_seqlens
    plan = merge_flat_steps(tokens, cu, batch.cu_responses, batch.trajectory_ids)
    merged = int(batch.lengths[torch.from_numpy(plan.ends)].sum())
    return TokenCounts(batch.num_tokens, merged, tree=prefix_tree_size(tokens, cu))
