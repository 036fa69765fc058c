"""Packed rows: sequences of a pass that share a row of it, in place of padding.

n sequences padded on the right to length L, m packed rows of that length.

Where positions restart in a row, transformers' masks let no token attend to those before. A mask
takes the place of causal attention, so rows are packed where that costs less than padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from skyrl_fast.ops.passes.plan import balance_parts
from skyrl_fast.train.model.forward_pass import MicroBatch
from skyrl_fast.train.model.lm_head import PROBE_TOLERANCE, in_float32
from skyrl_fast.train.model.random_passes import keep_random_state

# Attention with a mask computes all pairs of a row, causal attention half of them.
MASKED_PAIRS = 1.0
CAUSAL_PAIRS = 0.5
# A layer of width H has about 12 H^2 weights, which take as long as 6 H pairs of tokens do.
PAIRS_OF_A_TOKEN = 6
PROBE = ((3, 5), (2, 4), (6, 1))  # lengths of the sequences in each row
# Settings of how far attention reaches, or of blocks of places in a row, and short values of them,
# which a probe's rows exceed.
SHORT_REACH = {"sliding_window": 3, "attention_chunk_size": 4}
SHORT_BLOCKS = {**SHORT_REACH, "index_block_size": 2, "block_size": 2}

_takes_packed: WeakSet[torch.nn.Module] = WeakSet()  # backbones in which packed rows are exact


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The sequences of a micro-batch in fewer rows.

    Args:
        input_ids, positions: (m, L) int64.
        places: (n * L,) int64, where each token is in the packed rows; 0 for padding.
    """

    input_ids: Tensor
    positions: Tensor
    places: Tensor


def find_packed_support(backbone: Any) -> bool:
    """Return whether packed rows are exact in a backbone, which `pack_rows` remembers."""
    if scales_by_place(backbone.config):
        return False
    with in_float32(backbone):
        is_exact = _is_exact(backbone)
        with short_reach(backbone, SHORT_BLOCKS):
            is_exact = is_exact and _is_exact(backbone)
    if is_exact:
        _takes_packed.add(backbone)
    return is_exact


def scales_by_place(config: Any) -> bool:
    """Return whether queries have a factor for each `floor_scale` places in a pass, as Llama 4's.

    It is 1 in rows of a probe.
    """
    no_rope = getattr(config, "no_rope_layers", None) or ()
    return getattr(config, "attn_temperature_tuning", False) and not all(no_rope)


def _is_exact(backbone: Any) -> bool:
    """Return whether the states of the probe's second sequences are those of each alone."""
    device = next(backbone.parameters()).device
    vocabulary = backbone.config.get_text_config().vocab_size
    width = 8
    ids = torch.arange(width * len(PROBE)).view(-1, width) % vocabulary
    rows = []
    second = []
    others = ids.clone()
    for row, (length, next_length) in enumerate(PROBE):
        padding = width - length - next_length
        rows.append([*range(length), *range(next_length), *[0] * padding])
        second.append(slice(length, length + next_length))
        others[row, :length] = (ids[row, :length] + 1) % vocabulary
    positions = torch.tensor(rows)

    def states(tokens: Tensor, **options: Any) -> Tensor:
        output = backbone(input_ids=tokens.to(device), use_cache=False, **options)
        hidden: Tensor = output.last_hidden_state
        return hidden.float()

    try:
        # Routers of some models draw noise.
        with keep_random_state(device), torch.no_grad():
            there = positions.to(device)
            packed = states(ids, position_ids=there)
            changed = states(others, position_ids=there)
            alone = []
            for row, part in enumerate(second):
                sequence = ids[row : row + 1, part]
                alone.append(states(sequence)[0])
    except (RuntimeError, ValueError, TypeError):  # it takes no positions, or not these
        return False
    for row, part in enumerate(second):
        # The same bits whatever else is in the row and, up to rounding, those of the sequence
        # alone: not so where a layer's state runs on.
        here = packed[row, part]
        if not torch.equal(here, changed[row, part]):
            return False
        error = (here - alone[row]).abs().max().item()
        largest = alone[row].abs().max().item()
        if not error <= PROBE_TOLERANCE * max(1.0, largest):
            return False
    return True


@contextlib.contextmanager
def short_reach(backbone: Any, lengths: Mapping[str, int]) -> Iterator[int]:
    """Shorten settings of all layers to these lengths; yield how many changed."""
    modules = list(backbone.modules())
    configs = {}
    for m in modules:
        if hasattr(m, "config"):
            configs[id(m.config)] = m.config
    before = [
        (owner, name, value)
        # Modules copy settings of their config when they are made.
        for owner in (*configs.values(), *modules)
        for name, length in lengths.items()
        if type(value := vars(owner).get(name)) is int and value > length
    ]
    try:
        for owner, name, _ in before:
            setattr(owner, name, lengths[name])
        yield len(before)
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def pack_rows(backbone: Any, micro: MicroBatch) -> PackedRows | None:
    """Return the sequences of a micro-batch in fewer rows; None: it is computed as it is."""
    count, width = micro.input_ids.shape
    if count < 2 or backbone not in _takes_packed or micro.expert_indices is not None:
        return None
    rows, last = np.divmod(micro.hidden_index.numpy(), width)
    lengths = np.zeros(count, dtype=np.int64)
    np.maximum.at(lengths, rows, last + 1)  # nothing looks at later tokens
    parts, packed_count = balance_parts(lengths, width)
    if not _costs_less(packed_count, count, width, backbone.config.get_text_config().hidden_size):
        return None
    order = np.argsort(parts, kind="stable")
    ends = np.cumsum(lengths[order])
    starts = np.empty(count, dtype=np.int64)  # start of each sequence in its packed row
    starts[order] = ends - lengths[order]
    first = np.zeros(packed_count, dtype=np.int64)
    np.add.at(first, parts, lengths)
    starts -= (np.cumsum(first) - first)[parts]
    column = np.arange(width)
    places = (parts * width + starts)[:, None] + column
    used = column < lengths[:, None]
    ids = np.zeros(packed_count * width, dtype=np.int64)
    positions = np.zeros(packed_count * width, dtype=np.int64)  # padding attends to itself
    ids[places[used]] = micro.input_ids.numpy()[used]
    positions[places[used]] = np.broadcast_to(column, used.shape)[used]
    shape = (packed_count, width)
    return PackedRows(
        torch.from_numpy(ids.reshape(shape)),
        torch.from_numpy(positions.reshape(shape)),
        torch.from_numpy(np.where(used, places, 0).ravel()),
    )


def _costs_less(packed_count: int, count: int, width: int, hidden_size: int) -> bool:
    token = PAIRS_OF_A_TOKEN * hidden_size
    packed = packed_count * (token + MASKED_PAIRS * width)
    return packed < count * (token + CAUSAL_PAIRS * width)
