"""Forward passes of a batch in plain Python: what `plan_micro_batches` must return.

N rows, n of them on a tree in depth-first order, T nodes, M trained tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.ops.prefix_tree.tree import PrefixTree, build_prefix_tree
from skyrl_fast.train.model.forward_pass import MicroBatch, NodeTree
from skyrl_fast.train.model.row_layout import LayoutCosts

PASS_SHARE = 1 / 32


class ReferencePasses:
    """The rows of a batch as lists; `passes` plans them."""

    def __init__(self, batch: StepBatch, visited: np.ndarray, replay: bool) -> None:
        cu, cu_responses = batch.cu_seqlens.tolist(), batch.cu_responses.tolist()
        self.batch, self.replay = batch, replay
        self.rows = [batch.tokens[a:b].tolist() for a, b in pairwise(cu)]
        self.begins = cu_responses
        masks = [batch.trained_mask[a:b].tolist() for a, b in pairwise(cu_responses)]
        self.prompts = [len(row) - len(mask) for row, mask in zip(self.rows, masks, strict=True)]
        self.trained = [[i for i, on in enumerate(mask) if on] for mask in masks]
        self.visited = [row for row in range(len(self.rows)) if visited[row] and self.trained[row]]
        self.groups = batch.group_ids.tolist()
        self.trajectories = batch.trajectory_ids.tolist()
        self.needed = [0] * len(self.rows)  # tokens before the last trained one
        for row in self.visited:
            self.needed[row] = self.prompts[row] + self.trained[row][-1]
        self.routes: list[torch.Tensor] = []
        if replay:
            assert batch.expert_indices is not None and batch.cu_experts is not None
            bounds = pairwise(batch.cu_experts.tolist())
            self.routes = [batch.expert_indices[a:b] for a, b in bounds]
        self.kept: list[tuple[int, ...]] | None = None
        if batch.num_kept is not None and batch.kept_ids is not None:
            ends = np.cumsum(batch.num_kept.numpy())
            bounds = pairwise([0, *ends.tolist()])
            self.kept = [tuple(batch.kept_ids[a:b].tolist()) for a, b in bounds]

    def passes(
        self,
        budget: int,
        *,
        keep: bool = False,
        tree: bool = False,
        costs: LayoutCosts | None = None,
        limits: Sequence[int] = (),
    ) -> list[MicroBatch]:
        """Return the passes, trees first."""
        passes: list[MicroBatch] = []
        if tree and self.visited:
            nodes = self.tree()
            groups = {self.groups[row] for row in self.visited}
            if costs is not None:
                groups = {group for group in groups if self.is_cheaper(nodes, group, costs)}
            as_trees = [row for row in self.visited if self.groups[row] in groups]
            self.visited = [row for row in self.visited if self.groups[row] not in groups]
            units = self.trajectories if keep else None
            chunks = tree_chunks(nodes, as_trees, self.groups, budget, units)
            passes += [self.tree_pass(nodes, rows) for rows in chunks]
        exceeded = [sum(len(row) > limit for limit in limits) for row in self.rows]
        hosts = self.hosts(exceeded)
        units = self.trajectories if keep else list(range(len(self.rows)))
        members: dict[int, dict[int, list[int]]] = {}
        for row in self.visited:
            members.setdefault(units[hosts[row]], {}).setdefault(hosts[row], []).append(row)

        def width(unit: int) -> int:
            return max(len(self.rows[host]) for host in members[unit])

        order = sorted(members, key=lambda unit: (-width(unit), unit))
        kinds = [exceeded[next(iter(members[unit]))] for unit in order]
        numbers = [len(members[unit]) for unit in order]
        runs = cheapest_runs([width(unit) for unit in order], numbers, kinds, budget)
        for start, stop in runs:
            sequences = {h: rows for unit in order[start:stop] for h, rows in members[unit].items()}
            passes.append(self.sequence_pass(sequences))
        return passes

    def hosts(self, exceeded: Sequence[int]) -> list[int]:
        """Return for each row the last of those that extend each other from it on."""
        hosts = list(range(len(self.rows)))
        for row, following in reversed(list(pairwise(self.visited))):
            needed = self.needed[row]
            extends = (
                self.trajectories[row] == self.trajectories[following]
                and exceeded[row] == exceeded[following]
                and self.rows[following][: len(self.rows[row])] == self.rows[row]
            )
            if extends and (
                not self.replay
                or torch.equal(self.routes[row][:needed], self.routes[following][:needed])
            ):
                hosts[row] = hosts[following]
        return hosts

    def tree(self) -> PrefixTree:
        batch = self.batch
        labels = {"labels": batch.expert_indices, "cu_labels": batch.cu_experts}
        options = labels if self.replay else {}
        return build_prefix_tree(batch.tokens, batch.cu_seqlens, lengths=self.needed, **options)

    def is_cheaper(self, tree: PrefixTree, group: int, costs: LayoutCosts) -> bool:
        """Return whether a group takes less time as a tree."""
        rows = [row for row in self.visited if self.groups[row] == group]
        nodes = distinct_nodes(tree, rows)
        hosts = self.hosts([0] * len(self.rows))
        lengths = np.array([len(self.rows[host]) for host in {hosts[row] for row in rows}])
        sequence_token, sequence_pair, tree_token, tree_pair, tree_segment = astuple(costs)
        as_tree = tree_token * len(nodes) + tree_pair * int((tree.positions[nodes] + 1).sum())
        parents = tree.parents[nodes].tolist()
        children = Counter(parents)
        starts = [parent < 0 or children[parent] > 1 for parent in parents]
        as_tree += tree_segment * sum(starts)
        pairs = float((lengths * (lengths + 1) // 2).sum())
        return bool(as_tree <= sequence_token * int(lengths.sum()) + sequence_pair * pairs)

    def tree_pass(self, tree: PrefixTree, rows: list[int]) -> MicroBatch:
        kept = distinct_nodes(tree, rows)
        number = {int(node): i for i, node in enumerate(kept)}
        states = {row: [number[node] for node in tree.nodes_of(row).tolist()] for row in rows}
        ends = np.searchsorted(kept, tree.ends.numpy()[kept])
        parents = [number.get(node, -1) for node in tree.parents.numpy()[kept].tolist()]
        fields, keys = self.trained_fields(rows, states)
        distinct = sorted(set(keys), key=lambda key: (key[0], key[1], key[2]))
        if len(distinct) == len(keys):
            distinct = keys
        else:
            fields["copies"] = torch.tensor([distinct.index(key) for key in keys])
        nodes = NodeTree(
            torch.tensor(parents, dtype=torch.int32),
            torch.from_numpy(ends.astype(np.int32)),
            tree.positions[kept].long()[None],
        )
        sources = tree.sources[kept].tolist()
        owners = np.searchsorted(self.batch.cu_seqlens.numpy(), sources, side="right") - 1
        fields |= self.entries(distinct) | self.routes_of(
            [[(row, int(depth)) for row, depth in zip(owners, nodes.positions[0], strict=True)]]
        )
        return MicroBatch(
            tree.tokens[kept].long()[None], rows=torch.tensor(rows), tree=nodes, **fields
        )

    def sequence_pass(self, members: dict[int, list[int]]) -> MicroBatch:
        width = max(len(self.rows[host]) for host in members)
        ids = [self.rows[host] + [0] * (width - len(self.rows[host])) for host in members]
        states = {
            row: [place * width + depth for depth in range(width)]
            for place, host in enumerate(members)
            for row in members[host]
        }
        rows = sorted(states)
        fields, keys = self.trained_fields(rows, states)
        tokens = [[(host, depth) for depth in range(width)] for host in members]
        fields |= self.entries(keys) | self.routes_of(tokens)
        return MicroBatch(torch.tensor(ids), rows=torch.tensor(rows), **fields)

    def trained_fields(self, rows: list[int], states: dict[int, list[int]]) -> tuple[Any, Any]:
        """Return the response index; and state, target, number and kept tokens of each token."""
        responses, keys, offset, numbers = [], [], 0, dict[Any, int]()
        for row in rows:
            for i in self.trained[row]:
                position = self.prompts[row] + i
                kept = None if self.kept is None else self.kept[self.begins[row] + i]
                number = numbers.setdefault(kept, len(numbers))
                keys.append((states[row][position - 1], self.rows[row][position], number, kept))
                responses.append(offset + i)
            offset += len(self.rows[row]) - self.prompts[row]
        return {"response_index": torch.tensor(responses)}, keys

    def entries(self, keys: list[Any]) -> dict[str, torch.Tensor]:
        fields = {
            "hidden_index": torch.tensor([key[0] for key in keys]),
            "target_ids": torch.tensor([key[1] for key in keys]),
        }
        if self.kept is not None:
            sets = [key[3] for key in keys]
            flat = [token for kept in sets for token in kept]
            fields["kept_ids"] = torch.tensor(flat, dtype=torch.int32)
            fields["cu_kept"] = torch.tensor([0, *map(len, sets)]).cumsum(0)
        return fields

    def routes_of(self, tokens: list[list[tuple[int, int]]]) -> dict[str, torch.Tensor]:
        """Return the routes of tokens, each a row and the position there."""
        if not self.replay:
            return {}
        assert self.batch.expert_indices is not None
        shape = (len(tokens), len(tokens[0]))
        routes = self.batch.expert_indices.new_zeros((*shape, *self.batch.expert_indices.shape[1:]))
        missing = torch.ones(shape, dtype=torch.bool)
        for i, sequence in enumerate(tokens):
            for j, (row, depth) in enumerate(sequence):
                if depth < len(self.routes[row]):
                    routes[i, j], missing[i, j] = self.routes[row][depth], False
        return {"expert_indices": routes, "router_padding_mask": missing}


def distinct_nodes(tree: PrefixTree, rows: Sequence[int]) -> np.ndarray:
    """Return the nodes of some rows, ascending."""
    nodes = [tree.nodes_of(row).numpy() for row in rows]
    return np.unique(np.concatenate(nodes)) if nodes else np.zeros(0, dtype=np.int32)


def tree_chunks(
    tree: PrefixTree,
    rows: Sequence[int],
    groups: Sequence[int],
    budget: int,
    units: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the rows of each pass, ascending."""

    def last_node(row: int) -> int:
        return int(tree.nodes_of(row)[-1])

    pieces: list[list[int]] = []
    for group in sorted({groups[row] for row in rows}):
        order = sorted(
            (row for row in rows if groups[row] == group), key=lambda row: (last_node(row), row)
        )
        cuts = [0, len(order)]
        if len(distinct_nodes(tree, order)) > budget:
            shared = [0, *(_shared(tree, a, b) for a, b in pairwise(order))]
            lengths = [len(tree.nodes_of(row)) for row in order]
            cuts = cheapest_cuts(lengths, shared, budget, units and [units[row] for row in order])
        for first, last in pairwise(cuts):
            pieces += _by_trajectory(tree, order[first:last], budget, units)
    common = common_prefix(tree, rows)
    common = 0 if common >= budget else common
    loads = [len(distinct_nodes(tree, piece)) - common for piece in pieces]
    chunks = balanced(loads, budget - common)
    return [sorted(row for piece in chunk for row in pieces[piece]) for chunk in chunks if chunk]


