"""Weights of a model's files, of which each rank reads its own rows: no rank holds the model.

transformers makes the model on the meta device, which costs no memory and does all that it does on
loading but read: it compares names and shapes, and ties weights. After FSDP2 has divided the
parameters (`sharding.py`), each rank reads the rows of its shards, one weight after another. A
weight that transformers makes of several stored tensors, such as a layer's experts, is made alone:
of the rank's experts only, one after another, where each is stored by itself.

Design: docs/design/022-a-thousand-gpus.md.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.rollout.engine.weights.tensor_file import StoredTensor, list_tensors
from skyrl_fast.train.parallel.ranks import Ranks
from skyrl_fast.train.parallel.sharding import local_tensor, shard_rows

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
UNREAD = "unread_weights"  # attribute of a model on the meta device: its `UnreadWeights`
# transformers' operations that make a row of a weight of one stored tensor by pattern.
STACK = "MergeModulelist"
JOIN = "Concatenate"


class NotByRowsError(Exception):
    """A model's weights cannot be read by rows; the message says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight is in a model: adapters around a module change its path, not the module.

    Args:
        dtype: in which it is loaded; it may be cast to another one before it is read.
    """

    module: torch.nn.Module
    name: str
    dtype: torch.dtype

    @property
    def tensor(self) -> torch.Tensor:
        tensor = getattr(self.module, self.name)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    @property
    def is_buffer(self) -> bool:
        return self.name in self.module._buffers


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight that is a stored tensor, perhaps of another name."""

    stored: StoredTensor
    place: Place

    @property
    def places(self) -> Sequence[Place]:
        return [self.place]

    def parts(self, rows: slice | None) -> Sequence[slice | None]:
        """Return by which rows they are read, one part after another."""
        return [rows]

    def read(self, rows: slice | None) -> Sequence[torch.Tensor]:
        """Return rows of the tensor; None: all."""
        return [self.stored.read(rows)]


@dataclass(frozen=True, slots=True)
class MadeWeights:
    """Weights that transformers makes of stored tensors.

    Args:
        model: whose weights they are.
        converter: transformers' own.
        name: by which it knows them.
        stored: by its patterns.
        by_name: the weights' places by their names in the model.
    """

    model: Any
    converter: Any
    name: str
    stored: Mapping[str, Sequence[StoredTensor]]
    by_name: Mapping[str, Place]

    @property
    def places(self) -> Sequence[Place]:
        return list(self.by_name.values())

    @property
    def is_stacked(self) -> bool:
        """Whether there is one weight, each row of which has stored tensors of its own."""
        return _stacks_rows(self.converter) and len(self.by_name) == 1

    def parts(self, rows: slice | None) -> Sequence[slice | None]:
        if rows is None or not self.is_stacked:
            return [rows]
        # A row of these is as large as a layer's weight: it is read, stacked and joined alone.
        return [slice(row, row + 1) for row in range(rows.start, rows.stop)]

    def read(self, rows: slice | None) -> Sequence[torch.Tensor]:
        """Return rows of each weight; None: all."""
        dtype = self.places[0].dtype
        is_stacked = self.is_stacked
        parts: dict[str, list[torch.Tensor]] = {}
        for pattern, stored in self.stored.items():
            if is_stacked and rows is not None:
                stored = stored[rows]
            parts[pattern] = [tensor.read().to(dtype) for tensor in stored]
        made = _convert(self.model, self.converter, self.name, parts)
        weights = [made[name] for name in self.by_name]
        if is_stacked or rows is None:
            return weights
        return [weight[rows] for weight in weights]


