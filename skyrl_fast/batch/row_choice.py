"""Some rows of a `StepBatch`, or padding rows after them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from skyrl_fast.batch.fields import OFFSETS, OP, given

if TYPE_CHECKING:
    from skyrl_fast.batch.step_batch import StepBatch


def row_range(batch: StepBatch, start: int, stop: int) -> StepBatch:
    """Views of rows `start` to `stop` - 1."""
    changes: dict[str, Any] = {n: v[start:stop] for n, v in given(batch, "row").items()}
    for per, name_of_offsets in OFFSETS.items():
        cu = getattr(batch, name_of_offsets)
        if cu is None:
            continue
        first, last = int(cu[start]), int(cu[stop])
        changes |= {n: v[first:last] for n, v in given(batch, per).items()}
        changes[name_of_offsets] = cu[start : stop + 1] - first
    if batch.stop_reasons is not None:
        changes["stop_reasons"] = batch.stop_reasons[start:stop]
    changes["num_padding_rows"] = max(0, stop - max(start, batch.num_real_rows))
    return _renumbered(batch, changes)


def row_choice(batch: StepBatch, rows: torch.Tensor) -> StepBatch:
    """Copies of the chosen rows."""
    changes: dict[str, Any] = {n: v[rows] for n, v in given(batch, "row").items()}
    order = rows.tolist()
    for per, name_of_offsets in OFFSETS.items():
        cu = getattr(batch, name_of_offsets)
        if cu is None:
            continue
        starts, ends = cu[rows].tolist(), cu[rows + 1].tolist()
        for name, values in given(batch, per).items():
            # Slicing numpy costs a tenth of slicing torch, and there is a slice per row.
            array = values.numpy()
            pieces = [array[a:b] for a, b in zip(starts, ends, strict=True)]
            changes[name] = torch.from_numpy(np.concatenate(pieces)) if pieces else values[:0]
        changes[name_of_offsets] = torch.cat([cu[:1], cu.diff()[rows].cumsum(0).to(cu.dtype)])
    if batch.stop_reasons is not None:
        changes["stop_reasons"] = tuple(batch.stop_reasons[i] for i in order)
    padding = rows >= batch.num_real_rows
    num_padding = int(padding.sum())
    if num_padding and not bool(padding[-num_padding:].all()):
        raise ValueError(f"{OP}.rows: padding rows must come last")
    changes["num_padding_rows"] = num_padding
    return _renumbered(batch, changes)


def _renumbered(batch: StepBatch, changes: dict[str, Any]) -> StepBatch:
    groups, group_ids = torch.unique(changes["group_ids"], return_inverse=True)
    _, trajectory_ids = torch.unique(changes["trajectory_ids"], return_inverse=True)
    changes["group_ids"] = group_ids.to(torch.int32)
    changes["trajectory_ids"] = trajectory_ids.to(torch.int32)
    changes["uids"] = tuple(batch.uids[group] for group in groups.tolist())
    return dataclasses.replace(batch, **changes)


def row_numbers(batch: StepBatch, index: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
    """Return the row numbers that an index means: numbers, or (N,) bool."""
    rows = torch.as_tensor(index)
    if rows.dtype == torch.bool:
        if rows.shape != (batch.num_rows,):
            raise ValueError(
                f"{OP}.rows: a bool index must be of shape ({batch.num_rows},), "
                f"got {tuple(rows.shape)}"
            )
        return rows.nonzero()[:, 0]
    rows = rows.to(torch.int64).reshape(-1)
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= batch.num_rows):
        raise ValueError(
            f"{OP}.rows: row numbers must be from 0 to {batch.num_rows - 1}, got "
            f"{int(rows.min())} to {int(rows.max())}"
        )
    return rows


def with_padding_rows(batch: StepBatch, pad_size: int) -> StepBatch:
    """Return the batch with rows of one token after it, each alone in its group."""
    changes: dict[str, Any] = {
        name: torch.cat([value, value.new_zeros(pad_size)])
        for name, value in given(batch, "row").items()
    }
    more = torch.arange(pad_size, dtype=torch.int32)
    changes["group_ids"][-pad_size:] = batch.num_groups + more
    changes["trajectory_ids"][-pad_size:] = batch.num_trajectories + more
    changes["is_last_step"][-pad_size:] = True
    changes["tokens"] = torch.cat([batch.tokens, batch.tokens.new_zeros(pad_size)])
    changes["cu_seqlens"] = torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + 1 + more])
    for name in ("cu_responses", "cu_experts"):
        cu = getattr(batch, name)
        changes[name] = None if cu is None else torch.cat([cu, cu[-1:].expand(pad_size)])
    start = batch.num_padding_rows
    changes["uids"] = batch.uids + tuple(f"pad{start + i}" for i in range(pad_size))
    if batch.stop_reasons is not None:
        changes["stop_reasons"] = batch.stop_reasons + ("padding",) * pad_size
    changes["num_padding_rows"] = start + pad_size
    return dataclasses.replace(batch, **changes)


def padding_batch(batch: StepBatch) -> StepBatch:
    """One padding row, with the columns that `batch` has."""
    return with_padding_rows(row_range(batch, 0, 0), 1)
