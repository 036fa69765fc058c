"""Single-pass operations on rows of cells, on the CPU. N rows, R padded or A ragged cells.

Wrong dtypes, shapes, row numbers and offsets are ValueErrors.
"""

from __future__ import annotations

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend


def count_nonzeros(
    cells: torch.Tensor, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return each row's count of nonzero cells, its last nonzero cell, and how many are not 0 or 1.

    Args:
        cells: (N, R) float32, contiguous.
        rows: (M,) int64, the rows to read; None: all.

    Returns:
        (M,) int64; (M,) float32, 0 where all are 0; an int, over all these rows.
    """
    # For a row with at most one nonzero cell that cell is the row's exact sum.
    if rows is None:
        size = len(cells)
    else:
        size = len(rows)
    counts = torch.empty(size, dtype=torch.int64, device="cpu")
    lasts = torch.empty(size, dtype=torch.float32, device="cpu")
    others = _C.count_nonzeros(cells, rows, counts, lasts, _backend.num_threads())
    return counts, lasts, others


def sum_rows(cells: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return (N,) float64, the sum of `cells[cu_seqlens[i] : cu_seqlens[i + 1]]`; 0 where empty.

    Args:
        cells: (A,) float32, contiguous.
        cu_seqlens: (N + 1,) int32; may end before A.
    """
    sums = torch.empty(max(0, len(cu_seqlens) - 1), dtype=torch.float64, device="cpu")
    _C.sum_rows(cells, cu_seqlens, sums, _backend.num_threads())
    return sums


def divide_rows(cells: torch.Tensor, divisors: torch.Tensor, out: torch.Tensor) -> None:
    """Write cells / divisors to `out`.

    Args:
        cells, out: (N, R) float32, contiguous.
        divisors: (N,) float32, or (1,) for all rows.
    """
    _C.divide_rows(cells, divisors, out, _backend.num_threads())


def multiply_rows(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (N, R) float32 values * mask, and (N,) int64: how many mask cells are not 0.

    Args:
        values: (N,) float32.
        mask: (N, R) int64, contiguous.
    """
    out = _backend.empty(mask.shape, torch.float32)
    counts = torch.empty(len(mask), dtype=torch.int64, device="cpu")
    _C.multiply_rows(values, mask, out, counts, _backend.num_threads())
    return out, counts


def copy_cells(cells: torch.Tensor, out: torch.Tensor) -> None:
    """Write cells to `out`; large ones past the caches.

    Args:
        cells, out: of one shape and dtype, contiguous; neither a scalar.
    """
    # A dimension of size 1 may have any stride, but a view as bytes wants stride 1 in the last one.
    source, target = (t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in (cells, out))
    _C.copy_cells(source, target, _backend.num_threads())