class UnreadWeights:
    """The weights of a model on the meta device, of which only the buffers are read.

    Args:
        stored: the tensors of its files, by name.
        device: of the weights, once they are read.

    Raises:
        NotByRowsError: a weight is stored in none of these files, or in several ways.
    """

    def __init__(
        self, model: Any, stored: Mapping[str, StoredTensor], device: torch.device
    ) -> None:
        self.device = device
        self._weights = _find_weights(model, stored)
        self._read_buffers(model)

    def read_shards(self, root: torch.nn.Module) -> None:
        """Allocate this rank's shards of all parameters, and read their rows.

        Args:
            root: sharded; has the model, perhaps next to other modules.
        """

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return torch.empty_like(tensor, device=self.device)
            return tensor

        root._apply(allocate)
        with torch.no_grad():
            for weight in self._weights:
                if not weight.places[0].is_buffer:
                    _read_rows(weight)

    def read(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return these tensors of the model, those without values read."""
        names = {id(tensor): name for name, tensor in tensors.items()}
        found = dict(tensors)
        for weight in self._weights:
            if not any(
                place.tensor.is_meta and id(place.tensor) in names for place in weight.places
            ):
                continue
            for place, value in zip(weight.places, weight.read(None), strict=True):
                name = names.get(id(place.tensor))
                if name is not None:
                    found[name] = value.to(place.dtype)
        return found

    def _read_buffers(self, model: Any) -> None:
        """Read the buffers that the files have, and compute those that they have not."""
        for weight in self._weights:
            if weight.places[0].is_buffer:
                (place,) = weight.places
                (value,) = weight.read(None)
                place.module._buffers[place.name] = value.to(place.dtype)
        for module, name, buffer in _buffers_of(model):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
                module._is_hf_initialized = False
        # Of the modules without this mark; weights have one of their own.
        model.initialize_weights()
        for module, name, buffer in _buffers_of(model):
            module._buffers[name] = buffer.to(self.device)


def _buffers_of(model: torch.nn.Module) -> list[tuple[Any, str, torch.Tensor]]:
    """Return each buffer with its module and name; named_buffers leaves out a second name."""
    found = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found.append((module, name, buffer))
    return found


def _read_rows(weight: StoredWeight | MadeWeights) -> None:
    for number, place in enumerate(weight.places):
        rows = shard_rows(place.tensor)
        is_left_out = place.tensor.is_meta  # of a part of the model that is not used
        is_empty = rows is not None and rows.start == rows.stop
        if is_left_out or is_empty:
            continue
        local = local_tensor(place.tensor)
        for part in weight.parts(rows):
            value = weight.read(part)[number]
            if local.dtype != place.dtype:  # of another width than it is loaded in
                value = value.to(place.dtype)
            target = local
            if part is not None and rows is not None:
                target = local[part.start - rows.start : part.stop - rows.start]
            target.copy_(value)


def load_unread(
    auto: Any, folder: Path, config: Any, device: torch.device, ranks: Ranks, **options: Any
) -> Any:
    """Return the model of a folder on the meta device, with `UNREAD`; None: it has to be read as a
    whole, which rank 0 logs.

    Args:
        auto: transformers' class of models with `from_pretrained`.
        device: of the weights, once they are read.
        options: of `from_pretrained`.
    """
    try:
        stored = _find_stored(folder, config)
        # It maps the files, and reads none of their tensors.
        on_meta = {"": "meta"}
        model = auto.from_pretrained(str(folder), config=config, device_map=on_meta, **options)
        setattr(model, UNREAD, UnreadWeights(model, stored, device))
    # Other versions of transformers have other interfaces, and a converter may need values. What is
    # wrong with the model is raised when it is read as a whole.
    except Exception as error:
        if ranks.rank == 0:
            logger.warning(
                "%s: each rank loads all weights before it keeps its shard: %s: %s",
                folder,
                type(error).__name__,
                error,
            )
        return None
    return model


def read_shards(root: torch.nn.Module) -> None:
    """Read this rank's shards of a sharded model that `load_unread` made, or that contains it."""
    for module in root.modules():
        unread: UnreadWeights | None = vars(module).pop(UNREAD, None)
        if unread is not None:
            unread.read_shards(root)


def read_weights(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return full weights of a model by name; of one that `load_unread` made they are read now."""
    unread: UnreadWeights | None = vars(model).get(UNREAD)
    if unread is None:
        return dict(tensors)
    return unread.read(tensors)


def take_part(model: torch.nn.Module, part: torch.nn.Module) -> torch.nn.Module:
    """Return a part of a model, whose weights alone are read if they are not yet."""
    unread = vars(model).pop(UNREAD, None)
    if unread is not None:
        setattr(part, UNREAD, unread)
    return part


def device_of(model: Any) -> torch.device:
    """Return the device of a model's weights, also where they are not read yet."""
    unread = vars(model).get(UNREAD)
    device = model.device if unread is None else unread.device
    assert isinstance(device, torch.device)
    return device


@contextmanager
def without_memory(model: torch.nn.Module) -> Iterator[None]:
    """Replace parameters on the meta device in the context by ones on the CPU that share one
    element: modules that are added get the device of those that they are added to.
    """
    stand_ins: dict[int, torch.nn.Parameter] = {}
    before = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                one = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                same = torch.nn.Parameter(one, requires_grad=parameter.requires_grad)
                before.append((module, name, parameter))
                module._parameters[name] = stand_ins.setdefault(id(parameter), same)
    try:
        yield
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


def _find_stored(folder: Path, config: Any) -> dict[str, StoredTensor]:
    """Return the tensors of the files that transformers reads, by name."""
    if getattr(config, "transformers_weights", None) is not None:
        raise NotByRowsError("its config names a file of weights")
    if (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    elif (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        names = sorted({*index["weight_map"].values()})
    else:
        raise NotByRowsError(f"expected {WEIGHTS} or {INDEX}, got neither")
    stored: dict[str, StoredTensor] = {}
    for name in names:
        stored |= list_tensors(folder / name)
    return stored


def _find_weights(
    model: Any, stored: Mapping[str, StoredTensor]
) -> list[StoredWeight | MadeWeights]:
    """Return where each weight of a model is stored, by the rules by which transformers has loaded
    it on the meta device.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    places = _find_places(model)
    renamings = [one for one in model._weight_conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in model._weight_conversions if isinstance(one, WeightConverter)]
    with_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = model.base_model_prefix
    plain: dict[str, StoredWeight] = {}
    parts: dict[str, dict[str, list[StoredTensor]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, places)
        if name not in places and key in places:
            name, pattern = rename_source_key(key, [], [], prefix, places)
        if name not in places:
            continue  # transformers leaves it out, too
        if pattern is None:
            plain.setdefault(name, StoredWeight(stored[key], places[name]))
        else:
            parts.setdefault(name, {}).setdefault(pattern, []).append(stored[key])
    weights: list[StoredWeight | MadeWeights] = list(plain.values())
    for name, by_pattern in parts.items():
        converter = with_pattern[next(iter(by_pattern))]
        shapes = {}
        for pattern, tensors in by_pattern.items():
            shapes[pattern] = [_without_values(tensor) for tensor in tensors]
        targets = {one: places[one] for one in _convert(model, converter, name, shapes)}
        weights.append(MadeWeights(model, converter, name, by_pattern, targets))
    _check_complete(weights, places)
    return weights


def _find_places(model: Any) -> dict[str, Place]:
    places = {}
    for path, tensor in model.state_dict(keep_vars=True).items():
        owner, _, name = path.rpartition(".")
        places[path] = Place(model.get_submodule(owner), name, tensor.dtype)
    return places


def _check_complete(
    weights: Sequence[StoredWeight | MadeWeights], places: Mapping[str, Place]
) -> None:
    """Raise NotByRowsError unless each weight of the places is stored once; tied ones are one."""
    stored = Counter(id(place.tensor) for weight in weights for place in weight.places)
    for name, place in places.items():
        times = stored[id(place.tensor)]
        if times != 1:
            # transformers draws one that is missing, and compares tied ones.
            raise NotByRowsError(f"expected {name} once in its files, got it {times} times")


def _without_values(stored: StoredTensor) -> torch.Tensor:
    return torch.empty(list(stored.shape), dtype=stored.dtype, device="meta")


def _convert(
    model: Any, converter: Any, name: str, parts: Mapping[str, list[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return weights by name, made of stored tensors by pattern; `name` is that of the first."""
    converter = deepcopy(converter)
    for pattern, tensors in parts.items():
        for tensor in tensors:
            converter.add_tensor(name, name, pattern, tensor)
    made = {}
    for target, value in converter.convert(name, model=model, config=model.config).items():
        if isinstance(value, list):
            value = value[0]
        made[target] = value
    return made


def _stacks_rows(converter: Any) -> bool:
    """Return whether a row of the weight is made of one stored tensor of each pattern."""
    first, *others = converter.operations
    joins = [type(other).__name__ == JOIN and other.dim > 0 for other in others]
    return type(first).__name__ == STACK and first.dim == 0 and all(joins)
