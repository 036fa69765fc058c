"""Passes of trees: the reference against all possible cuts, and invariants of a plan."""

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from _reference_passes import cheapest_cuts, common_prefix
from _trees import ROWS, size_of, tree_of
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.batch import StepBatch
from skyrl_fast.train.model.micro_batch import plan_micro_batches


def common(rows: list[list[int]]) -> list[int]:
    shared = [0]
    for a, b in pairwise(rows):
        count = 0
        while count < min(len(a), len(b)) and a[count] == b[count]:
            count += 1
        shared.append(count)
    return shared


def test_by_hand() -> None:
    # Three rows of four; the first two share three nodes, the third one with them.
    lengths, shared = [4, 4, 4], [0, 3, 1]
    assert cheapest_cuts(lengths, shared, budget=8) == [0, 3]
    assert cheapest_cuts(lengths, shared, budget=5) == [0, 2, 3]
    assert cheapest_cuts(lengths, shared, budget=4) == [0, 1, 2, 3]
    assert cheapest_cuts(lengths, shared, budget=1) == [0, 1, 2, 3]  # each row exceeds the budget


@pytest.mark.spec("tree.micro-batches")
@given(rows=ROWS.filter(lambda rows: any(rows)), budget=st.integers(1, 14), data=st.data())
def test_no_other_cuts_repeat_fewer_nodes(rows: list[list[int]], budget: int, data: Any) -> None:
    rows = sorted(row for row in rows if row)  # as depth first, prefixes before what extends them
    units = None
    if data.draw(st.booleans()):
        units = [data.draw(st.integers(0, 3)) for _ in rows]
    free = [
        place
        for place in range(1, len(rows))
        if units is None or not set(units[:place]) & set(units[place:])
    ]

    def cost(cuts: tuple[int, ...]) -> tuple[int, int] | None:
        """Repeated nodes and chunks; None where a chunk is too large that could be smaller."""
        chunks = [rows[a:b] for a, b in pairwise((0, *cuts, len(rows)))]
        borders = {0, len(rows), *free}
        for first, last in pairwise((0, *cuts, len(rows))):
            indivisible = all(place not in borders for place in range(first + 1, last))
            if size_of(rows[first:last]) > budget and not indivisible:
                return None
        return sum(size_of(chunk) for chunk in chunks) - size_of(rows), len(chunks)

    costs = [
        value
        for count in range(len(free) + 1)
        for cuts in combinations(free, count)
        if (value := cost(cuts)) is not None
    ]
    lengths = [len(row) for row in rows]
    cuts = cheapest_cuts(lengths, common(rows), budget, units)
    assert cost(tuple(cuts[1:-1])) == min(costs)


def chunks_of(
    rows: list[list[int]], groups: list[int], budget: int, trajectory_ids: Any = None
) -> list[list[int]]:
    """Return the rows of each pass; a row's nodes are its tokens, as one more is trained."""
    count = len(rows)
    ends = torch.tensor([0, *(len(row) + 1 for row in rows)]).cumsum(0)
    units = range(count) if trajectory_ids is None else trajectory_ids
    batch = StepBatch(
        tokens=torch.tensor([t for row in rows for t in [*row, 9]], dtype=torch.int32),
        cu_seqlens=ends.to(torch.int32),
        cu_responses=torch.arange(count + 1, dtype=torch.int32),
        loss_mask=torch.tensor([bool(row) for row in rows], dtype=torch.uint8),
        rewards=torch.zeros(count),
        row_rewards=torch.zeros(count),
        group_ids=torch.tensor(groups, dtype=torch.int32),
        trajectory_ids=torch.tensor(list(units), dtype=torch.int32),
        is_last_step=torch.ones(count, dtype=torch.bool),
        policy_version=torch.zeros(count, dtype=torch.int32),
        uids=tuple(map(str, range(max(groups, default=-1) + 1))),
    )
    keep = trajectory_ids is not None
    plan = plan_micro_batches(batch, budget, tree=True, keep_trajectories=keep)
    return [micro.rows.tolist() for micro in plan]


def test_nodes_that_all_rows_share_count_once_per_part() -> None:
    rows = [[0] * 6 + [1 + group] * 2 for group in range(8)]
    groups = list(range(8))
    assert common_prefix(tree_of(rows), groups) == 6
    assert [len(chunk) for chunk in chunks_of(rows, groups, 14)] == [4, 4]
    assert [len(chunk) for chunk in chunks_of(rows, groups, 6)] == [1] * 8
    assert common_prefix(tree_of([[0, 0], [0], [], [0, 0, 1]]), [0, 1, 3]) == 1
    assert common_prefix(tree_of([[0, 0], [1]]), [0, 1]) == 0
    assert common_prefix(tree_of([[2, 3], [2, 3]]), [0, 1]) == 2
    assert common_prefix(tree_of([[], []]), []) == 0


def test_parts_are_balanced() -> None:
    rows = [[group] * 4 for group in range(12)]
    chunks = chunks_of(rows, list(range(12)), 20)
    assert [len(chunk) for chunk in chunks] == [4, 4, 4]


def test_interleaved_trajectories_are_added_one_by_one() -> None:
    # As rendered by a template for two answers: both first turns start with a thought, 9.
    rows = [[1, 9, 2], [1, 3, 4], [1, 9, 5], [1, 6, 7], [1, 9, 8], [1, 6, 10]]
    units = np.array([0, 0, 1, 1, 2, 2])
    one_chunk = [[0, 1, 2, 3, 4, 5]]
    assert chunks_of(rows, [0] * 6, 11, trajectory_ids=units) == one_chunk  # a tree of 11 nodes
    chunks = chunks_of(rows, [0] * 6, 8, trajectory_ids=units)
    assert sorted(chunks) == [[0, 1, 2, 3], [4, 5]]


def test_trajectories_stay_together() -> None:
    rows = [[1, 2, 3], [1, 4, 5], [1, 2, 6], [1, 4, 7]]
    units = np.array([0, 1, 0, 1])
    assert chunks_of(rows, [0] * 4, 4, trajectory_ids=units) == [[0, 2], [1, 3]]
    assert chunks_of(rows, [0] * 4, 3, trajectory_ids=units) == [[0, 2], [1, 3]]
    assert len(chunks_of(rows, [0] * 4, 3)) == 4
    mixed = np.array([0, 0, 1, 1])  # each has rows on both sides of the fork, and five nodes
    assert chunks_of(rows, [0] * 4, 4, trajectory_ids=mixed) == [[0, 1], [2, 3]]
