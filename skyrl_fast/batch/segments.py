"""Sums over the rows of flat arrays. N rows, S elements of all rows."""

from __future__ import annotations

from typing import Any

import numpy as np


def segment_sums(values: np.ndarray, offsets: np.ndarray, dtype: Any) -> np.ndarray:
    """Return (N,) sums of `values[offsets[i] : offsets[i + 1]]`; 0 for an empty segment."""
    sums = np.zeros(len(offsets) - 1, dtype=dtype)
    filled = np.flatnonzero(offsets[1:] > offsets[:-1])
    if filled.size:  # reduceat would give an empty segment its neighbour's value
        values = values[: offsets[-1]]
        sums[filled] = np.add.reduceat(values, offsets[filled], dtype=dtype)
    return sums
