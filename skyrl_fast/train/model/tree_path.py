"""What the layers of a unit of a prefix tree read of the path above, and keep for what is below.

A unit is a part of a tree that is computed at once, A nodes above its U nodes. H heads, D head
size.

Design: docs/design/019-prefix-tree.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from skyrl_fast.ops.prefix_tree.attention import seen_nodes
from skyrl_fast.train.model.lm_head import layers_of

PATH = "skyrl_fast_path"  # keyword argument of a pass: a `UnitPath`; in layers a `LayerPath`

# What a chain keeps, by layer and by the number of the call in it: keys and values, the last inputs
# of a convolution, or a last state.
Kept = dict[tuple[int, int], tuple[Tensor, ...]]


class UnitPath:
    """What a unit's layers read of the chains above, and keep for the units below.

    Args:
        above: of each chain, the root's first.
        ends: (A + U,) int64, those of the path to the unit as nodes before its own.
        num_nodes: U.
        continues: whether units are below.
    """

    def __init__(self, above: Sequence[Kept], ends: Tensor, num_nodes: int, continues: bool):
        self.above = above
        self.continues = continues
        self.kept: Kept = {}
        self._ends = ends
        self._num_nodes = num_nodes
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    def mask(self, window: int | None, chunk: int | None) -> Tensor:
        """Return (1, 1, U, A + U) bool, True where the row's node sees the column's."""
        key = window, chunk
        if key not in self._masks:
            first = len(self._ends) - self._num_nodes
            self._masks[key] = seen_nodes(self._ends, window, chunk, first=first)[None, None]
        return self._masks[key]


class LayerPath:
    """A path in a run of a layer, which numbers its calls: so a recomputed layer finds the same."""

    def __init__(self, path: UnitPath, number: int) -> None:
        self._path = path
        self._number = number
        self._calls = 0

    def mask(self, window: int | None, chunk: int | None) -> Tensor:
        return self._path.mask(window, chunk)

    @property
    def continues(self) -> bool:
        return self._path.continues

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return (1, H, A + U, D) keys and values from those of the unit."""
        above = self._next_call()
        self._keep(key, value)
        keys, values = zip(*above, (key, value), strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def after_tail(self, values: Tensor, width: int) -> Tensor:
        """Return (1, C, width + U), a convolution's input after the last `width` nodes above."""
        above = self._next_call()
        if above:
            tail = above[-1][0]
        else:
            tail = values.new_zeros(*values.shape[:2], width)
        result = torch.cat([tail, values], -1)
        self._keep(result[..., result.shape[-1] - width :])
        return result

    def state_above(self) -> Tensor | None:
        """Return (1, ...) the last state above; None at roots. `keep_state` may follow."""
        above = self._next_call()
        if above:
            return above[-1][0]
        return None

    def keep_state(self, state: Tensor) -> None:
        self._keep(state)

    def restart(self) -> None:
        """Number from the first call again: checkpointing may run the layer again with this."""
        self._calls = 0

    def _next_call(self) -> list[tuple[Tensor, ...]]:
        # A layer's calls have the same order in all units, so that their numbers name what is kept.
        self._calls += 1
        result: list[tuple[Tensor, ...]] = []
        for kept in self._path.above:
            result.append(kept[self._number, self._calls])
        return result

    def _keep(self, *tensors: Tensor) -> None:
        if self._path.continues:  # those of the first run, if there are two
            self._path.kept.setdefault((self._number, self._calls), tensors)


@contextlib.contextmanager
def paths_of_layers(backbone: Any) -> Iterator[None]:
    """Give each run of a layer a `LayerPath` of its own."""

    def give(number: int) -> Any:
        def begin(_: Any, args: Any, options: dict[str, Any]) -> Any:
            return args, {**options, PATH: LayerPath(options[PATH], number)}

        return begin

    def end(_: Any, __: Any, options: dict[str, Any], ___: Any) -> None:
        options[PATH].restart()

    hooks = []
    for number, layer in enumerate(layers_of(backbone)):
        hooks.append(layer.register_forward_pre_hook(give(number), with_kwargs=True))
        hooks.append(layer.register_forward_hook(end, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
