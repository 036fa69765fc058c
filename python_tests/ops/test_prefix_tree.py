"""Prefix trees: cases by hand, every backend against the reference, invariants."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from _trees import ROWS, flat, tree_of
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.ops.prefix_tree.tree import (
    PrefixTree,
    ancestor_mask,
    build_prefix_tree,
    prefix_tree_size,
)


def assert_same_tree(one: PrefixTree, two: PrefixTree) -> None:
    """Assert equality except for `sources`, where any token of the node is valid."""
    for name in PrefixTree.__slots__:
        if name != "sources":
            left, right = getattr(one, name), getattr(two, name)
            assert left.dtype == right.dtype, name
            assert left.tolist() == right.tolist(), name


@pytest.mark.parametrize(
    ("rows", "tokens", "parents", "ends"),
    [
        ([], [], [], []),
        ([[]], [], [], []),
        ([[5]], [5], [-1], [1]),
        ([[5], [5]], [5], [-1], [1]),
        ([[5], [6]], [5, 6], [-1, -1], [1, 2]),
        ([[1, 2, 3], [1, 2, 4]], [1, 2, 3, 4], [-1, 0, 1, 1], [4, 4, 3, 4]),
        ([[1, 2], [1, 2, 3]], [1, 2, 3], [-1, 0, 1], [3, 3, 3]),  # a prefix of a later row
        ([[1, 2, 3], [], [1]], [1, 2, 3], [-1, 0, 1], [3, 3, 3]),
        # two forks on one path, the lower one found first
        ([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]], [1, 2, 3, 4, 5, 6], [-1, 0, 1, 2, 2, 0],
         [6, 5, 5, 4, 5, 6]),
        # children are in the order of their first rows, whatever their lengths
        ([[1, 2], [1, 3, 3, 3]], [1, 2, 3, 3, 3], [-1, 0, 0, 2, 3], [5, 2, 5, 5, 5]),
    ],
)  # fmt: skip
def test_by_hand(
    backend: str, rows: list[list[int]], tokens: list[int], parents: list[int], ends: list[int]
) -> None:
    tree = tree_of(rows, backend=backend)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == (tokens, parents)
    assert tree.ends.tolist() == ends


@pytest.mark.spec("tree.nodes")
def test_each_group_has_its_own_tree(backend: str) -> None:
    rows = [[1, 2], [1, 2], [1, 3], [1, 2, 4]]
    tree = tree_of(rows, ["b", "a", "b", "a"], backend=backend)  # groups need not be adjacent
    assert tree.group_starts.tolist() == [0, 3, 6]
    assert tree.tokens.tolist() == [1, 2, 3, 1, 2, 4]
    assert tree.parents.tolist() == [-1, 0, 0, -1, 3, 4]
    assert [tree.nodes_of(row).tolist() for row in range(4)] == [[0, 1], [3, 4], [0, 2], [3, 4, 5]]


@pytest.mark.spec("tree.nodes")
@given(rows=ROWS, data=st.data())
def test_backends_agree(rows: list[list[int]], data: Any) -> None:
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    lengths = [data.draw(st.integers(0, len(row))) for row in rows]
    native = tree_of(rows, groups, lengths=lengths)
    assert_same_tree(native, tree_of(rows, groups, lengths=lengths, backend="torch"))
    tokens, _ = flat(rows)
    assert native.tokens.tolist() == tokens[native.sources].tolist()


@given(rows=ROWS, data=st.data())
def test_backends_agree_with_labels(rows: list[list[int]], data: Any) -> None:
    counts = [data.draw(st.integers(0, len(row))) for row in rows]
    total = sum(counts)
    cells = data.draw(st.lists(st.integers(0, 1), min_size=total, max_size=total))
    labels = torch.tensor(cells, dtype=torch.uint8)[:, None].expand(total, 3).contiguous()
    cu = torch.tensor(np.concatenate([[0], np.cumsum(counts)]), dtype=torch.int32)
    options = {"labels": labels, "cu_labels": cu}
    native = tree_of(rows, **options)
    assert_same_tree(native, tree_of(rows, **options, backend="torch"))


def assert_tree_of(tree: PrefixTree, rows: Sequence[Sequence[int]], groups: Sequence[int]) -> None:
    """Assert that it is the tree of these rows."""
    beginnings = {
        (group, tuple(row[: i + 1]))
        for group, row in zip(groups, rows, strict=True)
        for i in range(len(row))
    }
    assert tree.num_nodes == len(beginnings)
    below = tree.parents >= 0
    parents = tree.parents[below].long()
    assert bool((parents < below.nonzero()[:, 0]).all())  # depth first: parents come first
    assert tree.positions[below].tolist() == (tree.positions[parents] + 1).tolist()
    for row, tokens in enumerate(rows):
        nodes = tree.nodes_of(row)
        assert tree.tokens[nodes].tolist() == tokens
        assert tree.parents[nodes].tolist() == [-1, *nodes.tolist()][: len(nodes)]
        assert tree.positions[nodes].tolist() == list(range(len(nodes)))
    mask = ancestor_mask(tree.ends)
    for node in range(tree.num_nodes):
        above, up = set(), node
        while up >= 0:
            above.add(up)
            up = int(tree.parents[up])
        assert set(mask[node].nonzero().flatten().tolist()) == above


@given(rows=ROWS)
def test_tree_invariants(rows: list[list[int]]) -> None:
    tree = tree_of(rows)
    assert_tree_of(tree, rows, [0] * len(rows))
    assert prefix_tree_size(*flat(rows)) == tree.num_nodes


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000])
def test_long_rows_in_many_groups(size: int, threads: int) -> None:
    rng = np.random.default_rng(size)
    rows, groups = [], []
    for group in range(7):
        stem = rng.integers(0, 100, size).tolist()
        for _ in range(5):
            cut = int(rng.integers(0, size + 1))
            rows.append(stem[:cut] + rng.integers(0, 3, int(rng.integers(0, size))).tolist())
            groups.append(group)
    order = rng.permutation(len(rows)).tolist()
    rows, groups = [rows[i] for i in order], [groups[i] for i in order]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        native = tree_of(rows, groups)
    finally:
        torch.set_num_threads(before)
    assert_same_tree(native, tree_of(rows, groups, backend="torch"))


def test_result_does_not_depend_on_token_and_offset_dtypes() -> None:
    rows = [[1, 2, 3], [1, 2, 4]]
    tokens, cu = flat(rows)
    for ids in (tokens, tokens.long()):
        for offsets in (cu, cu.int()):
            assert_same_tree(build_prefix_tree(ids, offsets), tree_of(rows))


def test_thousand_children_of_one_node() -> None:
    rows = [[0, i] for i in range(1000)]
    tree = tree_of(rows)
    assert tree.num_nodes == 1001
    assert tree.parents.tolist() == [-1] + [0] * 1000


def test_labels_fork_what_tokens_share(backend: str) -> None:
    rows = [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
    labels = torch.tensor([[7, 8, 7, 9, 7, 8]], dtype=torch.int16).t()  # strides (1, 6)
    cu = torch.tensor([0, 2, 4, 6])
    tree = tree_of(rows, labels=labels, cu_labels=cu, backend=backend)
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3]
    assert tree.nodes_of(0).tolist() == tree.nodes_of(2).tolist() == [0, 1, 2]
    # a token without a label equals only others without
    shorter = tree_of(rows, labels=labels[:5], cu_labels=torch.tensor([0, 2, 4, 5]),
                      backend=backend)  # fmt: skip
    assert shorter.nodes_of(2).tolist() == [0, 5, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(3)}, "tokens: expected"),
        ({"tokens": torch.tensor([1, 2**31, 3])}, "ids of 32 bits, got 2147483648"),
        ({"tokens": torch.tensor([1, 2, -(2**31) - 1])}, "ids of 32 bits, got -2147483649"),
        ({"cu_seqlens": torch.tensor([0, 2])}, "cu_seqlens: expected non-decr"),
        ({"cu_seqlens": torch.tensor([0, 4, 3])}, "cu_seqlens: expected non-decr"),
        ({"group_ids": [0]}, "group_ids: expected 2"),
        ({"lengths": [1, 9]}, "lengths: expected 2"),
        ({"lengths": [1]}, "lengths: expected 2"),
        ({"labels": torch.zeros(3, 1)}, "expected labels and cu_labels together"),
        ({"labels": torch.zeros(3, 0), "cu_labels": torch.tensor([0, 1, 3])}, "of cells"),
        ({"labels": torch.zeros(3, 1), "cu_labels": torch.tensor([0, 3])}, "of 2 rows"),
    ],
)
def test_invalid_arguments(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "tokens": torch.tensor([1, 2, 3]),
        "cu_seqlens": torch.tensor([0, 1, 3]),
    }
    with pytest.raises(ValueError, match=message):
        build_prefix_tree(**(arguments | change))


def test_result_is_deterministic() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 2, 20).tolist() for _ in range(50)]
    first = tree_of(rows)
    for _ in range(3):
        again = tree_of(rows)
        assert_same_tree(first, again)
        assert first.sources.tolist() == again.sources.tolist()
