"""Columns of a batch with merged steps: N rows become M.

A response tokens, E routes, B kept tokens; primes mark numbers after merging. `cu_responses` are
the (N + 1,) offsets of the response tokens, `cu_merged` the (M + 1,) ones after merging.

Design: docs/design/010-merge.md.
"""

from __future__ import annotations

import numpy as np
import torch

from skyrl_fast.batch.columns import offsets
from skyrl_fast.ops import _backend
from skyrl_fast.ops.merge.steps import MergePlan, copy_segments


def merge_values(
    op: str,
    values: torch.Tensor,
    cu_responses: torch.Tensor,
    plan: MergePlan,
    cu_merged: torch.Tensor,
) -> torch.Tensor:
    """Return (A',) of the (A,) values per response token: those that are kept, 0 for the others."""
    num_merged = int(cu_merged[-1])
    column = _backend.empty((num_merged,), values.dtype).zero_()
    row_starts = cu_merged.numpy()[plan.merged_rows]
    targets = row_starts + plan.starts
    sources = cu_responses[:-1].numpy()
    copy_segments(op, values, sources, column, targets, plan.kept)
    return column


def merge_token_rewards(
    op: str,
    rewards: torch.Tensor,
    row_rewards: torch.Tensor,
    cu_responses: torch.Tensor,
    plan: MergePlan,
    cu_merged: torch.Tensor,
    *,
    reward_per_row: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (A',) rewards per token and (M,) their sums; rewards of dropped tokens are moved.

    Args:
        reward_per_row: a step without response tokens may have a reward.
    """
    merged = merge_values(op, rewards, cu_responses, plan, cu_merged)
    flat = merged.numpy()
    cu = cu_merged.numpy()
    old = cu_responses.numpy()
    merged_rows = plan.merged_rows
    kept = plan.kept
    # The next prompt wrote these tokens differently; what they earned moves to a token that
    # remains.
    is_cut = kept < plan.response_lengths
    for row in np.flatnonzero(is_cut).tolist():
        place = cu[merged_rows[row]] + plan.reward_places[row]
        first = old[row] + kept[row]
        dropped = rewards.numpy()[first : old[row + 1]]
        flat[place] += dropped.sum()
    # A step that sampled nothing may have been rewarded, too, and has no token of its own.
    if reward_per_row:
        is_empty = plan.response_lengths == 0
        is_rewarded = row_rewards.numpy() != 0
        for row in np.flatnonzero(is_empty & is_rewarded).tolist():
            merged_row = merged_rows[row]
            begin = cu[merged_row]
            end = cu[merged_row + 1]
            token = min(plan.starts[row] - 1, plan.reward_places[row])
            place = begin + max(0, token)
            if begin < end:
                flat[place] += float(row_rewards[row])
    # From the rows, not from the tokens, as a row without tokens may have a reward.
    exact = row_rewards.numpy().astype(np.float64)
    sums = np.add.reduceat(exact, plan.heads)
    return merged, torch.from_numpy(sums.astype(np.float32))


def merge_routes(
    op: str, routes: torch.Tensor, cu_experts: torch.Tensor, plan: MergePlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (E', L, K) of the (E, L, K) routes, and the merged rows' (M + 1,) offsets."""
    begins, ends = plan.route_pieces(op, cu_experts.diff().numpy())
    starts = cu_experts[:-1].numpy() + begins
    return _join_pieces(op, routes, starts, ends - begins, plan)


def merge_kept_ids(
    op: str,
    num_kept: torch.Tensor,
    kept_ids: torch.Tensor,
    cu_responses: torch.Tensor,
    plan: MergePlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B',) of the (B,) kept ids, of the tokens that remain, and their (M + 1,) offsets."""
    sums = np.cumsum(num_kept.numpy(), dtype=np.int64)
    cu_kept = np.concatenate([[0], sums])
    first = cu_responses[:-1].numpy().astype(np.int64)
    # The first `plan.kept` tokens of a response remain, whose sets are adjacent.
    begins = cu_kept[first]
    ends = cu_kept[first + plan.kept]
    return _join_pieces(op, kept_ids, begins, ends - begins, plan)


def _join_pieces(
    op: str, values: torch.Tensor, starts: np.ndarray, lengths: np.ndarray, plan: MergePlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (N,) pieces of all steps end to end, and the merged rows' (M + 1,) offsets."""
    merged_lengths = np.add.reduceat(lengths, plan.heads)
    cu_merged = offsets(torch.from_numpy(merged_lengths))
    shape = (int(cu_merged[-1]), *values.shape[1:])
    merged = _backend.empty(shape, values.dtype)
    targets = np.cumsum(lengths) - lengths
    copy_segments(op, values, starts, merged, targets, lengths)
    return merged, cu_merged
