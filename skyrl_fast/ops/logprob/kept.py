"""Kept sets: the ids that truncated sampling kept in each row. M rows, V vocab, K ids of all rows.

The engine normalises over these ids alone (top_p, top_k, min_p), and so must the trainer, or the
ratio of unchanged weights is the kept mass instead of 1.

Design: docs/design/004-logprob.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend
from skyrl_fast.ops._offsets import check_offsets

Tensor = torch.Tensor


class KeptSets(NamedTuple):
    """The kept ids of rows.

    Args:
        ids: (K,) int32, strictly ascending within a row.
        ranges: (M, 2) int64, where a row's ids begin and end; begin -1: the full vocabulary.
    """

    ids: Tensor
    ranges: Tensor

    def of_rows(self, rows: Tensor | slice) -> KeptSets:
        # The ids stay where they are: a range says which are the row's.
        return KeptSets(self.ids, self.ranges[rows])

    @property
    def sizes(self) -> Tensor:
        """(M,) int64, the number of each row's ids; 0 for the full vocabulary."""
        begin, end = self.ranges.unbind(1)
        return torch.where(begin < 0, 0, end - begin)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return row and place in `ids` of each id of these rows, both int64."""
        sizes = self.sizes
        rows = torch.repeat_interleave(torch.arange(sizes.numel(), device=sizes.device), sizes)
        # Where a row's ids begin, less how many come before them in the result.
        first = self.ranges[:, 0] - (sizes.cumsum(0) - sizes)
        return rows, torch.arange(rows.numel(), device=rows.device) + first[rows]


def kept_sets(
    op: str, kept_ids: Tensor | None, cu_kept: Tensor | None, target_ids: Tensor
) -> KeptSets | None:
    """Return the sets of the rows of `target_ids`, in flattened order; None without `kept_ids`."""
    if kept_ids is None and cu_kept is None:
        return None
    if kept_ids is None or cu_kept is None:
        raise ValueError(
            f"{op}: expected kept_ids and cu_kept together, got kept_ids="
            f"{'None' if kept_ids is None else 'ids'} and cu_kept="
            f"{'None' if cu_kept is None else 'offsets'}"
        )
    if not isinstance(kept_ids, Tensor):
        raise TypeError(f"{op}: kept_ids: expected a torch tensor, got {type(kept_ids).__name__}")
    if kept_ids.dim() != 1 or kept_ids.dtype != torch.int32:
        raise ValueError(
            f"{op}: kept_ids: expected (K,) int32, got {tuple(kept_ids.shape)} {kept_ids.dtype}"
        )
    total = kept_ids.shape[0]
    num_rows = target_ids.numel()
    cu = check_offsets(op, "cu_kept", cu_kept, total=total, num_rows=num_rows, dtype=torch.int64)
    cu = _backend.to_device_of(cu, kept_ids)
    begin = cu[:-1]
    end = cu[1:]
    # A row without ids was sampled from the full vocabulary.
    ranges = torch.stack([torch.where(begin == end, -1, begin), end], dim=1)
    return KeptSets(kept_ids.detach().contiguous(), ranges)


def check_kept(
    op: str, kept: KeptSets | None, targets: Tensor, keep: Tensor | None, vocab: int
) -> None:
    """Check the sets of rows of mask 1, on the CPU only: on a GPU wrong ones give NaN.

    Args:
        targets: (M,) int64. keep: (M,) uint8, or None.
    """
    if kept is not None and _backend.device_kind(targets.device) == "cpu":
        _C.check_kept_sets(op, targets, keep, *kept, vocab)


def slice_sets(kept: KeptSets, start: int, width: int) -> KeptSets:
    """Return the parts of the sets in a slice of the vocabulary, with ids relative to it."""
    # Nothing here waits for a GPU. A row whose set has no id in the slice gets a range without ids.
    # Rows with the full vocabulary (begin -1) are restored at the end.
    # Clamped, as on a GPU nothing has checked them: a range must stay inside the ids.
    begin, end = kept.ranges.clamp(0, kept.ids.numel()).unbind(1)

    def first_at_least(limit: int) -> Tensor:
        # Counting by one cumulative sum of all ids needs neither a search per row nor a length on
        # the host.
        below = torch.nn.functional.pad((kept.ids < limit).cumsum(0), (1, 0))
        return begin + below[end] - below[begin]

    parts = torch.stack([first_at_least(start), first_at_least(start + width)], 1)
    return KeptSets(kept.ids - start, torch.where(kept.ranges[:, :1] < 0, kept.ranges, parts))
