"""Sums over the rows of flat arrays. N rows, S elements of all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from skyrl_fast.ops.pack.cell_rows import sum_rows


def segment_sums(values: np.ndarray, offsets: np.ndarray, dtype: Any) -> np.ndarray:
    """Return (N,) sums of `values[offsets[i] : offsets[i + 1]]`; 0 for an empty segment."""
    dtypes = (values.dtype, offsets.dtype, dtype)
    if dtypes == (np.float32, np.int32, np.float64):
        rows = sum_rows(torch.from_numpy(values), torch.from_numpy(offsets))
        return rows.numpy()
    num_rows = len(offsets) - 1
    sums = np.zeros(num_rows, dtype=dtype)
    is_filled = offsets[1:] > offsets[:-1]
    filled = np.flatnonzero(is_filled)
    if filled.size:  # reduceat returns the next segment's value for an empty one
        values = values[: offsets[-1]]
        sums[filled] = np.add.reduceat(values, offsets[filled], dtype=dtype)
    return sums
