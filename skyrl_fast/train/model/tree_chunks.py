"""Which rows go through the model together as trees, and where a tree too large is cut.

N rows, n of them on trees, T nodes.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import numpy as np

from skyrl_fast.batch.split import split_micro_batches
from skyrl_fast.ops.prefix_tree.tree import PrefixTree


def tree_parts(
    tree: PrefixTree,
    group_ids: np.ndarray,
    token_budget: int,
    *,
    trajectory_ids: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return the rows of each forward pass, ascending: balanced, of at most the budget's nodes.

    A group's rows stay together where their tree keeps to the budget. A larger one is cut between
    rows that stand next to each other in the tree, so that the path that they share is repeated:
    where the repeated nodes are fewest in total. Trajectories whose rows stand between each
    other's are taken one after the other.

    Args:
        tree: its empty rows go nowhere.
        group_ids: (N,) integers.
        token_budget: most nodes of a part; a row that alone is longer has a part of its own.
        trajectory_ids: (N,) integers: a trajectory's rows stay together; None: rows are free.
    """
    ends_at, lengths = row_ends(tree)
    rows = np.flatnonzero(lengths > 0)
    order = rows[np.lexsort((rows, ends_at[rows], group_ids[rows]))]
    shared = _shared(tree, order, ends_at)
    pieces: list[np.ndarray] = []
    sizes: list[int] = []
    borders = np.flatnonzero(np.diff(group_ids[order])) + 1
    for own in np.split(np.arange(len(order)), borders):
        if len(own) == 0:
            continue
        common = shared[own].copy()
        common[0] = 0
        fresh = np.cumsum(lengths[order[own]] - common)
        cuts = [0, len(own)]
        if fresh[-1] > token_budget:
            units = None if trajectory_ids is None else trajectory_ids[order[own]]
            cuts = cheapest_cuts(lengths[order[own]], common, token_budget, units)
        for first, last in pairwise(cuts):
            piece = order[own[first:last]]
            size = int(lengths[piece[0]] + fresh[last - 1] - fresh[first])
            if size > token_budget and trajectory_ids is not None:
                for part, nodes in _by_trajectory(tree, piece, trajectory_ids, token_budget):
                    pieces.append(part)
                    sizes.append(nodes)
                continue
            pieces.append(piece)
            sizes.append(size)
    (parts,) = split_micro_batches(sizes, token_budget)
    return [np.sort(np.concatenate([pieces[p] for p in part])) for part in parts if len(part)]


def _by_trajectory(
    tree: PrefixTree, rows: np.ndarray, trajectory_ids: np.ndarray, budget: int
) -> list[tuple[np.ndarray, int]]:
    """Return parts of whole trajectories, each of as many as the budget holds, with their nodes."""
    starts, nodes = tree.row_starts.tolist(), tree.row_nodes.numpy()
    of_row = trajectory_ids[rows]
    parts: list[tuple[np.ndarray, int]] = []
    chosen: list[np.ndarray] = []
    held = nodes[:0]
    for trajectory in dict.fromkeys(of_row.tolist()):
        own = rows[of_row == trajectory]
        paths = [nodes[starts[row] : starts[row + 1]] for row in own.tolist()]
        alone = np.unique(np.concatenate(paths))
        together = np.union1d(held, alone)
        if chosen and len(together) > budget:
            parts.append((np.concatenate(chosen), len(held)))
            chosen, together = [], alone
        chosen.append(own)
        held = together
    return [*parts, (np.concatenate(chosen), len(held))]


def cheapest_cuts(
    lengths: np.ndarray, common: np.ndarray, budget: int, units: np.ndarray | None = None
) -> list[int]:
    """Return where to cut n rows in depth-first order: 0, ascending borders, n.

    The repeated nodes are fewest, then the parts. Linear in n: a queue holds the places where the
    part that ends here may begin, best first (a minimum over a sliding window).

    Args:
        lengths: (n,) of the rows.
        common: (n,) how many nodes a row shares with the row before it; 0 for the first.
        budget: most nodes of a part, unless what may not be cut is larger.
        units: (n,) integers; no cut between rows of one unit. None: everywhere.

    Example:
        >>> cheapest_cuts(np.array([4, 4, 4]), np.array([0, 3, 1]), budget=5)
        [0, 2, 3]
    """
    fresh = np.cumsum(lengths - common).tolist()
    own, shared = lengths.tolist(), common.tolist()
    places = _allowed(units, len(own))
    cost: list[tuple[int, int]] = [(0, 0)]  # repeated nodes and parts before each place
    back = [0]
    window: deque[int] = deque()

    def with_path(number: int) -> tuple[int, int]:
        """Return the cost before a place, and of repeating the path of a part that begins there."""
        return cost[number][0] + shared[places[number]], cost[number][1]

    def size(number: int, last: int) -> int:
        first = places[number]
        return own[first] + fresh[last] - fresh[first]

    for number in range(1, len(places)):
        while window and with_path(window[-1]) > with_path(number - 1):
            window.pop()
        window.append(number - 1)
        while len(window) > 1 and size(window[0], places[number] - 1) > budget:
            window.popleft()
        repeated, parts = with_path(window[0])
        cost.append((repeated, parts + 1))
        back.append(window[0])
    cuts = [len(places) - 1]
    while cuts[-1] > 0:
        cuts.append(back[cuts[-1]])
    return [places[cut] for cut in reversed(cuts)]


def row_ends(tree: PrefixTree) -> tuple[np.ndarray, np.ndarray]:
    """Return (N,) the node of each row's last token (0 where it has none), and its length."""
    starts = tree.row_starts.numpy()
    lengths = np.diff(starts)
    ends_at = np.zeros(len(lengths), dtype=np.int64)
    filled = lengths > 0
    ends_at[filled] = tree.row_nodes.numpy()[starts[1:][filled] - 1]
    return ends_at, lengths


def _shared(tree: PrefixTree, order: np.ndarray, ends_at: np.ndarray) -> np.ndarray:
    """Return (n,) how many nodes each row shares with the row before it in depth-first order.

    Those of its path that come no later than the other's last node: they lie above both.
    """
    starts, nodes = tree.row_starts.tolist(), tree.row_nodes.numpy()
    shared = np.zeros(len(order), dtype=np.int64)
    for place in range(1, len(order)):
        row = int(order[place])
        path = nodes[starts[row] : starts[row + 1]]
        shared[place] = np.searchsorted(path, ends_at[order[place - 1]], side="right")
    return shared


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
