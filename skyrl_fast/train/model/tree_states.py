"""Layers with a state on prefix trees: a fork starts from the state of its parent.

transformers' layers compute. Two of the functions that they call look at other tokens: a short
causal convolution, and a recurrence that takes an initial state. Given a tree, both are called for
the tree's segments: chains of nodes, each of which ends before a fork. Autograd adds what a
segment's children say about its last state. T nodes, S segments of at most L nodes.

Design: docs/design/019-prefix-tree.md.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SEGMENTS = "skyrl_fast_segments"  # keyword argument of a pass
CONVOLUTION = "causal_conv1d_fn"
# Does the work of both where a package brings it, and then takes no initial state; its callers do
# without if it returns None.
FUSED = "mamba2_split_conv1d_scan_combined"
SHORT = 64  # nodes: the recurrences' chunk, to which they pad shorter sequences


@dataclass(frozen=True, slots=True)
class Recurrence:
    """How a function of transformers takes sequences and states.

    Args:
        tokens: its arguments that have a value per token, in dimension 1.
        neutral: by argument, the value with which a token leaves the state as it is.
        initial, final: its arguments of the first state, and of whether to return the last one.
        limits: its argument of the least and largest time step; with a least one, no token leaves
            the state as it is.
    """

    tokens: tuple[str, ...]
    neutral: Mapping[str, float]
    initial: str
    final: str
    limits: str = ""


_DELTA = Recurrence(
    ("query", "key", "value", "g", "beta"),
    {"g": 0.0, "beta": 0.0},
    "initial_state",
    "output_final_state",
)
RECURRENCES = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": Recurrence(
        ("hidden_states", "dt", "B", "C"),
        {"dt": -1e4},  # a time step: its softplus is 0
        "initial_states",
        "return_final_states",
        "dt_limit",
    ),
}


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Segments of which none follows from another, and which are computed at once.

    Args:
        nodes: (S, L) int64; padded by the segment's last node.
        padding: (S, L) bool; None: there is none.
        real: int64, places in `nodes`, flattened, that are no padding.
        parents: the segment that each continues, by its number in the order of all groups; empty
            at roots.
        has_children: whether a later group needs their last states.
    """

    nodes: Tensor
    padding: Tensor | None
    real: Tensor
    parents: Sequence[int]
    has_children: bool


