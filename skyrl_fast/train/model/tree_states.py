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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_fast.ops import _backend
from skyrl_fast.train.model.tree_path import PATH, LayerPath

SEGMENTS = "skyrl_fast_segments"  # keyword argument of a pass
CONVOLUTION = "causal_conv1d_fn"
# Convolution and scan fused by mamba-ssm, without an initial state; where it returns None,
# transformers calls the two functions.
FUSED = "mamba2_split_conv1d_scan_combined"
CHUNK = "chunk_size"  # an argument of recurrences: they pad sequences to multiples of it
# Nodes: segments are padded to this or a power of two times it, which is then the chunk. GPU
# packages have kernels for 64.
LEAST_CHUNK = {"cpu": 16}
USUAL_CHUNK = 64
# Padding that costs as much as a further call of a recurrence.
CALL_TOKENS = 64


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
        count, length: S, and L with padding.
        parents: the segment that each continues, by its number in the order of all groups; empty
            at roots.
        has_children: whether a later group needs their last states.
    """

    count: int
    length: int
    parents: Sequence[int]
    has_children: bool


@dataclass(frozen=True, slots=True)
class PaddedSegments:
    """All groups of a pass, parents first, one after the other.

    Args:
        nodes: int64, of each token of the groups; padding repeats the segment's last node.
        padding: bool, of each token; None: there is none.
        places: (T,) int64, where each node is among the tokens.
    """

    groups: Sequence[SegmentGroup]
    nodes: Tensor
    padding: Tensor | None
    places: Tensor


class TreeSegments:
    """The segments of a pass's trees, which all layers share.

    Args:
        parents: (T,) integers in depth-first order, -1 at roots.
        has_padding: whether trees of one node at the end may be padding.
    """

    def __init__(self, parents: Tensor, device: torch.device, *, has_padding: bool = True) -> None:
        self._parents = parents.cpu().numpy().astype(np.int64)
        self._device = device
        self.least_chunk = LEAST_CHUNK.get(device.type, USUAL_CHUNK)
        self._tails: dict[int, tuple[Tensor, Tensor]] = {}
        self._padded: dict[bool, PaddedSegments] = {}
        places = np.arange(len(self._parents))
        has_parent = self._parents >= 0
        children = np.bincount(self._parents[has_parent], minlength=len(places))
        continues = (self._parents == places - 1) & (places > 0)
        continues &= np.where(continues, children[self._parents], 0) == 1
        # Nobody reads the states of a tree of one node, such as padding: those at the end are one.
        lone = ~has_parent & (children == 0)
        from_end = np.logical_and.accumulate(lone[::-1])
        trailing = from_end[::-1] & has_padding
        continues[1:] |= trailing[1:] & trailing[:-1]
        self._first = np.flatnonzero(~continues)
        borders = np.append(self._first, len(places))
        self._lengths = np.diff(borders)
        above = self._parents[self._first]
        segment_of = np.cumsum(~continues) - 1
        self._above = np.where(above >= 0, segment_of[above], -1)  # the segment of each parent

    @property
    def num_segments(self) -> int:
        return len(self._first)

    def padded(self, *, pads_parents: bool) -> PaddedSegments:
        """Return the segments in groups of similar length, to pad little.

        Args:
            pads_parents: whether segments with children may be padded.
        """
        if pads_parents not in self._padded:
            self._padded[pads_parents] = self._make_groups(pads_parents)
        return self._padded[pads_parents]

    def _make_groups(self, pads_parents: bool) -> PaddedSegments:
        depth = np.zeros(len(self._first), dtype=np.int64)
        above = self._above
        while (above >= 0).any():
            depth += above >= 0
            above = np.where(above >= 0, self._above[above], -1)
        has_children = np.zeros(len(depth), dtype=bool)
        has_children[self._above[self._above >= 0]] = True
        # Where padding is not neutral it would change the state that children start from.
        exact = np.where(has_children & (not pads_parents), self._lengths, 0)
        keys = np.stack([depth, exact, self._sizes(depth, exact)])
        # Sorted by depth first: groups of parents come before those of their children.
        _, group_of, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
        order = np.argsort(group_of.ravel(), kind="stable")
        number = np.empty_like(order)  # place of each segment in the order of all groups
        number[order] = np.arange(len(order))
        groups = []
        nodes = []
        padding = []
        for segments in np.split(order, np.cumsum(counts)[:-1]):
            lengths = self._lengths[segments, None]
            above = self._above[segments]
            columns = np.arange(lengths.max())
            # Padding repeats the last node.
            in_segment = np.minimum(columns, lengths - 1)
            padded = self._first[segments, None] + in_segment
            nodes.append(padded.ravel())
            padding.append((columns >= lengths).ravel())
            if above[0] >= 0:
                parents = number[above].tolist()
            else:
                parents = ()
            needed = bool(has_children[segments].any())
            groups.append(SegmentGroup(len(segments), len(columns), parents, needed))
        all_nodes = np.concatenate(nodes)
        is_padding = np.concatenate(padding)
        places = np.empty(len(self._parents), dtype=np.int64)
        places[all_nodes[~is_padding]] = np.flatnonzero(~is_padding)
        return PaddedSegments(
            groups,
            self._tensor(all_nodes),
            self._tensor(is_padding) if is_padding.any() else None,
            self._tensor(places),
        )

    def _sizes(self, depth: np.ndarray, exact: np.ndarray) -> np.ndarray:
        """Return the length that each segment may be padded to."""
        least = self.least_chunk
        chunks = np.maximum(self._lengths / least, 1)
        exponents = np.ceil(np.log2(chunks)).astype(np.int64)
        kinds, kind_of, counts = np.unique(
            np.stack([depth, exact, least << exponents]),
            axis=1,
            return_inverse=True,
            return_counts=True,
        )
        sizes = kinds[2]
        target = np.arange(len(counts))
        for i, j in pairwise(range(len(sizes))):  # shortest first: join the next of the depth
            same = (kinds[:2, i] == kinds[:2, j]).all()
            added = counts[i] * (sizes[j] - sizes[i])
            if same and added <= CALL_TOKENS:
                counts[j] += counts[i]
                target[i] = j
        for i in reversed(range(len(sizes))):
            sizes[i] = sizes[target[i]]
        return sizes[kind_of.ravel()]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return _backend.to_device(torch.from_numpy(values), self._device)

    def with_tails(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the nodes of each segment after the last `width` of the path above it.

        Returns:
            (T + S * width,) int64 nodes, -1, -2, ... above roots, and (T,) where each node is among
            them.
        """
        if width not in self._tails:
            tails = np.empty((len(self._first), width), dtype=np.int64)
            above = self._parents[self._first]
            for column in reversed(range(width)):
                tails[:, column] = above
                parents = self._parents[np.maximum(above, 0)]
                above = np.where(above >= 0, parents, above - 1)
            places = np.arange(len(self._parents))
            shifts = np.arange(1, len(tails) + 1) * width
            places += np.repeat(shifts, self._lengths)
            nodes = np.empty(len(places) + tails.size, dtype=np.int64)
            nodes[places] = np.arange(len(places))
            firsts = places[self._first, None]
            nodes[firsts - width + np.arange(width)] = tails
            self._tails[width] = self._tensor(nodes), self._tensor(places)
        return self._tails[width]


