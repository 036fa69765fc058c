"""Plain reference of prefix trees and of attention under a mask. N rows, T nodes, H heads."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class _Node:
    key: Hashable
    source: tuple[int, int]  # a row through it, and the position in that row
    number: int = -1
    children: dict[Hashable, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trees:
    """Nodes in depth-first order. Lists of length T unless stated otherwise.

    Args:
        parents: -1 at a root.
        positions: depth, from 0.
        ends: one past the last node below.
        sources: (row, position) of a token of the node.
        row_nodes: N lists, the node of each of a row's tokens.
        group_starts: first node of each group's tree, and T.
    """

    parents: list[int]
    positions: list[int]
    ends: list[int]
    sources: list[tuple[int, int]]
    row_nodes: list[list[int]]
    group_starts: list[int]


def prefix_tree(rows: Sequence[Sequence[Hashable]], group_ids: Sequence[int]) -> Trees:
    """Return one tree per group, by first appearance; tokens with equal keys are the same."""
    roots: dict[int, _Node] = {}
    paths: list[list[_Node]] = []
    for number, (row, group) in enumerate(zip(rows, group_ids, strict=True)):
        node = roots.setdefault(group, _Node(None, (-1, -1)))
        path = []
        for position, key in enumerate(row):
            node = node.children.setdefault(key, _Node(key, (number, position)))
            path.append(node)
        paths.append(path)
    trees = Trees([], [], [], [], [], [])
    for root in roots.values():
        trees.group_starts.append(len(trees.parents))
        for child in root.children.values():
            _visit(child, trees)
    trees.group_starts.append(len(trees.parents))
    trees.row_nodes.extend([node.number for node in path] for path in paths)
    return trees


def _visit(root: _Node, trees: Trees) -> None:
    """Number a node and its descendants, without recursion: rows are long."""
    waiting: list[tuple[_Node, int, int] | int] = [(root, -1, 0)]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, int):  # all its descendants are numbered
            trees.ends[entry] = len(trees.parents)
            continue
        node, parent, depth = entry
        node.number = len(trees.parents)
        trees.parents.append(parent)
        trees.positions.append(depth)
        trees.ends.append(-1)
        trees.sources.append(node.source)
        waiting.append(node.number)
        below = []
        for child in node.children.values():
            below.append((child, node.number, depth + 1))
        waiting.extend(reversed(below))


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return (n, H, T, D) softmax attention, with scores in memory.

    Args:
        query: (n, H, T, D).
        key, value: (n, G, T, D), H a multiple of G.
        mask: bool, True where a query sees a key; broadcasts to (n, H, T, T).
        softcap, sinks: as in `tree_attention`.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = scale * (query @ key.transpose(-1, -2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    # In 32 bits at least, as torch's attention
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., : key.shape[-2]].to(value.dtype) @ value
