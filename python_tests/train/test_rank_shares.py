"""Assignment of micro-batches to ranks; docs/spec.md section 7."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.train.model.forward_pass import MicroBatch
from skyrl_fast.train.parallel.rank_shares import local_micro_batches
from skyrl_fast.train.parallel.ranks import Ranks

pytestmark = pytest.mark.spec("update.micro-batches")


def micros_of(lengths: list[int]) -> Callable[[int], list[MicroBatch]]:
    """Return a plan that fills micro-batches with rows of these lengths, in order."""

    def plan(budget: int) -> list[MicroBatch]:
        parts: list[list[int]] = []
        for row, length in enumerate(lengths):
            if not parts or sum(lengths[r] for r in parts[-1]) + length > budget:
                parts.append([])
            parts[-1].append(row)
        return [micro_of(part, sum(lengths[row] for row in part)) for part in parts]

    return plan


def micro_of(rows: list[int], num_tokens: int) -> MicroBatch:
    index = torch.arange(len(rows))
    ids = torch.zeros((1, num_tokens), dtype=torch.int64)
    return MicroBatch(ids, index, index, index, torch.tensor(rows))


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200), st.integers(2, 5))
def test_each_row_is_assigned_once_and_ranks_get_equal_numbers_of_passes(
    lengths: list[int], budget: int, size: int
) -> None:
    shares = [local_micro_batches(micros_of(lengths), budget, Ranks(r, size)) for r in range(size)]
    assert len({len(share) for share in shares}) == 1
    taken = [int(row) for share in shares for micro in share for row in micro.rows]
    assert sorted(taken) == list(range(len(lengths)))
    longest = max([budget, *lengths])
    assert all(micro.input_ids.numel() <= longest for share in shares for micro in share)


def test_no_pass_is_larger_than_the_budget() -> None:
    shares = [local_micro_batches(micros_of([1] * 1000), 8, Ranks(rank, 3)) for rank in range(3)]
    assert max(micro.input_ids.numel() for share in shares for micro in share) == 8


def test_batch_below_the_budget_is_shared() -> None:
    plan = micros_of([10] * 8)
    shares = [local_micro_batches(plan, 1000, Ranks(rank, 4)) for rank in range(4)]
    assert [[micro.input_ids.numel() for micro in share] for share in shares] == [[20]] * 4
    undivided = [local_micro_batches(plan, 1000, Ranks(r, 4), divisible=False) for r in range(4)]
    assert [[micro.input_ids.numel() for micro in share] for share in undivided] == [
        [80],
        *[[1]] * 3,
    ]
