"""Tree attention on the CPU by our kernels: tiles of nodes and the blocks of nodes above them.

T nodes in depth-first order, H heads of queries, G of keys and values, D head size. The passes are
those of FlashAttention (Dao et al. 2022, arXiv:2205.14135), on a list of the blocks that a tile of
32 nodes attends to, in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from skyrl_fast._C import TreeTiles
from skyrl_fast.ops._backend import num_threads
from skyrl_fast.ops._derivatives import first_derivative_only

LOG2_E = 1 / math.log(2)


def tile_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    tiles: TreeTiles,
    scale: float,
    softcap: float,
) -> Tensor:
    """Return (1, H, T, D) attention, with (1, T, H, D) consecutive in memory.

    Args:
        query: (1, H, T, D) float32, bfloat16 or float16, on the CPU.
        key, value: (1, G, T, D) of its dtype, H a multiple of G.
        sinks: (H,), or None.
        softcap: 0: none.
    """
    result: Tensor = _TileAttention.apply(query, key, value, sinks, tiles, scale, softcap)
    return result


class _TileAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        tiles: TreeTiles,
        scale: float,
        softcap: float,
    ) -> Tensor:
        ctx.tiles = tiles
        ctx.scale = scale
        ctx.softcap = softcap
        ctx.dtype = query.dtype
        query, key, value = (_readable(x) for x in (query, key, value))
        out = _like(query)
        lse = out.new_empty(out.shape[1:3])
        if sinks is None:
            scores = None
        else:
            scores = sinks.detach().float().contiguous()
        tiles.forward(query, key, value, scale, softcap, scores, out, lse, num_threads())
        result = out.to(ctx.dtype)
        # Converted to float32 once: the backward reads them several times. Only the result has a
        # graph.
        ctx.save_for_backward(query, key, value, out, lse, sinks, result)
        return result

    @staticmethod
    @first_derivative_only("tree_attention", "float64")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks, _ = ctx.saved_tensors
        grad = _readable(grad)
        grads = tuple(_like(x) for x in saved[:3])
        ctx.tiles.backward(tuple(saved), grad, ctx.scale, ctx.softcap, grads, num_threads())
        of_sinks = None
        if sinks is not None:
            # A sink has no value, so its score's gradient is -p (grad . out) at each node.
            out, lse = saved[3:]
            # The kernels' log-sum-exp has base 2.
            shares = torch.exp2(LOG2_E * sinks.float()[:, None] - lse)
            of_sinks = -(shares * (grad * out).sum(-1)[0]).sum(1).to(sinks.dtype)
        return *(one.to(ctx.dtype) for one in grads), of_sinks, None, None, None


def _readable(tensor: Tensor) -> Tensor:
    """Return the heads as float32, with rows of consecutive elements."""
    tensor = tensor.detach().float()
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def _like(heads: Tensor) -> Tensor:
    """Return an uninitialised (1, H, T, D) tensor with (1, T, H, D) consecutive in memory."""
    batch, num_heads, num_nodes, size = heads.shape
    # The caller transposes to (1, T, H, D), as transformers does: then without a copy.
    return heads.new_empty(batch, num_nodes, num_heads, size).transpose(1, 2)
