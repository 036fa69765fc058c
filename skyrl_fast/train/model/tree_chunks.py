"""Chunks of rows that are processed together as trees; too large trees are cut.

N rows, n of them on trees, T nodes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from skyrl_fast.batch.split import split_micro_batches
from skyrl_fast.ops.prefix_tree.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """The n rows on a tree, group after group, depth first within a group.

    Args:
        rows: (n,) int64.
        shared: (n,) nodes that it shares with the row before it in its group; 0 for the first.
        borders: where groups begin but the first, ascending.
    """

    rows: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray
    borders: np.ndarray


def ordered_rows(tree: PrefixTree, group_ids: np.ndarray) -> OrderedRows:
    """Return the rows that are not empty, in the order in which cuts repeat fewest nodes.

    Args:
        group_ids: (N,) integers.
    """
    ends_at, lengths = row_ends(tree)
    rows = np.flatnonzero(lengths > 0)
    order = rows[np.lexsort((rows, ends_at[rows], group_ids[rows]))]
    shared = _shared(tree, order, ends_at)
    borders = np.flatnonzero(np.diff(group_ids[order])) + 1
    shared[borders] = 0
    return OrderedRows(order, lengths[order], shared, borders)


def tree_chunks(
    tree: PrefixTree,
    group_ids: np.ndarray,
    token_budget: int,
    *,
    trajectory_ids: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return the rows of each forward pass, ascending: balanced, with nodes within the budget.

    A group's rows stay together if their nodes are within the budget. A larger group is cut between
    rows that are adjacent in the tree, which repeats their shared path; the cuts minimise the total
    of repeated nodes. Trajectories whose rows are interleaved are processed one after the other.

    Args:
        group_ids: (N,) integers.
        token_budget: most nodes of a chunk; a longer row has a chunk of its own.
        trajectory_ids: (N,) integers: a trajectory's rows stay together; None: any split.
    """
    ordered = ordered_rows(tree, group_ids)
    order, lengths, shared = ordered.rows, ordered.lengths, ordered.shared
    pieces: list[np.ndarray] = []
    sizes: list[int] = []
    for group in np.split(np.arange(len(order)), ordered.borders):
        if len(group) == 0:
            continue
        fresh = np.cumsum(lengths[group] - shared[group])
        cuts = [0, len(group)]
        if fresh[-1] > token_budget:
            units = None if trajectory_ids is None else trajectory_ids[order[group]]
            cuts = cheapest_cuts(lengths[group], shared[group], token_budget, units)
        for first, last in pairwise(cuts):
            piece = order[group[first:last]]
            size = int(lengths[group[first]] + fresh[last - 1] - fresh[first])
            if size > token_budget and trajectory_ids is not None:
                for chunk, nodes in _by_trajectory(tree, piece, trajectory_ids, token_budget):
                    pieces.append(chunk)
                    sizes.append(nodes)
                continue
            pieces.append(piece)
            sizes.append(size)
    common = common_prefix(tree)  # once per chunk, however many groups it has
    if common >= token_budget:
        common = 0
    (chunks,) = split_micro_batches([size - common for size in sizes], token_budget - common)
    return [np.sort(np.concatenate([pieces[p] for p in chunk])) for chunk in chunks if len(chunk)]


def common_prefix(tree: PrefixTree) -> int:
    """Return the number of nodes that all rows on the tree share, such as a system prompt's."""
    reaches_end = tree.ends.numpy() == tree.num_nodes  # all nodes after it are below it
    chain = len(reaches_end) if reaches_end.all() else int(np.argmin(reaches_end))
    lengths = np.diff(tree.row_starts.numpy())
    return min(chain, int(lengths.min(initial=chain, where=lengths > 0)))


def _by_trajectory(
    tree: PrefixTree, rows: np.ndarray, trajectory_ids: np.ndarray, budget: int
) -> list[tuple[np.ndarray, int]]:
    """Return chunks of complete trajectories within the budget, with their numbers of nodes."""
    starts, nodes = tree.row_starts.tolist(), tree.row_nodes.numpy()
    row_trajectories = trajectory_ids[rows]
    chunks: list[tuple[np.ndarray, int]] = []
    chosen: list[np.ndarray] = []
    held = nodes[:0]
    for trajectory in dict.fromkeys(row_trajectories.tolist()):
        members = rows[row_trajectories == trajectory]
        paths = [nodes[starts[row] : starts[row + 1]] for row in members.tolist()]
        alone = np.unique(np.concatenate(paths))
        together = np.union1d(held, alone)
        if chosen and len(together) > budget:
            chunks.append((np.concatenate(chosen), len(held)))
            chosen, together = [], alone
        chosen.append(members)
        held = together
    return [*chunks, (np.concatenate(chosen), len(held))]


