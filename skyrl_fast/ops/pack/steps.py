"""Ragged rows to flat and padded tensors and back. Shapes: N rows (steps), S elements of all rows
of a field, W padded width.

Rows are, here and in every function of this module: a list of rows, each a list of numbers or a
1-D numpy array or CPU tensor; a 2-D array; or flat rows, `Ragged` or any tuple
`(values, cu_seqlens)` of two arrays. Lists are read once, in C++; arrays are copied in bulk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from skyrl_fast.ops import _backend, _ragged
from skyrl_fast.ops._offsets import integer_vector
from skyrl_fast.ops._ragged import Concat, Ragged, Rows
from skyrl_fast.ops.pack import reference

SIDES = {"left": 0, "right": 1}

__all__ = ["Concat", "Ragged", "pack_steps", "pad_steps", "unpack_steps"]


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
    _ragged.fill(op, copies)
    return packed


def pad_steps(
    fields: Mapping[str, Rows],
    *,
    side: str | Mapping[str, str] = "left",
    pad_values: float | Mapping[str, float] = 0,
    dtypes: Mapping[str, torch.dtype] | None = None,
    masks: Mapping[str, str] | None = None,
    width: int | Mapping[str, int] | None = None,
    aligned: Sequence[Sequence[str]] = (),
    backend: str | None = None,
) -> dict[str, torch.Tensor]:
    """Return every field as a padded tensor, and masks of the real cells if requested.

    Args:
        fields: name -> rows, as in `pack_steps`.
        side: of the padding, "left" or "right", for all fields or per name.
        pad_values: the value of padding cells, for all fields or per name (0 where not named).
        dtypes: as in `pack_steps`, but ints become int64 by default.
        masks: name of a mask -> name of the field whose real cells are 1 in it, int64.
        width: the padded width W, for all fields or per name; None: each field's longest row.
        aligned: groups of names whose rows must be equally long.
        backend: "native", "torch", or None to choose.

    Returns:
        name -> (N, W) tensor, for fields and masks.

    Raises:
        TypeError, ValueError: as `pack_steps`; also a row longer than `width`.

    Example:
        >>> pad_steps({"ids": [[5, 6], [7]]}, pad_values=9, masks={"mask": "ids"})
        {'ids': tensor([[5, 6], [9, 7]]), 'mask': tensor([[1, 1], [0, 1]])}
    """
    op = "pad_steps"
    use_torch = _backend.select(op, backend=backend) == "torch"
    options = [dtypes or {}, side, pad_values, width]
    for argument, option in zip(("dtypes", "side", "pad_values", "width"), options, strict=True):
        if isinstance(option, Mapping):
            _ragged.check_names(op, argument, list(option), fields)
    masks = masks or {}
    _ragged.check_names(op, "masks", list(masks.values()), fields)
    for name in masks:
        if name in fields:
            raise ValueError(f"{op}: masks must have names that are not fields, got {name!r}")
    read = _ragged.read_fields(op, fields)
    _check_groups(op, aligned, read)
    padded: dict[str, torch.Tensor] = {}
    copies: list[tuple[Any, ...]] = []
    fills: list[tuple[Any, ...]] = []
    for name, field in read.items():
        dtype = _ragged.choose_dtype(op, field, dtypes or {}, torch.int64)
        pad_value = _check_pad_value(op, name, _option(pad_values, name, 0), dtype)
        code = _side_code(op, _option(side, name, "left"))
        columns = _width(op, field, _option(width, name, None))
        if use_torch:
            side_name = "right" if code else "left"
            padded[name] = reference.pad(fields[name], dtype, columns, side_name, pad_value)
        else:
            padded[name] = out = _backend.empty((len(field.lengths), columns), dtype)
            starts = row_starts(field.lengths, columns, code)
            copies += _ragged.copy_jobs(field, out, starts)
            fills.append((_bytes_of_bool(out), field.lengths, code, pad_value))
        for mask, source in masks.items():
            if source == name:
                padded[mask] = _backend.empty((len(field.lengths), columns), torch.int64)
                fills.append((padded[mask], field.lengths, code, None))
    _ragged.fill(op, copies, fills)
    return padded


def unpack_steps(
    values: torch.Tensor | Ragged,
    cu_seqlens: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | Sequence[int] | None = None,
    side: str = "left",
    as_lists: bool = False,
) -> list[torch.Tensor] | list[list[Any]]:
    """Return the rows of flat or padded values, as views or as Python lists.

    Args:
        values: flat (S, ...) with `cu_seqlens`, a `Ragged`, or padded (N, W, ...) with `lengths`.
        cu_seqlens: (N + 1,) offsets of flat rows.
        lengths: (N,) lengths of padded rows.
        side: of the padding of padded rows, "left" or "right".
        as_lists: lists of Python numbers instead of views.

    Returns:
        N rows; row i is (length_i, ...).

    Raises:
        ValueError: neither or both of cu_seqlens and lengths, offsets that do not run from 0 to S,
            lengths over W.

    Example:
        >>> unpack_steps(torch.tensor([[0, 5], [6, 7]]), lengths=[1, 2], as_lists=True)
        [[5], [6, 7]]
    """
    op = "unpack_steps"
    if isinstance(values, tuple):
        values, cu_seqlens = values
    if (cu_seqlens is None) == (lengths is None):
        raise ValueError(f"{op}: give either cu_seqlens (flat) or lengths (padded)")
    if cu_seqlens is not None:
        cu = integer_vector(op, "cu_seqlens", cu_seqlens).tolist()
        sizes = [end - begin for begin, end in itertools.pairwise(cu)]
        if not cu or cu[0] != 0 or cu[-1] != len(values) or min(sizes, default=0) < 0:
            raise ValueError(
                f"{op}: cu_seqlens must be non-decreasing offsets from 0 to {len(values)}, got "
                f"{cu if len(cu) < 10 else [*cu[:4], '...', *cu[-4:]]}"
            )
        if as_lists:
            flat = values.tolist()
            return [flat[begin:end] for begin, end in itertools.pairwise(cu)]
        return list(torch.split(values, sizes))
    sizes = integer_vector(op, "lengths", lengths).tolist()
    columns = values.shape[1] if values.dim() > 1 else -1
    if values.dim() < 2 or len(sizes) != len(values):
        raise ValueError(
            f"{op}: padded values must be (N, W) with one length per row, got shape "
            f"{tuple(values.shape)} and {len(sizes)} lengths"
        )
    if any(not 0 <= size <= columns for size in sizes):
        raise ValueError(
            f"{op}: lengths must be from 0 to {columns}, got {min(sizes)} to {max(sizes)}"
        )
    left = _side_code(op, side) == SIDES["left"]
    rows = [
        row[columns - size :] if left else row[:size]
        for row, size in zip(values.tolist() if as_lists else values, sizes, strict=True)
    ]
    return rows


def row_starts(lengths: torch.Tensor, columns: int, side_code: int) -> torch.Tensor:
    """Return the (N,) element at which each row of a padded (N, columns) array begins."""
    starts = torch.arange(len(lengths), dtype=torch.int64) * columns
    return starts + (columns - lengths) if side_code == SIDES["left"] else starts


def _option(option: Any, name: str, default: Any) -> Any:
    if isinstance(option, Mapping):
        return option.get(name, default)
    return default if option is None else option


def _side_code(op: str, side: str) -> int:
    if side not in SIDES:
        raise ValueError(f"{op}: side must be 'left' or 'right', got {side!r}")
    return SIDES[side]


def _width(op: str, field: _ragged.Field, width: int | None) -> int:
    longest = int(field.lengths.max()) if len(field.lengths) else 0
    if width is None:
        return longest
    if width < longest:
        row = int((field.lengths > width).nonzero()[0]) if len(field.lengths) else 0
        raise ValueError(
            f"{op}: width must hold the longest row of {field.name}, got {width} for "
            f"{int(field.lengths[row])} elements in row {row}"
            if width >= 0
            else f"{op}: width must not be negative, got {width}"
        )
    return width


def _check_pad_value(op: str, name: str, value: float, dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float(value)
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not math.isfinite(value) or value != int(value) or not low <= value <= high:
        raise ValueError(f"{op}: the pad value of {name} must fit {dtype}, got {value!r}")
    return int(value)


def _bytes_of_bool(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.uint8) if out.dtype == torch.bool else out


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
