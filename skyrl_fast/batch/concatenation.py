"""Concatenation of batches. N rows of all batches, G groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch.columns import offsets, routes_dtype
from skyrl_fast.batch.step_batch import COLUMNS, StepBatch

OP = "concatenate"


def concatenate(batches: Sequence[StepBatch]) -> StepBatch:
    """Return the rows of all batches, in order; groups of different batches stay separate.

    Args:
        batches: at least one, on the CPU.

    Raises:
        ValueError: no batches, a uid in two batches, or a column that is missing in
            some of the batches with tokens for it.
    """
    if not batches:
        raise ValueError(f"{OP}: batches: expected at least one, got none")
    if len(batches) == 1:
        (only,) = batches
        return only.with_(**_routes(batches, only.expert_indices))
    uids: dict[str, None] = {}
    for batch in batches:
        for uid in batch.uids:
            if uid in uids:
                raise ValueError(f"{OP}: uids: expected different ones, got {uid!r} in two batches")
            uids[uid] = None
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        columns[name] = _join_column(batches, name)
    num_groups = [batch.num_groups for batch in batches]
    columns["group_ids"] += _numbers_before(batches, num_groups)
    counts = [batch.num_trajectories for batch in batches]
    columns["trajectory_ids"] += _numbers_before(batches, counts)
    for name in ("cu_seqlens", "cu_responses"):
        lengths = []
        for batch in batches:
            lengths.append(getattr(batch, name).diff())
        columns[name] = offsets(torch.cat(lengths))
    columns |= _routes(batches, columns["expert_indices"])
    if columns["kept_ids"] is not None:
        columns["cu_kept"] = _row_offsets(batches, "cu_kept")
    reasons = [batch.stop_reasons for batch in batches]
    given = [values for values in reasons if values is not None]
    if given and len(given) < len(reasons):
        raise ValueError(
            f"{OP}: stop_reasons: expected them in all batches or in none, got {len(given)} of "
            f"{len(reasons)} with them"
        )
    stop_reasons = None
    if given:
        stop_reasons = tuple(chain.from_iterable(given))
    return StepBatch(
        **columns,
        uids=tuple(uids),
        stop_reasons=stop_reasons,
        reward_per_row=all(batch.reward_per_row for batch in batches),
    )


def _numbers_before(batches: Sequence[StepBatch], counts: Sequence[int]) -> torch.Tensor:
    """Return (N,) int32, for each row the sum of the counts of all batches before its own."""
    sums = np.cumsum(counts)
    earlier = sums[:-1]
    before = np.array([0, *earlier], dtype=np.int32)
    num_rows = [batch.num_rows for batch in batches]
    return torch.from_numpy(before.repeat(num_rows))


def _join_column(batches: Sequence[StepBatch], name: str) -> torch.Tensor | None:
    """Return one column of all rows, or None if no batch has it."""
    values = [getattr(batch, name) for batch in batches]
    is_given = any(value is not None for value in values)
    if name == "num_kept" and is_given:
        for place, batch in enumerate(batches):
            if values[place] is None:  # 0: the vocabulary
                vocabulary = torch.zeros_like(batch.loss_mask, dtype=torch.int32)
                values[place] = vocabulary
    if name == "rollout_logprobs":
        values = _logprobs(batches, values)
    # A batch without elements for it, e.g. of empty responses only, may lack the column.
    needed = []
    for value, batch in zip(values, batches, strict=True):
        if _size(batch, name):
            needed.append(value)
    given = [value for value in values if value is not None]
    num_missing = sum(value is None for value in needed)
    if not given or (needed and num_missing == len(needed)):
        return None
    if num_missing:
        raise ValueError(
            f"{OP}: {name}: expected it in all batches or in none, got {num_missing} of "
            f"{len(needed)} without it"
        )
    return torch.cat(given)


def _logprobs(
    batches: Sequence[StepBatch], values: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the log-probabilities as all batches would have them together."""
    # Where all answers are empty, it is unknown whether the engine returns log-probabilities; the
    # observations of merged rows have 0 in either case.
    pairs = list(zip(batches, values, strict=True))
    trained = []
    for batch, value in pairs:
        if batch.loss_mask.any():
            trained.append(value is not None)
    if any(trained):  # a trained batch without them is an error
        filled: list[torch.Tensor | None] = []
        for batch, value in pairs:
            if value is None and not batch.loss_mask.any():
                nothing = torch.zeros_like(batch.loss_mask, dtype=torch.float32)
                filled.append(nothing)
            else:
                filled.append(value)
        return filled
    for batch, value in pairs:
        if value is None and len(batch.loss_mask):
            return [None] * len(values)
    return values


def _size(batch: StepBatch, name: str) -> int:
    """Return the number of entries that the column has, or would have."""
    per = COLUMNS[name][0]
    if per in ("expert", "kept"):
        value = getattr(batch, name)
        if value is None:
            return 0
        return len(value)
    counted = {"token": batch.tokens, "response": batch.loss_mask, "row": batch.group_ids}
    return len(counted[per])


def _routes(batches: Sequence[StepBatch], routes: torch.Tensor | None) -> dict[str, Any]:
    """Return the routes in the smallest sufficient dtype, and their offsets."""
    if routes is None or not len(routes):
        return {"expert_indices": None, "cu_experts": None}
    dtype = routes_dtype(int(routes.max()))
    narrowed = routes.numpy().astype(dtype, copy=False)
    return {
        "expert_indices": torch.from_numpy(narrowed),
        "cu_experts": _row_offsets(batches, "cu_experts"),
    }


def _row_offsets(batches: Sequence[StepBatch], name: str) -> torch.Tensor:
    """Return (N + 1,) offsets of all rows; a batch without them has none of their elements."""
    counts = []
    for batch in batches:
        cu = getattr(batch, name)
        if cu is None:
            nothing = torch.zeros(batch.num_rows, dtype=torch.int64, device="cpu")
            counts.append(nothing)
        else:
            counts.append(cu.diff())
    return offsets(torch.cat(counts))
