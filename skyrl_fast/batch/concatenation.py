"""Concatenation of batches. N rows of all batches, G groups."""

from __future__ import annotations

from collections.abc import Sequence
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
        raise ValueError(f"{OP}: batches must not be empty")
    if len(batches) == 1:
        return batches[0].with_(**_routes(batches, batches[0].expert_indices))
    uids = tuple(uid for batch in batches for uid in batch.uids)
    if len(set(uids)) < len(uids):
        twice = next(uid for i, uid in enumerate(uids) if uid in uids[:i])
        raise ValueError(f"{OP}: uids must differ between batches, but {twice!r} is in two")
    columns: dict[str, Any] = {name: _join_column(batches, name) for name in COLUMNS}
    for name, counts in {
        "group_ids": [batch.num_groups for batch in batches],
        "trajectory_ids": [batch.num_trajectories for batch in batches],
    }.items():
        before = np.array([0, *np.cumsum(counts)[:-1]], dtype=np.int32)
        num_rows = [batch.num_rows for batch in batches]
        columns[name] += torch.from_numpy(before.repeat(num_rows))
    for name in ("cu_seqlens", "cu_responses"):
        columns[name] = offsets(torch.cat([getattr(batch, name).diff() for batch in batches]))
    columns |= _routes(batches, columns["expert_indices"])
    if columns["kept_ids"] is not None:
        columns["cu_kept"] = _row_offsets(batches, "cu_kept")
    reasons = [batch.stop_reasons for batch in batches]
    given = [values for values in reasons if values is not None]
    if given and len(given) < len(reasons):
        raise ValueError(f"{OP}: stop_reasons must be in all batches or in none")
    return StepBatch(
        **columns,
        uids=uids,
        stop_reasons=tuple(reason for values in given for reason in values) if given else None,
        reward_per_row=all(batch.reward_per_row for batch in batches),
    )


def _join_column(batches: Sequence[StepBatch], name: str) -> torch.Tensor | None:
    """Return one column of all rows, or None if no batch has it."""
    values = [getattr(batch, name) for batch in batches]
    if name == "num_kept" and any(value is not None for value in values):
        values = [  # 0: the vocabulary
            torch.zeros_like(batch.loss_mask, dtype=torch.int32) if value is None else value
            for batch, value in zip(batches, values, strict=True)
        ]
    if name == "rollout_logprobs":
        values = _logprobs(batches, values)
    # A batch without elements for it, e.g. of empty responses only, may lack the column.
    needed = [v for v, batch in zip(values, batches, strict=True) if _size(batch, name)]
    given = [value for value in values if value is not None]
    if not given or (needed and all(value is None for value in needed)):
        return None
    if any(value is None for value in needed):
        raise ValueError(f"{OP}: {name} must be in all batches or in none")
    return torch.cat(given)


def _logprobs(
    batches: Sequence[StepBatch], values: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the log-probabilities as all batches would have them together."""
    # Where all answers are empty, it is unknown whether the engine returns log-probabilities; the
    # observations of merged rows have 0 in either case.
    pairs = list(zip(batches, values, strict=True))
    trained = [value is not None for batch, value in pairs if batch.loss_mask.any()]
    if any(trained):  # a trained batch without them is an error
        return [
            value
            if value is not None or batch.loss_mask.any()
            else torch.zeros_like(batch.loss_mask, dtype=torch.float32)
            for batch, value in pairs
        ]
    absent = any(value is None and len(batch.loss_mask) for batch, value in pairs)
    return [None] * len(values) if absent else values


def _size(batch: StepBatch, name: str) -> int:
    """Return the number of entries that the column has, or would have."""
    per = COLUMNS[name][0]
    if per in ("expert", "kept"):
        value = getattr(batch, name)
        return 0 if value is None else len(value)
    counted = {"token": batch.tokens, "response": batch.loss_mask, "row": batch.group_ids}
    return len(counted[per])


def _routes(batches: Sequence[StepBatch], routes: torch.Tensor | None) -> dict[str, Any]:
    """Return the routes in the smallest sufficient dtype, and their offsets."""
    if routes is None or not len(routes):
        return {"expert_indices": None, "cu_experts": None}
    dtype = routes_dtype(int(routes.max()))
    return {
        "expert_indices": torch.from_numpy(routes.numpy().astype(dtype, copy=False)),
        "cu_experts": _row_offsets(batches, "cu_experts"),
    }


def _row_offsets(batches: Sequence[StepBatch], name: str) -> torch.Tensor:
    """Return (N + 1,) offsets of all rows; a batch without them has none of their elements."""
    given = [getattr(batch, name) for batch in batches]
    counts = [
        torch.zeros(batch.num_rows, dtype=torch.int64, device="cpu") if cu is None else cu.diff()
        for batch, cu in zip(batches, given, strict=True)
    ]
    return offsets(torch.cat(counts))
