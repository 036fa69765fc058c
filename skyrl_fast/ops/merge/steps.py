"""Plans for merging steps of a trajectory into one row, and copies of their cells.

N rows (one per step), M merged rows, S tokens of all rows, A response tokens of all rows.

Design: docs/design/010-merge.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend, _ragged
from skyrl_fast.ops._offsets import check_offsets
from skyrl_fast.ops._ragged import INT32_MAX, Rows
from skyrl_fast.ops.merge import reference
from skyrl_fast.ops.pack.reference import row_tensors

OP = "merge_steps"
DRIFTS = ("fork", "realign")
MAX_DRIFT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The result of merging for each row. Arrays are int64 unless stated otherwise.

    Args:
        prompt_lengths, response_lengths: (N,) tokens of the rows.
        overlaps: (N,) how many tokens of the previous row the row's prompt begins with.
        joins: (N,) bool, whether the row continues the previous row's merged row.
        limits: (N,) position from which later steps replaced the row's tokens.
    """

    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    overlaps: np.ndarray
    joins: np.ndarray
    limits: np.ndarray

    @property
    def heads(self) -> np.ndarray:
        """(M,) the first row of each merged row."""
        return np.flatnonzero(~self.joins)

    @property
    def ends(self) -> np.ndarray:
        """(M,) the last row of each merged row: its tokens are the merged row's."""
        # Without rows there is no end, and `append` would make one.
        if len(self.joins):
            return np.append(self.heads[1:], len(self.joins)) - 1
        return self.heads

    @property
    def merged_rows(self) -> np.ndarray:
        """(N,) the merged row that each row is part of."""
        return np.cumsum(~self.joins) - 1

    @property
    def starts(self) -> np.ndarray:
        """(N,) where a row's response begins in its merged row's response."""
        # All behind the first step's prompt is response.
        return self.prompt_lengths - self.prompt_lengths[self.heads][self.merged_rows]

    @property
    def kept(self) -> np.ndarray:
        """(N,) how many of a row's first response tokens stay."""
        # A later step may replace all of the response, and a part of the prompt.
        return np.clip(self.limits - self.prompt_lengths, 0, self.response_lengths)

    @property
    def reward_places(self) -> np.ndarray:
        """(N,) position in the merged response of the rewards of dropped tokens."""
        # The last token that stays: rewards are mostly on the last one of a step, which drifts
        # first.
        return self.limits - 1 - self.prompt_lengths[self.heads][self.merged_rows]

    @property
    def merged_response_lengths(self) -> np.ndarray:
        """(M,) response tokens of the merged rows."""
        return self.starts[self.ends] + self.response_lengths[self.ends]

    def route_pieces(self, op: str, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (N,) begins and ends: the part of each row's captured routes that is recorded.

        Routes recorded by earlier rows stay; a row adds those beyond them, or none if it has none.

        Args:
            counts: (N,) captured routes of each row.

        Raises:
            ValueError: a row with some routes, but fewer than were recorded before it.
        """
        begins = np.empty_like(self.limits)
        ends = np.empty_like(self.limits)
        plan = (self.overlaps, self.joins.view(np.uint8), self.limits)
        row = _C.merge_routes(op, np.ascontiguousarray(counts, np.int64), plan, (begins, ends))
        if row >= 0:
            raise ValueError(
                f"{op}: rollout_expert_indices must not become fewer within a merged row, but row "
                f"{row} has {int(counts[row])} routes after more were recorded"
            )
        return begins, ends


def merge_steps(
    prompts: Rows,
    responses: Rows,
    trajectory_ids: np.ndarray | torch.Tensor | Sequence[int],
    *,
    loss_masks: Rows | None = None,
    drift: str = "fork",
    max_drift_tokens: int = MAX_DRIFT_TOKENS,
    backend: str | None = None,
) -> MergePlan:
    """Return which consecutive rows of a trajectory become one row.

    Greedily, from a trajectory's first row: a row joins the merged row before it where its prompt
    begins with all tokens of that row, prompt and response. A merged row always consists of the
    tokens of its last step, so each row is only compared with the previous one: the cost is linear
    in tokens. Lists are compared in place; where two hold the same objects (growing contexts do)
    no element is read.

    Drift is a prompt that differs in the last few tokens, for example because a response was
    tokenised again. "fork" starts a new row. "realign" joins anyway if at most `max_drift_tokens`
    of the merged row are not in the prompt, and the last token that is in it belongs to the merged
    row's last stretch of trained tokens, or is after it. Tokens that are not in the prompt are
    dropped; the prompt's tokens replace them, untrained.

    Args:
        prompts, responses: N rows each, as for `pack_steps`; no `Concat`.
        trajectory_ids: (N,) ints below 2^31; rows of a trajectory are adjacent.
        loss_masks: N rows of 0 and 1 per response token; needed for "realign" only.
        drift: "fork" or "realign".
        max_drift_tokens: how many tokens "realign" may drop, at least 0.
        backend: "native", "torch", or None to choose.

    Raises:
        TypeError: a token id that is not an integer.
        ValueError: fields of different lengths, an unknown drift, or "realign" without masks.

    Example:
        >>> plan = merge_steps([[1], [1, 2, 9], [7]], [[2], [3], [4]], [0, 0, 0])
        >>> plan.heads.tolist(), plan.ends.tolist(), plan.starts.tolist()
        ([0, 2], [1, 2], [0, 2, 0])
    """
    # "fork" is "realign" that may drop no token.
    use_torch = _backend.select(OP, backend=backend) == "torch"
    check_drift(OP, drift, max_drift_tokens)
    if drift == "realign":
        max_drift = max_drift_tokens
    else:
        max_drift = 0
    fields = {"prompts": prompts, "responses": responses}
    if max_drift:
        if loss_masks is None:
            raise ValueError(f"{OP}: loss_masks: expected them for drift 'realign', got none")
        fields["loss_masks"] = loss_masks
    read = _ragged.read_fields(OP, fields)
    # The plan compares whole prompts with whole rows.
    if any(len(field.parts) > 1 for field in read.values()):
        raise TypeError(f"{OP}: rows must not be a Concat: prompts and responses are told apart")
    ids = _ids(trajectory_ids, len(read["prompts"].lengths))
    if max_drift:
        _ragged.check_aligned(OP, read["responses"], read["loss_masks"])
    lengths = (read["prompts"].lengths.numpy(), read["responses"].lengths.numpy())
    if use_torch:
        rows = []
        for f in fields.values():
            rows.append([r.tolist() for r in row_tensors(f, torch.int64)])
        if max_drift:
            masks = rows[2]
        else:
            masks = None
        plan = reference.merge_plan(rows[0], rows[1], ids.tolist(), masks, max_drift)
        overlaps, joins, limits = (np.array(column) for column in plan)
        return MergePlan(*lengths, overlaps.astype(np.int64), joins.astype(bool), limits)
    if max_drift:
        mask = _flat_mask(read["loss_masks"])
    else:
        mask = None
    plan_out = _empty_plan(len(ids))
    sources = (read["prompts"].parts[0], read["responses"].parts[0])
    rows_in = (*lengths, ids, mask)
    _C.merge_plan_rows(OP, *sources, rows_in, max_drift, plan_out, _backend.num_threads())
    return _plan(lengths, plan_out)


def merge_flat_steps(
    tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_responses: torch.Tensor,
    trajectory_ids: torch.Tensor,
    *,
    loss_mask: torch.Tensor | None = None,
    drift: str = "fork",
    max_drift_tokens: int = MAX_DRIFT_TOKENS,
) -> MergePlan:
    """Return the plan of `merge_steps` for flat rows: tokens, prompt then response, end to end.

    Args:
        tokens: (S,) int32. cu_seqlens: (N + 1,) int32 or int64 offsets into it.
        cu_responses: (N + 1,) int32 or int64 offsets of the concatenated responses.
        trajectory_ids: (N,) int32.
        loss_mask: (A,) uint8, for "realign".
    """
    op = "merge_flat_steps"
    check_drift(op, drift, max_drift_tokens)
    if drift == "realign":
        max_drift = max_drift_tokens
    else:
        max_drift = 0
    total = tokens.shape[0]
    wide = torch.int64
    cu_seqlens = check_offsets(op, "cu_seqlens", cu_seqlens, total=total, dtype=wide)
    if loss_mask is None:
        num_responses = None
    else:
        num_responses = loss_mask.shape[0]
    cu_responses = check_offsets(op, "cu_responses", cu_responses, total=num_responses, dtype=wide)
    if cu_responses.shape != cu_seqlens.shape:
        raise ValueError(
            f"{op}: cu_responses: expected shape {tuple(cu_seqlens.shape)} like cu_seqlens, got "
            f"{tuple(cu_responses.shape)}"
        )
    responses = cu_responses.diff().numpy()
    prompts = cu_seqlens.diff().numpy() - responses
    plan_out = _empty_plan(len(prompts))
    rows_in = (prompts, responses, trajectory_ids, loss_mask if max_drift else None)
    threads = _backend.num_threads()
    _C.merge_plan_flat(op, tokens, cu_seqlens, rows_in, max_drift, plan_out, threads)
    return _plan((prompts, responses), plan_out)


def check_drift(op: str, drift: str, max_drift_tokens: int) -> None:
    if drift not in DRIFTS:
        raise ValueError(f"{op}: drift: expected one of {DRIFTS}, got {drift!r}")
    if max_drift_tokens < 0:
        raise ValueError(f"{op}: max_drift_tokens: expected at least 0, got {max_drift_tokens}")


def copy_segments(
    op: str,
    source: torch.Tensor,
    source_starts: np.ndarray,
    target: torch.Tensor,
    target_starts: np.ndarray,
    lengths: np.ndarray,
) -> None:
    """Copy cells: `lengths[i]` of them from `source_starts[i]` to `target_starts[i]`, for all i."""
    if target.dtype == torch.bool:
        source = source.view(torch.uint8)
        target = target.view(torch.uint8)
    places = []
    for a in (source_starts, target_starts, lengths):
        places.append(np.ascontiguousarray(a, np.int64))
    source = source.contiguous()
    threads = _backend.num_threads()
    _C.copy_segments(op, source, places[0], target, places[1], places[2], threads)


def join_lists(
    op: str,
    field: str,
    rows: Sequence[Any],
    pieces: tuple[np.ndarray, ...],
    lengths: np.ndarray,
    zero: float,
) -> list[Any]:
    """Return a list of each given length, filled with pieces of rows and `zero` elsewhere.

    Args:
        pieces: begin and count in each row, then start and index of the list to write to.
    """
    joined: list[Any] = _C.join_lists(op, field, list(rows), pieces, lengths, zero)
    return joined


def _empty_plan(num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    overlaps = np.empty(num_rows, np.int64)
    limits = np.empty(num_rows, np.int64)
    return overlaps, np.empty(num_rows, np.uint8), limits


def _plan(
    lengths: tuple[np.ndarray, np.ndarray], out: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> MergePlan:
    overlaps, joins, limits = out
    return MergePlan(*lengths, overlaps, joins.view(bool), limits)


def _ids(trajectory_ids: np.ndarray | torch.Tensor | Sequence[int], num_rows: int) -> np.ndarray:
    ids = np.ascontiguousarray(trajectory_ids)
    if ids.shape != (num_rows,) or (num_rows and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"{OP}: trajectory_ids: expected {num_rows} integers, one per row, got {ids.dtype} of "
            f"shape {ids.shape}"
        )
    if num_rows and (ids.min() < -(2**31) or ids.max() > INT32_MAX):
        raise ValueError(f"{OP}: trajectory_ids: expected ids of 32 bits, got {int(ids.max())}")
    return ids.astype(np.int32)


def _flat_mask(field: _ragged.Field) -> torch.Tensor:
    cu = _ragged.offsets(field.lengths)
    mask = _backend.empty((int(cu[-1]),), torch.uint8)
    _ragged.fill(OP, _ragged.copy_jobs(field, mask, cu[:-1], 0, 1))
    return mask