def _by_trajectory(
    tree: PrefixTree, piece: list[int], budget: int, units: Sequence[int] | None
) -> list[list[int]]:
    """Return the piece, or chunks of complete trajectories if it is too large."""
    if units is None or len(distinct_nodes(tree, piece)) <= budget:
        return [piece]
    chunks: list[list[int]] = [[]]
    for unit in dict.fromkeys(units[row] for row in piece):
        members = [row for row in piece if units[row] == unit]
        if chunks[-1] and len(distinct_nodes(tree, chunks[-1] + members)) > budget:
            chunks.append([])
        chunks[-1] += members
    return chunks


def common_prefix(tree: PrefixTree, rows: Sequence[int]) -> int:
    """Return the number of nodes that all rows share."""
    counts = Counter(node for row in rows for node in tree.nodes_of(row).tolist())
    return sum(count == len(rows) for count in counts.values())


def _shared(tree: PrefixTree, one: int, other: int) -> int:
    return len(set(tree.nodes_of(one).tolist()) & set(tree.nodes_of(other).tolist()))


def cheapest_cuts(
    lengths: Sequence[int], shared: Sequence[int], budget: int, units: Sequence[int] | None = None
) -> list[int]:
    """Return where to cut n rows in depth-first order so that fewest nodes are repeated.

    Args:
        lengths: (n,) nodes of each row.
        shared: (n,) nodes that a row shares with the one before it; 0 for the first.
        budget: most nodes of a chunk, unless an indivisible unit is larger.
        units: (n,) no cut between rows of one unit; None: cuts anywhere.
    """
    count = len(lengths)
    places = [
        place
        for place in range(count + 1)
        if units is None or not set(units[:place]) & set(units[place:])
    ]
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [0])}
    for stop in places[1:]:
        starts = [place for place in places if place < stop]
        allowed = [
            start
            for start in starts
            if start == starts[-1]
            or lengths[start] + sum(lengths[start + 1 : stop]) - sum(shared[start + 1 : stop])
            <= budget
        ]
        costs = [(best[start][0] + shared[start], best[start][1], start) for start in allowed]
        repeated, chunks, start = min(costs)
        best[stop] = (repeated, chunks + 1, [*best[start][2], stop])
    return best[count][2]


