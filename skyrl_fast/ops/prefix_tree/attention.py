"""Attention on prefix trees: each node looks at itself and the nodes above it.

T nodes in depth-first order, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_fast.ops.prefix_tree.blocks import Block, block_attention, tree_blocks

OP = "tree_attention"
KINDS = ("blocks", "dense", "flex")
FLEX_BLOCK = 128  # nodes, of queries and of keys
# Below this a mask of all pairs costs less than what it saves; also the most that is padded.
SHORT_TREES = 1024


@dataclass(frozen=True, slots=True)
class TreeAttention:
    """How the attention of some trees is computed.

    Args:
        kind: "blocks": parts of the trees with the paths above them, each by torch's CPU flash
            kernel, which looks at no pair outside but few. "dense": one boolean mask of all pairs.
            "flex": FlexAttention with a block mask.
        num_nodes: T, with padding.
        blocks: for "blocks".
        mask: for "dense", (1, 1, T, T) bool; for "flex" a `BlockMask`.
    """

    kind: str
    num_nodes: int
    blocks: tuple[Block, ...] = ()
    mask: Any = None


def kind_for(num_nodes: int, device: torch.device | str) -> str:
    """Return the kind that is chosen for trees of so many nodes on a device."""
    place = torch.device(device).type
    if place == "cpu":
        return "blocks"
    return "flex" if place == "cuda" and num_nodes > SHORT_TREES else "dense"


def padded_size(num_nodes: int, kind: str) -> int:
    """Return how many nodes a kind wants: FlexAttention works in blocks, and few lengths compile.

    Example:
        >>> padded_size(1500, "flex"), padded_size(1500, "dense")
        (2048, 1500)
    """
    return -(-num_nodes // SHORT_TREES) * SHORT_TREES if kind == "flex" else num_nodes


def plan_tree_attention(
    parents: Tensor,
    ends: Tensor,
    *,
    device: torch.device | str = "cpu",
    kind: str | None = None,
) -> TreeAttention:
    """Return how to compute the attention of trees; once for all layers of a forward pass.

    Args:
        parents, ends: (T,) int32 as in `PrefixTree`. For "flex", T is a multiple of 128.
        device: of the queries.
        kind: see `TreeAttention`; None: "blocks" on the CPU; on a GPU "flex", "dense" for short
            trees; elsewhere "dense".

    Raises:
        ValueError: an unknown kind, one that the device does not have, or a wrong T.
    """
    num_nodes = parents.shape[0]
    kind = kind_for(num_nodes, device) if kind is None else kind
    if kind not in KINDS:
        raise ValueError(f"{OP}: kind must be one of {KINDS} or None, got {kind!r}")
    if kind == "blocks":
        if torch.device(device).type != "cpu":
            raise ValueError(f"{OP}: kind 'blocks' runs on the CPU, got {device}")
        return TreeAttention(kind, num_nodes, tree_blocks(parents.numpy(), ends.numpy()))
    ends = ends.to(device)
    if kind == "dense":
        numbers = torch.arange(num_nodes, device=device)
        mask = (numbers[None] <= numbers[:, None]) & (numbers[:, None] < ends[None])
        return TreeAttention(kind, num_nodes, mask=mask[None, None])
    if num_nodes % FLEX_BLOCK:
        raise ValueError(
            f"{OP}: kind 'flex' wants a multiple of {FLEX_BLOCK} nodes, got {num_nodes}"
        )
    return TreeAttention(kind, num_nodes, mask=flex_block_mask(ends))


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: TreeAttention, *, scale: float | None = None
) -> Tensor:
    """Return (1, H, T, D): softmax attention of each node over itself and the nodes above it.

    Under autocast it runs in autocast's dtype, as torch's own attention does: rotary embeddings
    may have left queries and keys in float32 beside values of another dtype.

    Args:
        query: (1, H, T, D) float32, bfloat16, float16 or float64.
        key, value: (1, G, T, D) with H a multiple of G; neighbouring heads share one.
        plan: of trees with T nodes.
        scale: of the products; None: 1 / sqrt(D).

    Raises:
        ValueError: shapes that do not fit each other or the plan.

    Example:
        >>> plan = plan_tree_attention(torch.tensor([-1, 0, 0]), torch.tensor([3, 2, 3]))
        >>> values = torch.tensor([1.0, 2.0, 5.0]).view(1, 1, 3, 1)
        >>> tree_attention(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1), values, plan).flatten()
        tensor([1.0000, 1.5000, 3.0000])
    """
    _check(query, key, value, plan)
    query, key, value = (autocast(x) for x in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if plan.kind == "flex":
        return _flex(query, key, value, plan.mask, scale)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    if plan.kind == "blocks":
        return block_attention(query, key, value, plan.blocks, scale)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=plan.mask, scale=scale
    )


def autocast(tensor: Tensor) -> Tensor:
    """Return the tensor as autocast has the arguments of torch's attention; float64 stays."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def flex_block_mask(ends: Tensor) -> Any:
    """Return FlexAttention's block mask, without a look at each pair of nodes.

    A block of keys before a block of queries is seen whole where the least end of its nodes lies
    behind the last query, and not at all where the greatest lies at or before the first one.

    Args:
        ends: (T,) integers, T a multiple of 128.
    """
    from torch.nn.attention.flex_attention import BlockMask

    per_block = ends.long().view(-1, FLEX_BLOCK)
    count = per_block.shape[0]
    numbers = torch.arange(count, device=ends.device)
    first, last = numbers * FLEX_BLOCK, (numbers + 1) * FLEX_BLOCK - 1
    before = numbers[None] < numbers[:, None]  # rows are blocks of queries, columns of keys
    full = before & (per_block.amin(1)[None] > last[:, None])
    seen = before & (per_block.amax(1)[None] > first[:, None])
    partial = (seen & ~full) | torch.eye(count, dtype=torch.bool, device=ends.device)
    limits = ends.long()

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < limits[key])

    return BlockMask.from_kv_blocks(
        *_chosen(partial), *_chosen(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees
    )


def _chosen(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (1, 1, Q) how many blocks of keys each block of queries has, and (1, 1, Q, K) which.

    Those that count stand first; the order of the others does not matter.
    """
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    counts = blocks.sum(1, dtype=torch.int32)
    return counts[None, None], order.to(torch.int32)[None, None].contiguous()


_compiled_flex: list[Any] = []  # compiled at the first use


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = flex_attention
    if query.device.type == "cuda":
        if not _compiled_flex:
            _compiled_flex.append(torch.compile(flex_attention))
        run = _compiled_flex[0]
    shared = key.shape[1] != query.shape[1]
    return run(query, key, value, block_mask=mask, scale=scale, enable_gqa=shared)


def _check(query: Tensor, key: Tensor, value: Tensor, plan: TreeAttention) -> None:
    if query.dim() != 4 or query.shape[0] != 1 or query.shape[2] != plan.num_nodes:
        raise ValueError(
            f"{OP}: query must be (1, H, {plan.num_nodes}, D) as the plan, got {tuple(query.shape)}"
        )
    wanted = (1, key.shape[1] if key.dim() == 4 else 0, *query.shape[2:])
    if key.shape != wanted or value.shape != wanted or query.shape[1] % max(1, wanted[1]):
        raise ValueError(
            f"{OP}: key and value must be (1, G, {plan.num_nodes}, {query.shape[3]}) with "
            f"{query.shape[1]} a multiple of G, got {tuple(key.shape)} and {tuple(value.shape)}"
        )


def pad_trees(parents: Tensor, ends: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return parents and ends with nodes added that see only themselves.

    Args:
        num_nodes: of the result.
    """
    extra = torch.arange(parents.shape[0], num_nodes, dtype=torch.int32)
    return torch.cat([parents, torch.full_like(extra, -1)]), torch.cat([ends, extra + 1])


def node_pairs(ends: Sequence[int] | np.ndarray) -> int:
    """Return how many pairs of nodes attention has to look at: the sum of all depths, from 1.

    Example:
        >>> node_pairs([3, 2, 3])
        5
    """
    values = np.asarray(ends, dtype=np.int64)
    return int((values - np.arange(len(values))).sum())
