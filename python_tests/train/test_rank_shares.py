"""Assignment of micro-batches to ranks; docs/spec.md section 7."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.train.parallel.rank_shares import local_micro_batches
from skyrl_fast.train.parallel.ranks import Ranks

pytestmark = pytest.mark.spec("update.micro-batches")


class Passes:
    """Passes of rows by their numbers of tokens, like `MicroBatches`."""

    def __init__(self, passes: list[list[int]], lengths: list[int]) -> None:
        self.passes, self.lengths = passes, lengths

    def __len__(self) -> int:
        return len(self.passes)

    @property
    def num_tokens(self) -> np.ndarray:
        sizes = [sum(self.lengths[row] for row in rows) for rows in self.passes]
        return np.array([max(1, size) for size in sizes], dtype=np.int64)

    def choose(self, places: np.ndarray) -> Passes:
        return Passes([self.passes[i] if i >= 0 else [] for i in places.tolist()], self.lengths)


def passes_of(lengths: list[int]) -> Any:
    """Return a plan that fills passes with rows of these lengths, in order."""

    def plan(budget: int) -> Passes:
        parts: list[list[int]] = []
        for row, length in enumerate(lengths):
            if not parts or sum(lengths[r] for r in parts[-1]) + length > budget:
                parts.append([])
            parts[-1].append(row)
        return Passes(parts, lengths)

    return plan


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200), st.integers(2, 5))
def test_each_row_is_assigned_once_and_ranks_get_equal_numbers_of_passes(
    lengths: list[int], budget: int, size: int
) -> None:
    shares = [local_micro_batches(passes_of(lengths), budget, Ranks(r, size)) for r in range(size)]
    assert len({len(share) for share in shares}) == 1
    taken = [row for share in shares for rows in share.passes for row in rows]
    assert sorted(taken) == list(range(len(lengths)))
    longest = max([budget, *lengths])
    assert all(size <= longest for share in shares for size in share.num_tokens.tolist())


def test_no_pass_is_larger_than_the_budget() -> None:
    shares = [local_micro_batches(passes_of([1] * 1000), 8, Ranks(rank, 3)) for rank in range(3)]
    assert max(int(share.num_tokens.max()) for share in shares) == 8


def test_batch_below_the_budget_is_shared() -> None:
    plan = passes_of([10] * 8)
    shares = [local_micro_batches(plan, 1000, Ranks(rank, 4)) for rank in range(4)]
    assert [share.num_tokens.tolist() for share in shares] == [[20]] * 4
    undivided = [local_micro_batches(plan, 1000, Ranks(r, 4), divisible=False) for r in range(4)]
    assert [share.num_tokens.tolist() for share in undivided] == [[80], [1], [1], [1]]
