"""Splits of a batch into mini-batches by prompts. N rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from skyrl_fast.batch.row_index import dense_ids, run_starts


def mini_batch_boundaries(
    group_ids: Sequence[str] | Sequence[int] | torch.Tensor, mini_batch_size: int
) -> list[tuple[int, int]]:
    """Return the (start, end) rows of consecutive mini-batches of `mini_batch_size` prompts each.

    Raises:
        ValueError: rows of a prompt are not adjacent, or the size does not divide the prompts.

    Example:
        >>> mini_batch_boundaries(["p0"] * 4 + ["p1"] * 2 + ["p2"] * 3 + ["p3"] * 2, 2)
        [(0, 6), (6, 11)]
    """
    op = "mini_batch_boundaries"
    if mini_batch_size < 1:
        raise ValueError(f"{op}: mini_batch_size: expected at least 1, got {mini_batch_size}")
    ids = dense_ids(group_ids)
    heads = np.flatnonzero(run_starts(ids))
    changes = np.diff(ids[heads])
    returned = np.flatnonzero(changes < 0)  # numbered by first appearance
    if returned.size:
        row = int(heads[returned[0] + 1])
        raise ValueError(
            f"{op}: rows: expected those of a prompt next to each other, got prompt "
            f"{group_ids[row]!r} again in row {row}"
        )
    if len(heads) % mini_batch_size:
        raise ValueError(
            f"{op}: mini_batch_size must divide the number of prompts ({len(heads)}), "
            f"got {mini_batch_size}"
        )
    starts = heads[::mini_batch_size].tolist()
    return list(pairwise([*starts, len(ids)]))
