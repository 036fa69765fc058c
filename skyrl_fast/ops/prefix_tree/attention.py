"""Attention on prefix trees: each node attends to itself and the nodes above it.

A window or chunks limit how far up its path a node sees; the distance of two nodes is that of their
tokens in a row.

T nodes in depth-first order, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_fast._C import TreeTiles
from skyrl_fast.ops import _backend
from skyrl_fast.ops.prefix_tree.reference import masked_attention
from skyrl_fast.ops.prefix_tree.tiles import tile_attention
from skyrl_fast.ops.prefix_tree.tree import ancestor_mask

OP = "tree_attention"
KINDS = ("tiles", "dense", "flex")
FLEX_BLOCK = 128  # nodes, of queries and of keys
# Up to this size a dense mask of all pairs is cheaper; also the multiple that "flex" pads to.
SHORT_TREES = 1024


@dataclass(frozen=True, slots=True)
class TreeAttention:
    """A plan for computing the attention of some trees.

    Args:
        kind: "tiles": kernels for the CPU, which compute few masked pairs; float64 by a dense
            mask. "dense": one boolean mask of all pairs. "flex": FlexAttention with a block mask.
        num_nodes: T, with padding.
        parents, ends: (T,) int32, as in `PrefixTree`.
        masks: by kind, window and chunk, each made at its first use, since layers differ in these:
            "tiles", `TreeTiles`; "dense", (1, 1, T, T) bool; "flex", a `BlockMask`.
    """

    kind: str
    num_nodes: int
    parents: Tensor
    ends: Tensor
    masks: dict[tuple[str, int | None, int | None], Any] = field(default_factory=dict)

    def mask(self, kind: str, window: int | None = None, chunk: int | None = None) -> Any:
        """Return what says which nodes a node sees."""
        key = (kind, window, chunk)
        if key not in self.masks:
            if kind == "tiles":
                self.masks[key] = TreeTiles(self.parents, self.ends, window or 0, chunk or 0)
            elif kind == "dense":
                self.masks[key] = seen_nodes(self.ends, window, chunk)[None, None]
            else:
                self.masks[key] = flex_block_mask(self.ends, window, chunk)
        return self.masks[key]


def kind_for(num_nodes: int, device: torch.device | str) -> str:
    place = torch.device(device).type
    if place == "cpu":
        return "tiles"
    if place == "cuda" and num_nodes > SHORT_TREES:
        return "flex"
    return "dense"


def padded_size(num_nodes: int, kind: str) -> int:
    """Return the padded number of nodes: FlexAttention needs blocks, and few lengths to compile.

    Example:
        >>> padded_size(1500, "flex"), padded_size(1500, "dense")
        (2048, 1500)
    """
    if kind == "flex":
        return -(-num_nodes // SHORT_TREES) * SHORT_TREES
    return num_nodes


def plan_tree_attention(
    parents: Tensor,
    ends: Tensor,
    *,
    device: torch.device | str = "cpu",
    kind: str | None = None,
) -> TreeAttention:
    """Return a plan for the attention of trees, for all layers of a forward pass.

    Args:
        parents, ends: (T,) int32 as in `PrefixTree`. For "flex", T is a multiple of 128.
        device: device of the queries.
        kind: see `TreeAttention`; None: "tiles" on the CPU; on a GPU "flex", "dense" for short
            trees; elsewhere "dense".

    Raises:
        ValueError: an unknown kind, one that the device does not support, a wrong T, or parents and
            ends that are not those of trees.
    """
    num_nodes = parents.shape[0]
    if kind is None:
        kind = kind_for(num_nodes, device)
    if kind not in KINDS:
        raise ValueError(f"{OP}: kind: expected one of {KINDS} or None, got {kind!r}")
    if kind == "tiles":
        if torch.device(device).type != "cpu":
            raise ValueError(f"{OP}: kind 'tiles' runs on the CPU, got {device}")
        plan = TreeAttention(kind, num_nodes, parents, ends)
        plan.mask(kind)  # which checks the tree
        return plan
    if kind == "flex" and num_nodes % FLEX_BLOCK:
        raise ValueError(
            f"{OP}: kind 'flex' needs a multiple of {FLEX_BLOCK} nodes, got {num_nodes}"
        )
    if parents.device.type == ends.device.type == "cpu":  # reading would wait for a GPU
        TreeTiles(parents, ends, window=1)  # which checks the tree; of a window the cheapest
    # These masks are made from the ends alone: the parents stay where they are.
    ends = _backend.to_device(ends, torch.device(device))
    return TreeAttention(kind, num_nodes, parents, ends)


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: TreeAttention,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return (1, H, T, D): softmax attention of each node over itself and the nodes above it.

    Under autocast it runs in autocast's dtype, like torch's attention: rotary embeddings may leave
    queries and keys in float32 and values in another dtype.

    Args:
        query: (1, H, T, D) float32, bfloat16, float16 or float64.
        key, value: (1, G, T, D) with H a multiple of G; consecutive query heads share one.
        plan: for trees with T nodes.
        scale: scale of the scores; None: 1 / sqrt(D).
        window: a node sees only the last `window` nodes of its path, itself included.
        chunk: a node sees only nodes whose depth, divided by `chunk`, is the same.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: (H,) floats, a score per head that takes part in the softmax and has no value.

    Raises:
        ValueError: shapes that do not match each other or the plan, or options out of range.

    Example:
        >>> plan = plan_tree_attention(torch.tensor([-1, 0, 0]), torch.tensor([3, 2, 3]))
        >>> values = torch.tensor([1.0, 2.0, 5.0]).view(1, 1, 3, 1)
        >>> tree_attention(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1), values, plan).flatten()
        tensor([1.0000, 1.5000, 3.0000])
    """
    _check(query, key, value, plan)
    _check_options(query, window, chunk, softcap, sinks)
    query, key, value = (autocast(x) for x in (query, key, value))
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    # The tiles compute in float32.
    if plan.kind == "tiles" and query.dtype == torch.float64:
        kind = "dense"
    else:
        kind = plan.kind
    mask = plan.mask(kind, window, chunk)
    if kind == "flex":
        return _flex(query, key, value, mask, scale, softcap, sinks)
    if kind == "tiles":
        return tile_attention(query, key, value, sinks, mask, scale, softcap or 0.0)
    return dense_attention(query, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `masked_attention` by torch's kernels where these have the options."""
    if softcap is not None or sinks is not None:
        return masked_attention(query, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale
    )


def autocast(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype that autocast uses for torch's attention; float64 stays."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def node_depths(ends: Tensor) -> Tensor:
    """Return (T,) int64 depths, from 0: the nodes before a node, less those that ended by it.

    Example:
        >>> node_depths(torch.tensor([3, 2, 3, 4])).tolist()
        [0, 1, 1, 0]
    """
    numbers = torch.arange(len(ends), device=ends.device)
    ended = torch.zeros(len(ends) + 1, dtype=torch.int64, device=ends.device)
    ended.scatter_add_(0, ends.long(), torch.ones_like(numbers))  # bincount waits for a GPU
    return numbers - ended[:-1].cumsum(0)


def least_depths(depths: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """Return the least depth of the nodes that nodes of some depths see."""
    least = torch.zeros_like(depths)
    if window is not None:
        least = depths - window + 1
    if chunk is not None:
        least = torch.maximum(least, depths - depths % chunk)
    return least


def seen_nodes(ends: Tensor, window: int | None, chunk: int | None, *, first: int = 0) -> Tensor:
    """Return (T, T) bool, True where the row's node sees the column's; as `ancestor_mask`."""
    seen = ancestor_mask(ends, first=first)
    if window is None and chunk is None:
        return seen
    depths = node_depths(ends)
    return seen & (depths[None] >= least_depths(depths[first:], window, chunk)[:, None])


def flex_block_mask(ends: Tensor, window: int | None = None, chunk: int | None = None) -> Any:
    """Return FlexAttention's block mask without evaluating each pair; T is a multiple of 128."""
    from torch.nn.attention.flex_attention import BlockMask

    # A block of keys before a block of queries is fully visible where the smallest end of its nodes
    # is after the last query, and fully masked where the largest is at or before the first query;
    # or by the same rule where the depths of all or of no keys are in reach of the queries.
    per_block = ends.long().view(-1, FLEX_BLOCK)
    count = per_block.shape[0]
    numbers = torch.arange(count, device=ends.device)
    first = numbers * FLEX_BLOCK
    last = (numbers + 1) * FLEX_BLOCK - 1
    before = numbers[None] < numbers[:, None]  # rows are blocks of queries, columns of keys
    full = before & (per_block.amin(1)[None] > last[:, None])
    seen = before & (per_block.amax(1)[None] > first[:, None])
    limits = ends.long()

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < limits[key])

    rule = sees
    if window is not None or chunk is not None:
        depths = node_depths(ends)
        least = least_depths(depths, window, chunk)
        low = depths.view(count, -1).amin(1)
        high = depths.view(count, -1).amax(1)
        full &= low[None] >= least.view(count, -1).amax(1)[:, None]
        seen &= high[None] >= least.view(count, -1).amin(1)[:, None]

        def reaches(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return sees(_batch, _head, query, key) & (depths[key] >= least[query])

        rule = reaches
    # A block on the diagonal is never full: a query does not see later keys.
    partial = (seen & ~full) | torch.eye(count, dtype=torch.bool, device=ends.device)
    return BlockMask.from_kv_blocks(
        *_list_chosen(partial), *_list_chosen(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=rule
    )


def _list_chosen(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (1, 1, Q) numbers of key blocks per query block, and their (1, 1, Q, K) indices."""
    # BlockMask reads the first `counts` of each row.
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    counts = blocks.sum(1, dtype=torch.int32)
    return counts[None, None], order.to(torch.int32)[None, None].contiguous()


# Compiled at the first use, by what a graph depends on; but not by the number of nodes.
_compiled_flex: dict[tuple[Any, ...], Any] = {}
COMPILED_DEVICES = ("cuda",)
FLEX_BACKEND = "inductor"  # backend of torch.compile


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, key, value, **options)


def _compiled_attend(*form: Any) -> Any:
    """Return `_attend` compiled for one form of queries, keys, mask and options.

    torch.compile keeps eight graphs per code object; the ninth runs uncompiled and holds the scores
    of all pairs. So each form has a code object, of which it needs three graphs (for the first
    number of nodes, for any, and for any without gradients), and a ninth is an error.
    """
    if form not in _compiled_flex:
        name = f"tree_attention_{len(_compiled_flex)}"
        attend = FunctionType(_attend.__code__.replace(co_name=name), globals(), name)
        _compiled_flex[form] = torch.compile(attend, backend=FLEX_BACKEND, fullgraph=True)
    return _compiled_flex[form]


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    run: Any = _attend
    if query.device.type in COMPILED_DEVICES:
        # Uncompiled it would hold the scores of all pairs.
        sizes = (query.shape[1], key.shape[1], query.shape[3], query.dtype, query.device)
        run = _compiled_attend(*sizes, mask.mask_mod.__name__, scale, softcap, sinks is None)
    shared = key.shape[1] != query.shape[1]
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": shared}
    if softcap is not None:
        cap: float = softcap
        options["score_mod"] = lambda score, *_: cap * torch.tanh(score / cap)
    # torch makes a symbol of a cap that is not the first one's, and 2.15 refuses symbols there.
    with torch._dynamo.config.patch(specialize_float=True):
        if sinks is None:
            return run(query, key, value, **options)
        try:
            from torch.nn.attention.flex_attention import AuxRequest

            out, aux = run(query, key, value, return_aux=AuxRequest(lse=True), **options)
            lse = aux.lse
        except ImportError:  # before torch 2.9
            out, lse = run(query, key, value, return_lse=True, **options)
    # The sink adds exp(sink) to the sum exp(lse) that the weights were divided by.
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return out * share[..., None].to(out.dtype)


def _check(query: Tensor, key: Tensor, value: Tensor, plan: TreeAttention) -> None:
    if query.dim() != 4 or query.shape[0] != 1 or query.shape[2] != plan.num_nodes:
        raise ValueError(
            f"{OP}: query: expected (1, H, {plan.num_nodes}, D) as the plan, got "
            f"{tuple(query.shape)}"
        )
    wanted = (1, key.shape[1] if key.dim() == 4 else 0, *query.shape[2:])
    if key.shape != wanted or value.shape != wanted or query.shape[1] % max(1, wanted[1]):
        raise ValueError(
            f"{OP}: key and value: expected (1, G, {plan.num_nodes}, {query.shape[3]}) with "
            f"{query.shape[1]} a multiple of G, got {tuple(key.shape)} and {tuple(value.shape)}"
        )


def _check_options(
    query: Tensor,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    for name, size in (("window", window), ("chunk", chunk)):
        # Not isinstance: a bool is an int.
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{OP}: {name}: expected a positive int or None, got {size!r}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            f"{OP}: softcap: expected a positive and finite number or None, got {softcap!r}"
        )
    if sinks is None:
        return
    wanted = (query.shape[1],)
    if sinks.shape != wanted or not sinks.is_floating_point() or sinks.device != query.device:
        raise ValueError(
            f"{OP}: sinks: expected {wanted} floats on {query.device}, got {tuple(sinks.shape)} "
            f"{sinks.dtype} on {sinks.device}"
        )


def pad_trees(parents: Tensor, ends: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return parents and ends, padded with nodes that attend only to themselves."""
    # Each a tree of one node: a softmax over no key would be NaN.
    extra = torch.arange(parents.shape[0], num_nodes, dtype=torch.int32, device=parents.device)
    return torch.cat([parents, torch.full_like(extra, -1)]), torch.cat([ends, extra + 1])


def node_pairs(ends: Sequence[int] | np.ndarray) -> int:
    """Return the number of unmasked pairs of nodes: the sum of all depths, counted from 1.

    Example:
        >>> node_pairs([3, 2, 3])
        5
    """
    # ends - number is the size of a node's subtree: as many nodes see it.
    values = np.asarray(ends, dtype=np.int64)
    return int((values - np.arange(len(values))).sum())
