"""Ragged rows to flat and padded tensors. Shapes: N rows (steps), S elements of all rows of a
field, T padded sequence length, R padded response length.

Rows are, here and in every function of this module: a list of rows, each a list of numbers or a
1-D numpy array or CPU tensor; a 2-D array; or flat rows, `Ragged` or any tuple
`(values, cu_seqlens)` of two arrays. Lists are read once, in C++; arrays are copied in bulk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from skyrl_fast.ops import _backend, _ragged
from skyrl_fast.ops._ragged import Concat, Ragged, Rows
from skyrl_fast.ops.pack import reference

__all__ = ["Concat", "Ragged", "pack_steps", "pad_rows"]


def pack_steps(
    fields: Mapping[str, Rows],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    aligned: Sequence[Sequence[str]] = (),
    backend: str | None = None,
) -> dict[str, Ragged]:
    """Return every field's rows stored end to end, with their offsets.

    Args:
        fields: name -> rows (see the module); all with N rows. `Concat(a, b)` joins two of them
            row by row, for instance prompts and responses.
        dtypes: name -> bool, uint8, int16, int32, int64 or float32. Where not given: ints to
            int32, floats to float32, bools and uint8 to uint8, by the field's first element.
        aligned: groups of names whose rows must be equally long; each group shares one cu_seqlens.
        backend: "native", "torch", or None to choose.

    Returns:
        name -> Ragged(values (S,), cu_seqlens (N + 1,) int32).

    Raises:
        TypeError: an element or array that is not numeric, or a float in an integer field.
        ValueError: fields or aligned rows of different lengths, an integer that does not fit the
            dtype, more than 2^31 - 1 elements in a field, an unknown name.

    Example:
        >>> pack_steps({"tokens": [[5, 6], [7]]})["tokens"]
        Ragged(values=tensor([5, 6, 7], dtype=torch.int32),
               cu_seqlens=tensor([0, 2, 3], dtype=torch.int32))
    """
    op = "pack_steps"
    use_torch = _backend.select(op, backend=backend) == "torch"
    dtypes = dtypes or {}
    _ragged.check_names(op, "dtypes", list(dtypes), fields)
    read = _ragged.read_fields(op, fields)
    groups = _check_groups(op, aligned, read)
    group_cu: dict[str, torch.Tensor] = {}
    packed: dict[str, Ragged] = {}
    copies: list[tuple[Any, ...]] = []
    for name, field in read.items():
        dtype = _ragged.choose_dtype(op, field, dtypes, torch.int32)
        group = groups.get(name, name)
        if group not in group_cu:
            group_cu[group] = _ragged.int32_offsets(op, name, field.lengths)
        cu = group_cu[group]
        if use_torch:
            packed[name] = Ragged(reference.pack(fields[name], dtype), cu)
            continue
        values = _backend.empty((int(cu[-1]),), dtype)
        copies += _ragged.copy_jobs(field, values, cu[:-1].to(torch.int64))
        packed[name] = Ragged(values, cu)
    # All fields at once: threads share one pass over the elements of all.
    _ragged.fill(op, copies)
    return packed


def pad_rows(
    op: str,
    tokens: _ragged.Field,
    response_lengths: torch.Tensor,
    responses: Mapping[str, _ragged.Field],
    *,
    pad_token_id: int,
    pad_size: int = 0,
    highest_id: int = _ragged.INT64_MAX,
) -> dict[str, torch.Tensor]:
    """Return the columns of a padded batch, with `pad_size` unwritten rows after the N.

    Rows end at the right edge.

    Args:
        response_lengths: (N,) int64.
        responses: columns of the response tokens.
        highest_id: of a token; none may be negative.

    Returns:
        "sequences" and "attention_mask" (N + pad_size, T) int64, "response_mask"
        (N + pad_size, R) int64, and the `responses`, (N + pad_size, R) float32.
    """
    columns: dict[str, torch.Tensor] = {}
    copies: list[tuple[Any, ...]] = []
    fills: list[tuple[Any, ...]] = []

    def add(name: str, lengths: torch.Tensor, field: _ragged.Field | None, pad: float = 0.0) -> Any:
        if len(lengths):
            width = int(lengths.max())
        else:
            width = 0
        if name in responses:
            dtype = torch.float32
        else:
            dtype = torch.int64
        # With room for the padding rows: nothing is copied again to append them.
        columns[name] = out = _backend.empty((len(lengths) + pad_size, width), dtype)
        fills.append((out, lengths, None if field is None else pad))
        bounds = (0, highest_id) if field is tokens else ()
        if field is not None:
            copies.extend(_ragged.copy_jobs(field, out, row_starts(lengths, width), *bounds))

    add("sequences", tokens.lengths, tokens, pad_token_id)
    add("attention_mask", tokens.lengths, None)
    add("response_mask", response_lengths, None)
    for name, field in responses.items():
        add(name, response_lengths, field)
    _ragged.fill(op, copies, fills)
    return columns


def row_starts(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return the (N,) element at which each row of a left-padded (N, width) array begins."""
    return torch.arange(1, len(lengths) + 1, device=lengths.device) * width - lengths


def _check_groups(
    op: str, aligned: Sequence[Sequence[str]], read: Mapping[str, _ragged.Field]
) -> dict[str, str]:
    """Return name -> the first name of its group, after comparing the row lengths."""
    groups: dict[str, str] = {}
    for names in aligned:
        _ragged.check_names(op, "aligned", names, read)
        for name in names:
            _ragged.check_aligned(op, read[names[0]], read[name])
            groups[name] = names[0]
    return groups
