"""Tree attention on the CPU: parts of the trees, each with the path above it.

T nodes in depth-first order, H heads, D head size. A segment is a longest run of nodes without a
fork: its nodes are consecutive, and each attends to the path above and causally to the segment.
A block is a segment, or several small neighbouring subtrees under one node, with a mask. Both
attend to their path without a mask. Path and block are two attentions whose results are combined
by their normalisers, as in ring attention (Liu et al. 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A kernel call costs as much as some thousand pairs, so small subtrees share one.
SMALL_SUBTREES = 64  # nodes
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Queries that share a path.

    Args:
        start, stop: range of their nodes.
        path: ranges of the nodes above all of them, ascending.
        mask: (stop - start, stop - start) float32, 0 where a query attends to a node of the block,
            -inf elsewhere; None: a segment, which is causal.
    """

    start: int
    stop: int
    path: Ranges
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Segments:
    """M segments in depth-first order; all (M,) but `children`."""

    starts: list[int]
    stops: list[int]
    ends: list[int]  # of the subtree
    children: dict[int, list[int]]  # by segment; -1: the roots


def tree_blocks(parents: np.ndarray, ends: np.ndarray) -> tuple[Block, ...]:
    """Return blocks that cover all nodes, ascending.

    Args:
        parents, ends: (T,) as in `PrefixTree`.
    """
    segments = _segments(parents, ends)
    blocks: list[Block] = []
    waiting: list[tuple[int, Ranges]] = [(-1, ())]
    while waiting:
        segment, path = waiting.pop()
        small: list[int] = []  # neighbours that share a block
        for child in [*segments.children.get(segment, ()), None]:
            fits = child is not None and (
                segments.ends[child] - segments.starts[small[0] if small else child]
                <= SMALL_SUBTREES
            )
            if small and not fits:
                blocks.append(_small_block(small, segments, ends, path))
                small = []
            if child is None:
                continue
            start, stop, end = segments.starts[child], segments.stops[child], segments.ends[child]
            if end - start <= SMALL_SUBTREES:
                small.append(child)
                continue
            blocks.append(Block(start, stop, path, None))
            waiting.append((child, _longer(path, start, stop)))
    return tuple(sorted(blocks, key=lambda block: block.start))


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float
) -> Tensor:
    """Return (1, H, T, D) attention; arguments of the same shape, on the CPU."""
    result: Tensor = _BlockAttention.apply(query, key, value, blocks, scale)
    return result


def _segments(parents: np.ndarray, ends: np.ndarray) -> _Segments:
    numbers = np.arange(len(parents))
    forks = np.bincount(parents[parents >= 0], minlength=len(parents)) > 1
    begins = parents != numbers - 1
    begins[parents < 0] = True
    begins |= (parents >= 0) & forks[parents]
    starts = np.flatnonzero(begins)
    segment_ids = np.cumsum(begins) - 1
    above = parents[starts]
    above = np.where(above < 0, -1, segment_ids[above])
    children: dict[int, list[int]] = {}
    for segment, parent in enumerate(above.tolist()):
        children.setdefault(parent, []).append(segment)
    stops = [*starts[1:].tolist(), len(parents)]
    return _Segments(starts.tolist(), stops, ends[starts].tolist(), children)


def _longer(path: Ranges, start: int, stop: int) -> Ranges:
    if path and path[-1][1] == start:
        return (*path[:-1], (path[-1][0], stop))
    return (*path, (start, stop))


def _small_block(small: list[int], segments: _Segments, ends: np.ndarray, path: Ranges) -> Block:
    start, stop = segments.starts[small[0]], segments.ends[small[-1]]
    if len(small) == 1 and segments.stops[small[0]] == stop:
        return Block(start, stop, path, None)
    numbers = torch.arange(start, stop)
    limits = torch.from_numpy(ends[start:stop])
    seen = (numbers[None] <= numbers[:, None]) & (numbers[:, None] < limits[None])
    return Block(start, stop, path, torch.zeros(seen.shape).masked_fill(~seen, -torch.inf))


def _at(tensor: Tensor, ranges: Ranges) -> Tensor:
    parts = [tensor[:, :, start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class _BlockAttention(torch.autograd.Function):
    """Block attention, (1, H, T, D); its backward is the kernel's, with the combined normaliser."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: Sequence[Block],
        scale: float,
    ) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        exact = query.dtype if query.dtype == torch.float64 else torch.float32
        lse = query.new_empty(query.shape[:3], dtype=exact)
        for block in blocks:
            nodes = slice(block.start, block.stop)
            part = query[:, :, nodes]
            rows, norm = flash(
                part,
                key[:, :, nodes],
                value[:, :, nodes],
                **_block_options(block, query.dtype, scale),
            )
            if block.path:
                keys, values = _at(key, block.path), _at(value, block.path)
                above, norm_above = flash(part, keys, values, scale=scale)
                total = torch.logaddexp(norm, norm_above)
                weight = (norm_above - total).exp_().unsqueeze(-1)
                rows = torch.lerp(rows.to(exact), above.to(exact), weight)
                norm = total
            out[:, :, nodes] = rows
            lse[:, :, nodes] = norm
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, out, lse = ctx.saved_tensors
        exact = lse.dtype  # many blocks are summed per node: not in bfloat16
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros(key.shape, dtype=exact) for _ in range(2))
        for block in ctx.blocks:
            nodes = slice(block.start, block.stop)
            known = (grad[:, :, nodes], query[:, :, nodes])
            result = (out[:, :, nodes], lse[:, :, nodes], 0.0)
            causal, options = _block_backward(block, query.dtype, ctx.scale)
            dq, dk, dv = flash(
                *known, key[:, :, nodes], value[:, :, nodes], *result, causal, **options
            )
            d_key[:, :, nodes] += dk
            d_value[:, :, nodes] += dv
            if block.path:
                keys, values = _at(key, block.path), _at(value, block.path)
                above, dk, dv = flash(*known, keys, values, *result, False, scale=ctx.scale)
                dq = dq + above
                _add_at(d_key, block.path, dk)
                _add_at(d_value, block.path, dv)
            d_query[:, :, nodes] = dq
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _block_options(block: Block, dtype: torch.dtype, scale: float) -> dict[str, Any]:
    if block.mask is None:
        return {"is_causal": True, "scale": scale}
    return {"attn_mask": block.mask.to(dtype), "scale": scale}


def _block_backward(block: Block, dtype: torch.dtype, scale: float) -> tuple[bool, dict[str, Any]]:
    options = _block_options(block, dtype, scale)
    return bool(options.pop("is_causal", False)), options


def _add_at(target: Tensor, ranges: Ranges, values: Tensor) -> None:
    offset = 0
    for start, stop in ranges:
        target[:, :, start:stop] += values[:, :, offset : offset + stop - start]
        offset += stop - start