def cheapest_cuts(
    lengths: np.ndarray, common: np.ndarray, budget: int, units: np.ndarray | None = None
) -> list[int]:
    """Return where to cut n rows in depth-first order: 0, ascending borders, n.

    Minimises the repeated nodes, then the number of chunks. Linear in n: a queue holds the possible
    beginnings of the chunk that ends here, best first (a minimum over a sliding window).

    Args:
        common: (n,) nodes that a row shares with the row before it; 0 for the first.
        budget: most nodes of a chunk, unless an indivisible unit is larger.
        units: (n,) integers; no cut between rows of one unit. None: cuts anywhere.

    Example:
        >>> cheapest_cuts(np.array([4, 4, 4]), np.array([0, 3, 1]), budget=5)
        [0, 2, 3]
    """
    fresh = np.cumsum(lengths - common).tolist()
    sizes, shared = lengths.tolist(), common.tolist()
    places = _allowed(units, len(sizes))
    cost: list[tuple[int, int]] = [(0, 0)]  # repeated nodes and chunks before each place
    back = [0]
    window: deque[int] = deque()

    def with_path(number: int) -> tuple[int, int]:
        """Return the cost before a place, plus that of repeating the path of a chunk from there."""
        return cost[number][0] + shared[places[number]], cost[number][1]

    def size(number: int, last: int) -> int:
        first = places[number]
        return sizes[first] + fresh[last] - fresh[first]

    for number in range(1, len(places)):
        while window and with_path(window[-1]) > with_path(number - 1):
            window.pop()
        window.append(number - 1)
        while len(window) > 1 and size(window[0], places[number] - 1) > budget:
            window.popleft()
        repeated, chunks = with_path(window[0])
        cost.append((repeated, chunks + 1))
        back.append(window[0])
    cuts = [len(places) - 1]
    while cuts[-1] > 0:
        cuts.append(back[cuts[-1]])
    return [places[cut] for cut in reversed(cuts)]


def row_ends(tree: PrefixTree) -> tuple[np.ndarray, np.ndarray]:
    """Return (N,) the node of each row's last token (0 if it has none), and (N,) its length."""
    starts = tree.row_starts.numpy()
    lengths = np.diff(starts)
    ends_at = np.zeros(len(lengths), dtype=np.int64)
    filled = lengths > 0
    ends_at[filled] = tree.row_nodes.numpy()[starts[1:][filled] - 1]
    return ends_at, lengths


def _shared(tree: PrefixTree, order: np.ndarray, ends_at: np.ndarray) -> np.ndarray:
    """Return (n,) nodes that each row shares with the row before it in depth-first order.

    They are the nodes of its path up to the other's last node: the common ancestors. Found by a
    binary search in all paths at once.
    """
    starts, nodes = tree.row_starts.numpy(), tree.row_nodes.numpy()
    begins, before = starts[order[1:]], ends_at[order[:-1]]
    low, high = np.zeros_like(begins), starts[order[1:] + 1] - begins
    while (searching := low < high).any():
        middle = (low + high) // 2
        is_shared = searching & (nodes[np.where(searching, begins + middle, 0)] <= before)
        low = np.where(is_shared, middle + 1, low)
        high = np.where(searching & ~is_shared, middle, high)
    return np.concatenate([np.zeros(min(1, len(order)), dtype=np.int64), low])


def _allowed(units: np.ndarray | None, num_rows: int) -> list[int]:
    """Return 0, the places where no unit has rows on both sides, and the number of rows."""
    if units is None:
        return list(range(num_rows + 1))
    last = {unit: place for place, unit in enumerate(units.tolist())}
    places, reach = [0], 0
    for place, unit in enumerate(units.tolist()):
        reach = max(reach, last[unit])
        if reach == place:
            places.append(place + 1)
    return places
