"""SkyRL's padded batch and padding rows. N rows, T, R padded lengths, L layers, K experts."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from skyrl_fast.integrations.skyrl.names import AUGUST, NEWEST
from skyrl_fast.integrations.skyrl.replacement import (
    ORIGINALS,
    replaces,
    require,
)
from skyrl_fast.ops.pack import batch_tensors, padding_rows

logger = logging.getLogger(__name__)
CONVERT = "convert_prompts_responses_to_batch_tensors"
PAD = "pad_training_input_batch"
MAX_DUMMY_EXPERTS = 256  # above, the dummy route 0, 1, ... does not fit SkyRL's smallest dtype


class SpareRows(threading.local):
    """Padding rows that a trainer's conversion allocates with the batch, so that none is copied.

    The conversion allocates them after the rows that it returns; padding returns the full tensors.
    """

    num_rows = 0

    def __init__(self) -> None:
        self._pad_field: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def allocate(self, num_rows: int) -> Iterator[None]:
        self.num_rows = num_rows
        try:
            yield
        finally:
            self.num_rows = 0
            self._pad_field.clear()

    def without_padding(self, tensors: batch_tensors.BatchTensors) -> batch_tensors.BatchTensors:
        """Return the tensors without their padding rows; store the full ones for `padded`."""
        unpadded = []
        for t in tensors:
            unpadded.append(t if t is None else t[: len(t) - self.num_rows])
        for short, full in zip(unpadded, tensors, strict=True):
            if short is not None and full is not None:
                self._pad_field[id(short)] = (short, full)
        return tuple(unpadded)  # type: ignore[return-value]

    def find_padded(self, tensor: Any) -> torch.Tensor | None:
        found = self._pad_field.get(id(tensor))
        if found is None:
            return None
        return found[1]


SPARE = SpareRows()


@replaces(CONVERT, renamed={"tokenizer": "pad_token_id"})
def convert_prompts_responses_to_batch_tensors(
    pad_token_id: Any,
    prompts: list[list[int]],
    responses: list[list[int]],
    rewards: list[list[float] | torch.Tensor],
    loss_masks: list[list[int]],
    logprobs: list[list[float]] | None = None,
    rollout_expert_indices: list[np.ndarray] | None = None,
    rollout_sample_support: list[np.ndarray] | None = None,
    max_seq_len: int | None = None,
) -> tuple[Any, ...]:
    """Return the tensors of a padded batch, as SkyRL's function of that name.

    Since 0.4.0 the last two of the eight are packed, by SkyRL's own functions.

    Args:
        pad_token_id: the id, or, up to 0.3.0, the tokenizer that has it.
        prompts, responses, rewards, loss_masks, logprobs: N rows.
        rollout_expert_indices: N arrays (tokens, L, K). Up to 0.3.0, whose dummy route is zeros,
            the call is passed to SkyRL.
        rollout_sample_support: N arrays (response tokens, K); since 0.4.0.
        max_seq_len: a warning is logged if a row is longer.

    Example:
        >>> rows = [[5]], [[7, 8]], [[0.0, 1.0]], [[1, 1]]
        >>> convert_prompts_responses_to_batch_tensors(0, *rows)[0]
        tensor([[5, 7, 8]])
    """
    label = ORIGINALS.label(CONVERT)
    takes_id = label in (AUGUST, NEWEST)
    require(isinstance(rewards, list), "rewards that are no list")
    if takes_id:
        kinds = {list, np.ndarray}
    else:
        kinds = {list}
    for rows in (prompts, responses):
        require(
            isinstance(rows, list) and set(map(type, rows)) <= kinds, "rows of unsupported type"
        )
    require(
        all(kind is list or issubclass(kind, torch.Tensor) for kind in set(map(type, rewards))),
        "rewards that are neither lists nor tensors",
    )
    routes = rollout_expert_indices
    packed: tuple[Any, ...] = ()
    if label == NEWEST:
        packed = _pack_fields(routes, rollout_sample_support, prompts, responses)
        routes = None
    else:
        require(rollout_sample_support is None, "an argument that this version does not have")
    if routes is not None:
        require(takes_id and _are_canonical(routes), "routes of unsupported form")
    if takes_id:
        require(not hasattr(pad_token_id, "pad_token_id"), "a tokenizer instead of an id")
    else:
        pad_token_id = pad_token_id.pad_token_id
    tensors = batch_tensors.convert_prompts_responses_to_batch_tensors(
        pad_token_id,
        prompts,
        responses,
        rewards,
        loss_masks,
        logprobs,
        routes,
        pad_size=SPARE.num_rows,
    )
    if SPARE.num_rows:
        tensors = SPARE.without_padding(tensors)
    width = tensors[0].shape[1]
    if max_seq_len is not None and width > max_seq_len:
        logger.warning(
            "Max sequence length in batch (%d) exceeds max_seq_len (%d). No truncation is "
            "performed; consider checking generator settings.",
            width,
            max_seq_len,
        )
    if packed:
        return (*tensors[:-1], *packed)
    return tensors


def _pack_fields(routes: Any, support: Any, prompts: Any, responses: Any) -> tuple[Any, Any]:
    if routes is None and support is None:
        return None, None
    skyrl = ORIGINALS.namespace(CONVERT)
    for field in (routes, support):
        rows_given = field is None or (isinstance(field, list) and len(field) == len(prompts))
        require(rows_given, "routes or support of unsupported form")
    response_lengths = np.array([len(row) for row in responses], dtype=np.int64)
    lengths = response_lengths + np.array([len(row) for row in prompts], dtype=np.int64)
    return (
        None if routes is None else skyrl["_collate_rollout_expert_indices"](routes, lengths),
        None if support is None else skyrl["build_sample_support"](support, response_lengths),
    )


def _are_canonical(routes: Any) -> bool:
    if not isinstance(routes, list) or not routes:
        return False
    return all(
        isinstance(array, np.ndarray)
        and array.ndim == 3
        and len(array) > 0
        and 1 <= array.shape[2] <= MAX_DUMMY_EXPERTS
        for array in routes
    )


@replaces("make_router_padding_mask")
def make_router_padding_mask(
    attention_mask: torch.Tensor, captured_route_lengths: Sequence[int]
) -> torch.Tensor:
    """Return (N, T) bool, True without a captured route, as SkyRL's function of that name.

    Args:
        attention_mask: (N, T) integers, left padded.
        captured_route_lengths: N, the number of leading tokens of each row that have a route.

    Example:
        >>> make_router_padding_mask(torch.tensor([[0, 1, 1]]), [1])
        tensor([[ True, False,  True]])
    """
    require(not attention_mask.is_floating_point(), "a mask of floats")
    require(attention_mask.ndim == 2, "a mask of unsupported shape")
    require(len(captured_route_lengths) == len(attention_mask), "wrong number of rows")
    require(min(captured_route_lengths, default=0) >= 0, "a negative length")
    # Only the lengths of routes are read.
    routes = [range(int(length)) for length in captured_route_lengths]
    return batch_tensors.router_padding_mask(routes, attention_mask)


@replaces(PAD)
def pad_training_input_batch(unpadded_batch: Any, pad_size: int) -> Any:
    """Return the batch with `pad_size` padding rows, as SkyRL's function of that name.

    Args:
        unpadded_batch: SkyRL's TrainingInputBatch, on the CPU.
        pad_size: rows to add; 0 returns the same object.
    """
    device = unpadded_batch.device
    require(device is None or device.type == "cpu", "a batch on another device")
    require(isinstance(pad_size, int) and pad_size >= 0, "a pad_size that is no count")
    if not pad_size:
        return padding_rows.pad_training_input_batch(unpadded_batch, pad_size)
    require(type(unpadded_batch).__name__ == "TrainingInputBatch", "a batch of unsupported type")
    for name in ("uids", "is_last_step"):
        value = (unpadded_batch.metadata or {}).get(name, [])
        require(isinstance(value, list), f"{name} that are no list")
    _require_known_padding(unpadded_batch)
    metadata = padding_rows.padding_metadata(unpadded_batch.metadata, pad_size)
    padded = type(unpadded_batch)(
        {name: _pad_field(name, value, pad_size) for name, value in unpadded_batch.items()}
    )
    padded.metadata = metadata
    return padded


def _require_known_padding(batch: Any) -> None:
    label = ORIGINALS.label(PAD)
    routes = batch.get("rollout_expert_indices")
    mask = batch.get("router_padding_mask")
    if isinstance(routes, torch.Tensor):
        require(label == AUGUST, "routes in one tensor, which other versions pad differently")
    if mask is not None:
        require(label in (AUGUST, NEWEST), "a mask that older versions pad differently")
        require(mask.dtype == torch.bool, "a router_padding_mask of numbers")


def _pad_field(name: str, value: Any, pad_size: int) -> Any:
    padded = SPARE.find_padded(value)
    if padded is not None:
        return padded
    if type(value).__name__ == "PackedTensor":
        lengths = [len(value.segment(0))] * pad_size
        return ORIGINALS.namespace(PAD)["append_packed_field_padding"](
            name, value, segment_lengths=lengths
        )
    return padding_rows.pad_field(name, value, pad_size, "repeat")