def cheapest_runs(
    widths: Sequence[int], numbers: Sequence[int], kinds: Sequence[int], budget: int
) -> list[tuple[int, int]]:
    """Return ranges of units, by descending width, so that padding and passes cost least."""
    best: list[tuple[float, list[int]]] = [(0.0, [0])]
    for stop in range(1, len(widths) + 1):
        costs = []
        for start in range(stop):
            padded = sum(numbers[start:stop]) * widths[start]
            if start == stop - 1 or (padded <= budget and len(set(kinds[start:stop])) == 1):
                costs.append((best[start][0] + padded, start))
        cost, start = min(costs)
        best.append((cost + PASS_SHARE * budget, [*best[start][1], stop]))
    return list(pairwise(best[-1][1]))


def balanced(loads: Sequence[int], budget: int) -> list[list[int]]:
    """Return the items of each part, largest part first: the longest item to the least loaded."""
    for num_parts in range(1, len(loads) + 1):
        parts: list[list[int]] = [[] for _ in range(num_parts)]
        totals = [0] * num_parts
        for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
            part = totals.index(min(totals))
            parts[part].append(item)
            totals[part] += loads[item]
        if all(t <= budget or len(p) < 2 for t, p in zip(totals, parts, strict=True)):
            order = sorted(range(num_parts), key=lambda part: -totals[part])
            return [sorted(parts[part]) for part in order]
    return []
