"""Prefix trees of more nodes than fit: the activations of one path at a time are in memory.

A tree is cut into units: complete subtrees of few nodes, and above them chains, each of which ends
at a fork. Depth first, a unit is computed from what the chains above it keep: keys and values, last
states, and the last inputs of convolutions. Hidden states are computed without a graph first; the
backward pass computes each unit again, and a chain's own backward pass follows those of all units
below, which have added the gradients of what it keeps. T nodes.

Design: docs/design/019-prefix-tree.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyrl_fast.ops import _backend
from skyrl_fast.train.model.forward_pass import MicroBatch
from skyrl_fast.train.model.tree_path import PATH, Kept, UnitPath, paths_of_layers
from skyrl_fast.train.model.tree_states import SEGMENTS, TreeSegments


@dataclass(frozen=True, slots=True)
class TreeUnit:
    """Nodes `first` to `last` of a tree, computed at once; those above are all above it.

    Args:
        level: number of chains above.
        continues: whether it is a chain, with units below it.
    """

    first: int
    last: int
    level: int
    continues: bool


def tree_units(ends: Sequence[int], depths: Sequence[int], budget: int) -> list[TreeUnit]:
    """Return the units of some trees, depth first.

    A unit and the chains above it are within the budget wherever a path is.

    Example:
        >>> [(unit.first, unit.last) for unit in tree_units([5, 5, 4, 4, 5], [0, 1, 2, 3, 2], 4)]
        [(0, 2), (2, 4), (4, 5)]
    """
    units = []
    siblings = [(0, len(ends), 0)]  # subtrees of one parent: first node, end, level
    while siblings:
        first, end, level = siblings.pop()
        last = first
        while last < end and ends[last] - first + depths[first] <= budget:
            last = ends[last]
        if last == first:  # too large: a chain
            subtree = ends[first]
            last += 1
            while last < subtree and ends[last] == subtree:
                last += 1
            units.append(TreeUnit(first, last, level, last < subtree))
            later = [(subtree, end, level), (last, subtree, level + 1)]
        else:
            units.append(TreeUnit(first, last, level, False))
            later = [(last, end, level)]
        siblings += [one for one in later if one[0] < one[1]]
    return units


class PathPasses:
    """Forward and backward passes of a micro-batch's units."""

    def __init__(
        self, backbone: Any, micro: MicroBatch, units: Sequence[TreeUnit], device: torch.device
    ) -> None:
        assert micro.tree is not None
        self._backbone = backbone
        self._units = units
        self._device = device
        self._ids = _backend.to_device(micro.input_ids, device)
        self._depths = micro.tree.positions[0]  # on the CPU
        self._positions = _backend.to_device(micro.tree.positions, device)
        self._parents, self._ends = micro.tree.parents.long(), micro.tree.ends.long()
        kind = device.type
        # The backward pass computes units again, when the caller has left its autocast context.
        self._autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }

    def hidden(self) -> Tensor:
        """Return (T, H) last hidden states, without a graph."""
        above: list[Kept] = []
        parts = []
        with paths_of_layers(self._backbone):
            for unit in self._units:
                # Chains that are not above this unit have no more units below.
                del above[unit.level :]
                hidden, kept = self._run(unit, above)
                parts.append(hidden)
                above.append(kept)
        return torch.cat(parts)

    def backward(self, grad: Tensor) -> None:
        """Add the weights' gradients, from (T, H) those of the hidden states."""
        above: list[Kept] = []
        open_chains: list[tuple[TreeUnit, Tensor, Kept]] = []

        def close() -> None:
            # All units below have added the gradients of what they read of this chain.
            unit, hidden, own = open_chains.pop()
            leaves = above.pop()
            outputs = [hidden]
            grads = [grad[unit.first : unit.last]]
            for call, tensors in own.items():
                for tensor, leaf in zip(tensors, leaves[call], strict=True):
                    if leaf.grad is not None:
                        outputs.append(tensor)
                        grads.append(leaf.grad)
            torch.autograd.backward(outputs, grads)

        with (
            paths_of_layers(self._backbone),
            torch.enable_grad(),
            torch.autocast(**self._autocast),  # type: ignore[arg-type]
        ):
            for unit in self._units:
                while len(open_chains) > unit.level:
                    close()
                hidden, kept = self._run(unit, above)
                if unit.continues:
                    open_chains.append((unit, hidden, kept))
                    # Leaves: backward passes of the units below end there, and the chain's graph
                    # stays.
                    above.append({call: tuple(map(_leaf, own)) for call, own in kept.items()})
                else:
                    hidden.backward(grad[unit.first : unit.last])
                del hidden, kept  # or its graph is there during the next unit's
            while open_chains:
                close()

    def _run(self, unit: TreeUnit, above: Sequence[Kept]) -> tuple[Tensor, Kept]:
        nodes = slice(unit.first, unit.last)
        count = unit.last - unit.first
        depth = int(self._depths[unit.first])
        # Nodes whose parent is above begin segments, which continue the state kept there.
        parents = (self._parents[nodes] - unit.first).clamp_min(-1)
        own = (self._ends[nodes] - unit.first).clamp_max(count) + depth
        # The path above comes first: each of its nodes is an ancestor of all nodes here.
        path_ends = torch.cat([torch.full((depth,), depth + count), own])
        ends = _backend.to_device(path_ends, self._device)
        path = UnitPath(list(above), ends, count, unit.continues)
        # A mask of four dimensions keeps transformers from building its own.
        hidden = self._backbone(
            input_ids=self._ids[:, nodes],
            position_ids=self._positions[:, nodes],
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device),
            use_cache=False,
            **{PATH: path, SEGMENTS: TreeSegments(parents, self._device, has_padding=False)},
        ).last_hidden_state[0]
        return hidden, path.kept


class _DepthFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, passes: PathPasses) -> Tensor:
        ctx.passes = passes
        return passes.hidden()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        # It adds to the weights' `grad` itself, as the graphs that it runs are its own.
        ctx.passes.backward(grad)
        return None, None


def depth_first_states(
    backbone: Any, micro: MicroBatch, units: Sequence[TreeUnit], device: torch.device
) -> Tensor:
    """Return (T, H) last hidden states whose backward pass has one path in memory at a time."""
    anchor = torch.zeros((), requires_grad=True)  # or the result would have no gradient
    states: Tensor = _DepthFirst.apply(anchor, PathPasses(backbone, micro, units, device))
    return states


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
