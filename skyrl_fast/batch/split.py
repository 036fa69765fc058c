"""Splits of a batch: mini-batches by prompts, micro-batches by tokens. N rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from skyrl_fast.batch.row_index import dense_ids, run_starts
from skyrl_fast.ops.passes.plan import balanced_parts


def mini_batch_boundaries(
    group_ids: Sequence[str] | Sequence[int] | torch.Tensor, mini_batch_size: int
) -> list[tuple[int, int]]:
    """Return the (start, end) rows of consecutive mini-batches of `mini_batch_size` prompts each.

    Args:
        group_ids: N, the prompt of each row.
        mini_batch_size: prompts per mini-batch; must divide their number.

    Raises:
        ValueError: rows of a prompt are not adjacent, or the size does not divide the prompts.

    Example:
        >>> mini_batch_boundaries(["p0"] * 4 + ["p1"] * 2 + ["p2"] * 3 + ["p3"] * 2, 2)
        [(0, 6), (6, 11)]
    """
    op = "mini_batch_boundaries"
    if mini_batch_size < 1:
        raise ValueError(f"{op}: mini_batch_size must be at least 1, got {mini_batch_size}")
    ids = dense_ids(group_ids)
    heads = np.flatnonzero(run_starts(ids))
    returned = np.flatnonzero(np.diff(ids[heads]) < 0)  # numbered by first appearance
    if returned.size:
        row = int(heads[returned[0] + 1])
        raise ValueError(
            f"{op}: rows of a prompt must be adjacent, but prompt {group_ids[row]!r} returns in "
            f"row {row}"
        )
    if len(heads) % mini_batch_size:
        raise ValueError(
            f"{op}: mini_batch_size must divide the number of prompts ({len(heads)}), "
            f"got {mini_batch_size}"
        )
    cuts = [*heads[::mini_batch_size].tolist(), len(ids)]
    return list(pairwise(cuts))


def split_micro_batches(
    lengths: Sequence[int] | np.ndarray,
    token_budget: int,
    *,
    num_ranks: int = 1,
    units: np.ndarray | None = None,
) -> list[list[np.ndarray]]:
    """Return, for each rank, equally many micro-batches: ascending row numbers.

    Rows are assigned longest first to the part with the smallest load (LPT rule, Graham 1969), with
    the fewest parts whose loads are within the budget. Deterministic.

    Args:
        lengths: N tokens of each row.
        token_budget: most tokens of a part, unless a single unit is longer.
        units: (N,) ints; rows with the same number stay together. None: rows are independent.

    Raises:
        ValueError: a budget or number of ranks below 1.

    Example:
        >>> split_micro_batches([5, 3, 2, 4], 7)
        [[array([0, 2]), array([1, 3])]]
    """
    op = "split_micro_batches"
    for name, value in (("token_budget", token_budget), ("num_ranks", num_ranks)):
        if value < 1:
            raise ValueError(f"{op}: {name} must be at least 1, got {value}")
    sizes = np.asarray(lengths, dtype=np.int64)
    unit_of_row = np.arange(len(sizes)) if units is None else dense_ids(units)
    loads = np.bincount(unit_of_row, weights=sizes).astype(np.int64)
    part_of_unit, num_parts = balanced_parts(loads, token_budget, multiple=num_ranks)
    part_of_row = part_of_unit[unit_of_row]
    order = np.argsort(part_of_row, kind="stable")
    cuts = np.searchsorted(part_of_row[order], np.arange(1, num_parts))
    parts = np.split(order, cuts)
    # Parts are numbered by decreasing load: dealing them in turn minimises the ranks' idle time.
    return [parts[rank::num_ranks] for rank in range(num_ranks)]