class TreeSegments:
    """The segments of a pass's trees, which all layers share.

    Args:
        parents: (T,) int32 in depth-first order, -1 at roots.
    """

    def __init__(self, parents: Tensor, device: torch.device) -> None:
        self._parents = parents.cpu().numpy().astype(np.int64)
        self._device = device
        self._tails: dict[int, tuple[Tensor, Tensor]] = {}
        self._groups: dict[bool, tuple[list[SegmentGroup], Tensor]] = {}
        places = np.arange(len(self._parents))
        children = np.bincount(self._parents[self._parents >= 0], minlength=len(places))
        continues = (self._parents == places - 1) & (places > 0)
        continues &= np.where(continues, children[self._parents], 0) == 1
        # Nobody reads the states of a tree of one node, such as padding: those at the end are one.
        lone = (self._parents < 0) & (children == 0)
        trailing = np.logical_and.accumulate(lone[::-1])[::-1]
        continues[1:] |= trailing[1:] & trailing[:-1]
        self._first = np.flatnonzero(~continues)
        self._lengths = np.diff(np.append(self._first, len(places)))
        above = self._parents[self._first]
        segment_of = np.cumsum(~continues) - 1
        self._above = np.where(above >= 0, segment_of[above], -1)  # the segment of each parent

    def groups(self, *, pads_parents: bool) -> tuple[list[SegmentGroup], Tensor]:
        """Return groups in an order in which parents come first.

        They are of similar length, to pad little.

        Args:
            pads_parents: whether segments with children may be padded.

        Returns:
            The groups, and (T,) int64: where each node is among theirs, without padding.
        """
        if pads_parents not in self._groups:
            groups = self._make_groups(pads_parents)
            nodes = torch.cat([group.nodes.flatten()[group.real] for group in groups])
            places = torch.empty_like(nodes)
            places[nodes] = torch.arange(len(nodes), device=nodes.device)
            self._groups[pads_parents] = groups, places
        return self._groups[pads_parents]

    def _make_groups(self, pads_parents: bool) -> list[SegmentGroup]:
        depth = np.zeros(len(self._first), dtype=np.int64)
        above = self._above
        while (above >= 0).any():
            depth += above >= 0
            above = np.where(above >= 0, self._above[above], -1)
        has_children = np.zeros(len(depth), dtype=bool)
        has_children[self._above[self._above >= 0]] = True
        size = np.ceil(np.log2(np.maximum(self._lengths / SHORT, 1))).astype(np.int64)
        exact = np.where(has_children & (not pads_parents), self._lengths, 0)
        keys = np.stack([depth, size, exact])
        _, group_of, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
        order = np.argsort(group_of.ravel(), kind="stable")
        number = np.empty_like(order)  # of each segment in the order of all groups
        number[order] = np.arange(len(order))
        return [
            self._group(segments, number, has_children)
            for segments in np.split(order, np.cumsum(counts)[:-1])
        ]

    def _group(
        self, segments: np.ndarray, number: np.ndarray, has_children: np.ndarray
    ) -> SegmentGroup:
        lengths = self._lengths[segments, None]
        columns = np.arange(lengths.max())
        nodes = self._first[segments, None] + np.minimum(columns, lengths - 1)
        padding = columns >= lengths
        above = self._above[segments]
        return SegmentGroup(
            torch.from_numpy(nodes).to(self._device),
            torch.from_numpy(padding).to(self._device) if padding.any() else None,
            torch.from_numpy(np.flatnonzero(~padding)).to(self._device),
            number[above].tolist() if above[0] >= 0 else (),
            bool(has_children[segments].any()),
        )

    def with_tails(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the nodes of each segment after the last `width` of the path above it.

        Returns:
            (T + S * width,) int64 nodes, -1 above roots, and (T,) where each node is among them.
        """
        if width not in self._tails:
            tails = np.empty((len(self._first), width), dtype=np.int64)
            above = self._parents[self._first]
            for column in reversed(range(width)):
                tails[:, column] = above
                above = np.where(above >= 0, self._parents[above], -1)
            places = np.arange(len(self._parents))
            places += np.repeat(np.arange(1, len(tails) + 1) * width, self._lengths)
            nodes = np.empty(len(places) + tails.size, dtype=np.int64)
            nodes[places] = np.arange(len(places))
            starts = places[self._first, None] - width + np.arange(width)
            nodes[starts] = tails
            self._tails[width] = (
                torch.from_numpy(nodes).to(self._device),
                torch.from_numpy(places).to(self._device),
            )
        return self._tails[width]


def replace_state_functions(backbone: Any) -> bool:
    """Make a backbone's layers with states accept `SEGMENTS`; return whether it has any.

    Functions are replaced where transformers' modules have them; without trees their results are
    the same.
    """
    found = False
    for name in {type(module).__module__ for module in backbone.modules()}:
        module = sys.modules[name]
        for function_name in (CONVOLUTION, FUSED, *RECURRENCES):
            function = getattr(module, function_name, None)
            if function is None:
                continue
            found = True
            if not hasattr(function, "without_trees"):
                setattr(module, function_name, _with_trees(function, function_name))
    return found


def _with_trees(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def compute(*args: Any, **options: Any) -> Any:
        segments: TreeSegments | None = options.pop(SEGMENTS, None)
        if segments is None:
            return function(*args, **options)
        if name == FUSED:
            return None
        if name == CONVOLUTION:
            return _convolve(function, segments, *args, **options)
        return _recur(function, RECURRENCES[name], segments, args, options)

    compute.without_trees = function  # type: ignore[attr-defined]
    return compute


def _convolve(
    function: Callable[..., Tensor],
    segments: TreeSegments,
    values: Tensor,
    weight: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    """Return (1, C, T), a causal convolution along each path, of (1, C, T) and (C, K)."""
    nodes, places = segments.with_tails(weight.shape[-1] - 1)
    padded = torch.nn.functional.pad(values, (1, 0))  # what is above roots is 0
    rows = padded.index_select(-1, nodes + 1)
    return function(rows, weight, *args, **options).index_select(-1, places)


def _recur(
    function: Callable[..., Any],
    recurrence: Recurrence,
    segments: TreeSegments,
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> Any:
    bound = inspect.signature(function).bind(*args, **options)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    arguments |= arguments.pop("kwargs", {})
    if arguments[recurrence.initial] is not None or arguments[recurrence.final]:
        raise ValueError(f"prefix trees: expected {function.__name__} without a cache")
    values = {name: arguments[name] for name in recurrence.tokens}
    limits = arguments.get(recurrence.limits)
    groups, places = segments.groups(pads_parents=limits is None or limits[0] <= 0)
    outputs: list[Tensor] = []
    states: list[Any] = []
    for group in groups:
        shape = group.nodes.shape
        for name, value in values.items():
            part = value[0].index_select(0, group.nodes.flatten()).unflatten(0, shape)
            if group.padding is not None and name in recurrence.neutral:
                padding = group.padding.view(*shape, *[1] * (part.dim() - 2))
                part = part.masked_fill(padding, recurrence.neutral[name])
            arguments[name] = part
        above = [states[number] for number in group.parents]
        arguments[recurrence.initial] = torch.stack(above) if above else None
        arguments[recurrence.final] = group.has_children
        result = function(**arguments)
        output, last = result if isinstance(result, tuple) else (result, None)
        outputs.append(output.flatten(0, 1).index_select(0, group.real))
        states += [None] * len(group.nodes) if last is None else last.unbind(0)
    output = torch.cat(outputs).index_select(0, places)[None]
    return (output, None) if recurrence is _DELTA else output
