"""Weights of rows in a loss. Shapes: N rows (steps), R padded cells, A ragged cells.

Design: docs/design/005-policy-loss.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend, _rows
from skyrl_fast.ops._offsets import check_offsets
from skyrl_fast.ops.policy_loss import reference

OP = "reduction_weights"
REDUCTIONS = (
    "token_mean",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "trajectory_mean",
)
NATIVE_MASKS = (torch.bool, torch.uint8, torch.int64, torch.float32)

SequenceScope = Literal["row", "trajectory"]
SCOPES = ("row", "trajectory")
RowIds = Sequence[str] | Sequence[int] | torch.Tensor

_library = torch.library.Library("skyrl_fast", "FRAGMENT")
# An operator, so that losses without given weights can be part of a compiled graph.
_library.define("mask_counts(Tensor loss_mask, Tensor? cu_seqlens) -> Tensor")


def reduction_weights(
    loss_mask: torch.Tensor,
    *,
    reduction: str,
    cu_seqlens: torch.Tensor | None = None,
    group_ids: RowIds | None = None,
    trajectory_ids: RowIds | None = None,
    max_seq_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the weight of each row's trained tokens in the loss.

    Compute them once, from a complete mini-batch without its padding rows, and pass each
    micro-batch those of its rows: the sum of the micro-batches' losses is then the mini-batch's
    loss, for any split. With m the trained tokens of a row, and N, P, J the rows, prompts,
    trajectories:

    "token_mean" 1 / sum m; "sequence_mean" 1 / (N m); "seq_mean_token_sum_norm" 1 / (N
    max_seq_len), Dr. GRPO, arXiv:2503.20783; "prompt_mean" 1 / (P sum of m over the prompt);
    "trajectory_mean" 1 / (J sum of m over the trajectory), so that trajectories have equal weight
    for any number of turns.

    Rows, prompts and trajectories without a trained token count in N, P and J (they are samples
    whose loss is 0); a denominator of 0 tokens becomes 1, so nothing is NaN.

    Args:
        loss_mask: (N, R) or, with `cu_seqlens`, (A,); a token is trained where it is not 0.
        reduction: see above.
        cu_seqlens: (N + 1,) offsets of the rows' cells.
        group_ids: N strings or ints, the prompt of each row; for "prompt_mean".
        trajectory_ids: N strings or ints; for "trajectory_mean".
        max_seq_len: for "seq_mean_token_sum_norm".
        dtype: dtype of the weights; float64 for losses of float64 log-probabilities.
        backend: "native", "torch", or None to choose.

    Returns:
        (N,) of `dtype`.

    Raises:
        ValueError: an unknown reduction, one whose ids or length are missing, or shapes that
            do not match.

    Example:
        >>> mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
        >>> reduction_weights(mask, reduction="sequence_mean")
        tensor([0.1667, 0.5000])
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"{OP}: reduction: expected one of {REDUCTIONS}, got {reduction!r}")
    if reduction == "seq_mean_token_sum_norm" and (max_seq_len is None or max_seq_len <= 0):
        raise ValueError(f"{OP}: {reduction} needs max_seq_len > 0, got {max_seq_len}")
    cu_seqlens = offsets_of_cells(OP, loss_mask, cu_seqlens)
    mask = native_mask(OP, loss_mask)
    chosen = _backend.select(OP, mask, backend=backend, transforms=("grad", "vmap"))
    if chosen == "native":
        counts = torch.ops.skyrl_fast.mask_counts(mask, cu_seqlens)
    else:
        counts = _mask_counts_torch(mask, cu_seqlens)
    # Not read by the reductions that have no segments.
    segment = counts
    num_segments = 0
    if reduction == "prompt_mean":
        segment, num_segments = segments_of(OP, "group_ids", group_ids, counts.numel(), reduction)
    elif reduction == "trajectory_mean":
        ids = trajectory_ids
        segment, num_segments = segments_of(OP, "trajectory_ids", ids, counts.numel(), reduction)
    weights = reference.reduction_weights(
        counts, reduction, _backend.to_device_of(segment, counts), num_segments, max_seq_len
    )
    return weights.to(dtype)


def offsets_of_cells(
    op: str, cells: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> torch.Tensor | None:
    """Return checked offsets as contiguous int32; None for padded cells."""
    if not isinstance(cells, torch.Tensor):
        raise TypeError(f"{op}: data: expected torch tensors, got {type(cells).__name__}")
    if cu_seqlens is None:
        if cells.dim() != 2:
            raise ValueError(
                f"{op}: data: expected (N, R), or (A,) with cu_seqlens, got shape "
                f"{tuple(cells.shape)} without cu_seqlens"
            )
        return None
    if cells.dim() != 1:
        raise ValueError(
            f"{op}: data: expected (A,) with cu_seqlens, got shape {tuple(cells.shape)}"
        )
    return check_offsets(op, "cu_seqlens", cu_seqlens, total=cells.shape[0])


def native_mask(op: str, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return the mask, contiguous and of a dtype that the kernels read."""
    if not isinstance(loss_mask, torch.Tensor):
        raise TypeError(f"{op}: loss_mask: expected a torch tensor, got {type(loss_mask).__name__}")
    # One comparison here instead of a kernel for every dtype.
    if loss_mask.dtype in NATIVE_MASKS:
        mask = loss_mask
    else:
        mask = loss_mask != 0
    return mask.detach().contiguous()