def replace_state_functions(backbone: Any) -> bool:
    """Make a backbone's layers with states accept `SEGMENTS`; return whether it has any."""
    for module, name in _state_functions(backbone):
        function = getattr(module, name)
        # The functions are those of transformers' modules: another model may have replaced them
        # already. Without trees their results are the same.
        if not hasattr(function, "without_trees"):
            setattr(module, name, _with_trees(function, name))
    return has_states(backbone)


def has_states(backbone: Any) -> bool:
    return any(True for _ in _state_functions(backbone))


def _state_functions(backbone: Any) -> Iterator[tuple[Any, str]]:
    """Yield modules of transformers and the names of their functions."""
    for module_name in {type(module).__module__ for module in backbone.modules()}:
        module = sys.modules[module_name]
        for name in (CONVOLUTION, FUSED, *RECURRENCES):
            if getattr(module, name, None) is not None:
                yield module, name


def _with_trees(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def compute(*args: Any, **options: Any) -> Any:
        segments: TreeSegments | None = options.pop(SEGMENTS, None)
        path: LayerPath | None = options.pop(PATH, None)
        if segments is None:
            return function(*args, **options)
        if name == FUSED:
            return None
        if name == CONVOLUTION:
            return _convolve(function, segments, path, *args, **options)
        return _recur(function, RECURRENCES[name], segments, path, args, options)

    compute.without_trees = function  # type: ignore[attr-defined]
    return compute


def _convolve(
    function: Callable[..., Tensor],
    segments: TreeSegments,
    path: LayerPath | None,
    values: Tensor,
    weight: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    """Return (1, C, T), a causal convolution along each path, of (1, C, T) and (C, K)."""
    width = weight.shape[-1] - 1
    nodes, places = segments.with_tails(width)
    # What is above roots is 0.
    pad = torch.nn.functional.pad
    if path is None:
        extended = pad(values, (width, 0))
    else:
        extended = path.after_tail(values, width)
    rows = extended.index_select(-1, nodes + width)
    return function(rows, weight, *args, **options).index_select(-1, places)


def _recur(
    function: Callable[..., Any],
    recurrence: Recurrence,
    segments: TreeSegments,
    path: LayerPath | None,
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
    padded = segments.padded(pads_parents=limits is None or limits[0] <= 0)
    sizes = [group.count * group.length for group in padded.groups]
    parts: dict[str, Sequence[Tensor]] = {}
    for name, value in values.items():
        # For all groups at once: the gradient of each such read is as large as the pass.
        every = value[0].index_select(0, padded.nodes)
        if padded.padding is not None and name in recurrence.neutral:
            inner = [1] * (every.dim() - 1)
            mask = padded.padding.view(-1, *inner)
            every = every.masked_fill(mask, recurrence.neutral[name])
        parts[name] = every.split(sizes)
    outputs: list[Tensor] = []
    states: list[Any] = []
    chunk = arguments.get(CHUNK)
    if path is None:
        above_roots = None
    else:
        above_roots = path.state_above()
    continues = path is not None and path.continues
    for number, group in enumerate(padded.groups):
        shape = group.count, group.length
        for name, part in parts.items():
            arguments[name] = part[number].unflatten(0, shape)
        if chunk is not None:
            # A recurrence pads to its chunk, which changes no value, only how many are computed.
            arguments[CHUNK] = min(chunk, _chunk_for(group.length, segments.least_chunk))
        above = [states[parent] for parent in group.parents]
        initial = torch.stack(above) if above else above_roots
        if initial is not None and not above:
            initial = initial.expand(group.count, *initial.shape[1:])
        arguments[recurrence.initial] = initial
        arguments[recurrence.final] = group.has_children or continues
        result = function(**arguments)
        output = result
        last: Any = None
        if isinstance(result, tuple):
            output, last = result
        outputs.append(output.flatten(0, 1))
        if last is None:
            states += [None] * group.count
        else:
            states += last.unbind(0)
        if path is not None and continues:  # a chain is one segment
            path.keep_state(last)
    output = torch.cat(outputs).index_select(0, padded.places)[None]
    # As the function returns without a last state.
    if recurrence is _DELTA:
        return (output, None)
    return output


def _chunk_for(length: int, least: int) -> int:
    """Return the least power of two times `least` that is not below a length."""
    return least << max(0, (length - 1) // least).bit_length()
