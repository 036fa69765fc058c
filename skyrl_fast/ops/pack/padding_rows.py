"""Padding rows that make a batch divisible by the data-parallel size. N rows, R padded cells."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops.pack.cell_rows import copy_cells

OP = "pad_batch"
PAD_MODES = ("repeat", "cheap")
SCALARS = {int, float, str, bool, type(None)}
Batch = TypeVar("Batch", bound=Mapping[str, Any])


def pad_batch(batch: Batch, pad_size: int, *, mode: str = "repeat") -> Batch:
    """Return the batch with `pad_size` more rows, which are not trained.

    In mode "repeat" a padding row is a copy of row 0, with loss_mask 0, rollout_expert_indices
    0, 1, ... K - 1 and router_padding_mask True: what SkyRL's trainer expects. In mode "cheap" only
    `sequences` repeats row 0; attention_mask is 1 only in the last column, so that the row costs
    one token of compute, and everything else is 0 (routes as above).

    Metadata: `uids` gets "pad0", "pad1", ...; `is_last_step` gets True, so that each padding row is
    a separate trajectory; the rest is deep-copied; `pad_size` is added.

    Args:
        batch: a mapping of name -> tensor (N, ...), list of N tensors, or None. A class with a
            `metadata` attribute (SkyRL's TrainingInputBatch) or a plain dict, whose "metadata"
            entry, if any, is a dict.
        pad_size: rows to add; may exceed N.
        mode: "repeat" or "cheap".

    Returns:
        A new batch of the same type; with pad_size 0 the same object, and
        metadata["pad_size"] = 0.

    Raises:
        ValueError: a negative pad_size, an unknown mode, or a field without rows.

    Example:
        >>> pad_batch({"loss_mask": torch.ones(1, 2)}, 1)["loss_mask"]
        tensor([[1., 1.], [0., 0.]])
    """
    check_pad_mode(OP, pad_size, mode)
    metadata = _metadata_of(batch)
    # The same object, as from SkyRL's function.
    if pad_size == 0:
        if metadata is None:
            metadata = {}
            _set_metadata(batch, metadata)
        metadata["pad_size"] = 0
        return batch
    padded = {}
    for name, value in batch.items():
        if name != "metadata":
            padded[name] = pad_field(name, value, pad_size, mode)
    result: Any = type(batch)(padded)  # type: ignore[call-arg]
    _set_metadata(result, padding_metadata(metadata, pad_size))
    return result


def pad_training_input_batch(unpadded_batch: Batch, pad_size: int) -> Batch:
    """Return `pad_batch(unpadded_batch, pad_size)`: SkyRL's name and signature."""
    return pad_batch(unpadded_batch, pad_size)


def padding_metadata(metadata: Mapping[str, Any] | None, pad_size: int) -> dict[str, Any]:
    """Return a deep copy of a batch's metadata with the entries of `pad_size` padding rows.

    Example:
        >>> padding_metadata({"uids": ["a"], "is_last_step": [True]}, 1)
        {'uids': ['a', 'pad0'], 'is_last_step': [True, True], 'pad_size': 1}
    """
    check_pad_mode("padding_metadata", pad_size, "repeat")
    padded: dict[str, Any] = {}
    for name, value in (metadata or {}).items():
        if name == "uids" and value is not None:
            padded[name] = [*value, *(f"pad{i}" for i in range(pad_size))]
        elif name == "is_last_step" and isinstance(value, torch.Tensor):
            padded[name] = torch.cat([value, value.new_ones(pad_size)])
        elif name == "is_last_step" and value is not None:
            padded[name] = [*value, *[True] * pad_size]
        else:
            padded[name] = _deep_copy(value)
    padded["pad_size"] = pad_size
    return padded


def _deep_copy(value: Any) -> Any:
    # As copy.deepcopy, which would visit each of the uids and flags of thousands of rows.
    if type(value) is list:
        inner = value if set(map(type, value)) != {tuple} else chain.from_iterable(value)
        if set(map(type, inner)) <= SCALARS:
            return value.copy()
    return copy.deepcopy(value)


def check_pad_mode(op: str, pad_size: int, mode: str) -> None:
    if isinstance(pad_size, bool) or not isinstance(pad_size, int):
        raise TypeError(f"{op}: pad_size: expected an int, got {pad_size!r}")
    if pad_size < 0:
        raise ValueError(f"{op}: pad_size: expected at least 0, got {pad_size}")
    if mode not in PAD_MODES:
        raise ValueError(f"{op}: pad mode: expected one of {PAD_MODES}, got {mode!r}")


def dummy_route(routes: torch.Tensor) -> torch.Tensor:
    """Return the (L, K) route of tokens without one: 0, 1, ... K - 1 in each layer."""
    num_layers, top_k = routes.shape[-2:]
    # Distinct experts: zeros would send the token to one of them K times.
    experts = torch.arange(top_k, dtype=routes.dtype, device=routes.device)
    return experts.expand(num_layers, top_k)


def write_padding_rows(name: str, tensor: torch.Tensor, num_rows: int, mode: str) -> None:
    """Write the rows from `num_rows` on of the batch's tensor `name`, in place."""
    rows = tensor[num_rows:]
    if rows.numel() == 0:
        return
    if name in ("loss_mask", "loss_masks"):
        rows.zero_()
    elif name == "rollout_expert_indices":
        rows.copy_(dummy_route(tensor).to(tensor.device).expand_as(rows))
    elif name == "router_padding_mask":
        rows.fill_(True)
    elif mode == "repeat" or name == "sequences":
        rows.copy_(tensor[:1].expand_as(rows))
    else:
        rows.zero_()
        if name == "attention_mask":
            rows[..., -1] = 1


def pad_field(name: str, value: Any, pad_size: int, mode: str) -> Any:
    """Return a batch's field with `pad_size` more rows, None for None; see `pad_batch`."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        _check_has_rows(name, value)
        shape = (len(value) + pad_size, *value.shape[1:])
        out = _backend.empty(shape, value.dtype, value.device)
        _copy_rows(value.detach(), out[: len(value)])
        write_padding_rows(name, out, len(value), mode)
        return out
    tensors = value if isinstance(value, (list, tuple)) else getattr(value, "tensors", None)
    if tensors is None:
        raise TypeError(
            f"{OP}: {name}: expected a tensor, a list of tensors or None, got "
            f"{type(value).__name__}"
        )
    _check_has_rows(name, tensors)
    return type(value)([*tensors, *(copy.deepcopy(tensors[0]) for _ in range(pad_size))])


def _copy_rows(rows: torch.Tensor, out: torch.Tensor) -> None:
    is_plain = not (rows.is_neg() or rows.is_conj())  # the bytes in memory are the values
    if _backend.device_kind(rows.device) == "cpu" and rows.is_contiguous() and is_plain:
        copy_cells(rows, out)
    else:
        out.copy_(rows)


def _check_has_rows(name: str, rows: Sequence[Any] | torch.Tensor) -> None:
    if len(rows) == 0:
        raise ValueError(f"{OP}: {name}: expected a row to repeat, got none")


def _metadata_of(batch: Any) -> dict[str, Any] | None:
    if isinstance(getattr(batch, "metadata", None), dict):
        return batch.metadata
    if not hasattr(batch, "metadata"):
        return batch.get("metadata")
    return None


def _set_metadata(batch: Any, metadata: dict[str, Any]) -> None:
    # SkyRL's batch has them as an attribute, a plain dict as an entry.
    if hasattr(batch, "metadata"):
        batch.metadata = metadata
    else:
        batch["metadata"] = metadata