def segments_of(
    op: str, name: str, ids: RowIds | None, num_rows: int, needed_by: str
) -> tuple[torch.Tensor, int]:
    """Return (N,) int64 segment numbers, from 0, and the number of segments."""
    if ids is None:
        raise ValueError(f"{op}: {needed_by} needs {name}, got None")
    if isinstance(ids, torch.Tensor):
        if ids.is_floating_point():
            raise ValueError(f"{op}: {name}: expected ints or strings, got {ids.dtype}")
        segment = ids.reshape(-1).to(torch.int64)
        distinct, segment = torch.unique(segment, return_inverse=True)
        num_segments = distinct.numel()
    else:
        segment = _rows.dense_ids(op, name, ids)
        if len(segment):
            num_segments = int(segment.max()) + 1
        else:
            num_segments = 0
    if segment.numel() != num_rows:
        raise ValueError(f"{op}: {name}: expected {num_rows} entries, got {segment.numel()}")
    return segment, num_segments


def sequences_of(
    op: str, scope: str | None, trajectory_ids: RowIds | None, num_rows: int
) -> torch.Tensor | None:
    """Return (N,) int64, the sequence of each row; None where rows are (no ids, or scope "row")."""
    if scope not in (None, *SCOPES):
        raise ValueError(f"{op}: scope: expected one of {(None, *SCOPES)}, got {scope!r}")
    if scope == "row" or (scope is None and trajectory_ids is None):
        return None
    return segments_of(op, "trajectory_ids", trajectory_ids, num_rows, "scope='trajectory'")[0]


def _mask_counts(loss_mask: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    if cu_seqlens is None:
        num_rows = loss_mask.shape[0]
    else:
        num_rows = cu_seqlens.numel() - 1
    counts = loss_mask.new_zeros(num_rows, dtype=torch.int64)
    _C.mask_counts(loss_mask, cu_seqlens, counts, _backend.num_threads())
    return counts


def _mask_counts_torch(loss_mask: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    if cu_seqlens is None:
        return (loss_mask != 0).sum(1)
    row = reference.cell_row_ids(loss_mask, cu_seqlens)
    counts = row.new_zeros(cu_seqlens.numel() - 1)
    return counts.index_add_(0, row, (loss_mask != 0).long())


def _mask_counts_fake(loss_mask: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    if cu_seqlens is None:
        num_rows = loss_mask.shape[0]
    else:
        num_rows = cu_seqlens.shape[0] - 1
    return loss_mask.new_empty(num_rows, dtype=torch.int64)


_library.impl("mask_counts", _mask_counts, "CPU")
torch.library.register_fake("skyrl_fast::mask_counts", _mask_counts_fake, lib=_library)
