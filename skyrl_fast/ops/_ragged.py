"""Fields of ragged rows as inputs of the kernels. Shapes: N rows, S elements of all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend

INT32_MAX = 2**31 - 1
INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
# Those that the native copy writes.
DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32)

Rows = Any  # a list of lists or 1-D arrays, a 2-D array, Ragged, or (values, cu_seqlens)


class Ragged(NamedTuple):
    """Rows stored end to end: row i is values[cu_seqlens[i]:cu_seqlens[i + 1]].

    values: (S,) or (S, ...). cu_seqlens: (N + 1,) int32, from 0 to S.
    """

    values: torch.Tensor
    cu_seqlens: torch.Tensor


class Concat:
    """A field whose row i is the concatenation of row i of several parts.

    Example:
        >>> pack_steps({"tokens": Concat([[1, 2]], [[3]])})["tokens"].values
        tensor([1, 2, 3], dtype=torch.int32)
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: Rows) -> None:
        if not parts:
            raise ValueError("Concat: needs at least one part")
        self.parts = parts


@dataclass(frozen=True, slots=True)
class Field:
    """A field: its parts, their row lengths, (N,) int64 each, and the sum of these."""

    name: str
    parts: tuple[_C.Rows, ...]
    part_lengths: tuple[torch.Tensor, ...]
    lengths: torch.Tensor

    @property
    def kind(self) -> str | None:
        """Return "int", "uint8", "bool" or "float", by the first element; None without elements."""
        return next((part.kind for part in self.parts if part.kind is not None), None)


def is_array(value: object) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def is_flat(rows: Rows) -> bool:
    """Return whether `rows` are (values, cu_seqlens) and not a sequence of rows."""
    return isinstance(rows, tuple) and len(rows) == 2 and all(is_array(part) for part in rows)


def _source(op: str, name: str, rows: Rows) -> _C.Rows:
    if is_flat(rows):
        values, cu_seqlens = rows
        return _C.Rows(op, name, values, cu_seqlens)
    if is_array(rows):
        if rows.ndim != 2:
            raise ValueError(
                f"{op}: {name}: expected a list of rows, a 2-D array or (values, cu_seqlens), got "
                f"an array of shape {tuple(rows.shape)}"
            )
        # Views of the rows.
        rows = list(rows)
    return _C.Rows(op, name, rows)


def read_field(op: str, name: str, rows: Rows) -> Field:
    """Return the field with its row lengths; elements are not read yet."""
    parts = tuple(
        _source(op, name, part) for part in (rows.parts if isinstance(rows, Concat) else (rows,))
    )
    lengths = []
    for part in parts:
        if part.num_rows != parts[0].num_rows:
            raise ValueError(
                f"{op}: {name}: expected parts of equally many rows, got {parts[0].num_rows} and "
                f"{part.num_rows}"
            )
        # Elements are read once, by the copy, when the place of each row is known.
        lengths.append(torch.empty(part.num_rows, dtype=torch.int64, device="cpu"))
        part.lengths(lengths[-1])
    if len(lengths) == 1:
        total = lengths[0]
    else:
        total = torch.stack(lengths).sum(0)
    return Field(name, parts, tuple(lengths), total)


def read_fields(op: str, fields: Mapping[str, Rows]) -> dict[str, Field]:
    """Return every field; all must have the same number of rows."""
    if not isinstance(fields, Mapping) or not fields:
        if isinstance(fields, Mapping):
            got = "an empty one"
        else:
            got = type(fields).__name__
        raise TypeError(f"{op}: fields: expected a non-empty mapping of name to rows, got {got}")
    read = {}
    for name, rows in fields.items():
        read[name] = read_field(op, name, rows)
    first = next(iter(read.values()))
    for field in read.values():
        if len(field.lengths) != len(first.lengths):
            raise ValueError(
                f"{op}: fields: expected equally many rows in all, got {len(first.lengths)} in "
                f"{first.name} and {len(field.lengths)} in {field.name}"
            )
    return read


def check_aligned(op: str, first: Field, other: Field) -> None:
    """Raise where two fields differ in the length of a row."""
    if torch.equal(first.lengths, other.lengths):
        return
    row = int((first.lengths != other.lengths).nonzero()[0])
    raise ValueError(
        f"{op}: {other.name}: expected as many entries as {first.name} in every row, got "
        f"{int(other.lengths[row])} and {int(first.lengths[row])} in row {row}"
    )


def choose_dtype(
    op: str, field: Field, dtypes: Mapping[str, torch.dtype], integer: torch.dtype
) -> torch.dtype:
    """Return the requested dtype, else that of the field's kind (ints: `integer`)."""
    dtype = dtypes.get(field.name)
    if dtype is None:
        by_kind = {"bool": torch.uint8, "uint8": torch.uint8, "float": torch.float32}
        dtype = by_kind.get(field.kind or "int", integer)
    if dtype not in DTYPES:
        raise ValueError(f"{op}: {field.name}: expected a dtype of {DTYPES}, got {dtype}")
    return dtype


def offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Return the (N + 1,) int64 offsets of rows of these lengths."""
    cu = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=cu[1:])
    return cu


def int32_offsets(op: str, name: str, lengths: torch.Tensor) -> torch.Tensor:
    """Return the (N + 1,) int32 offsets, or an error where they do not fit."""
    # Summed in 64 bits: only the total shows whether 32 are enough.
    cu = offsets(lengths)
    if int(cu[-1]) > INT32_MAX:
        raise ValueError(
            f"{op}: {name}: expected at most {INT32_MAX} elements (cu_seqlens is int32), got "
            f"{int(cu[-1])}; split the batch"
        )
    return cu.to(torch.int32)


def copy_jobs(
    field: Field,
    out: torch.Tensor,
    starts: torch.Tensor,
    low: int = INT64_MIN,
    high: int = INT64_MAX,
) -> list[tuple[Any, ...]]:
    """Return the jobs that copy a field's rows to `out`, row i from element `starts[i]` on."""
    # Bounds are checked while values are copied: a pass of its own would read them twice.
    if out.dtype == torch.bool:  # stored as bytes; only 0 and 1 may be written
        out = out.view(torch.uint8)
        low = max(low, 0)
        high = min(high, 1)
    jobs = []
    for part, lengths in zip(field.parts, field.part_lengths, strict=True):
        jobs.append((part, out, starts, low, high))
        # In each row the next part follows this one.
        starts = starts + lengths
    return jobs


def fill(op: str, copies: Sequence[tuple[Any, ...]], fills: Sequence[tuple[Any, ...]] = ()) -> None:
    """Run the copies of `copy_jobs`, and write padding and masks.

    Args:
        copies: each (rows, out, starts, low, high).
        fills: each (out, lengths, value), padded on the left; value None: a mask.
    """
    _C.fill_rows(op, list(copies), list(fills), _backend.num_threads())


def check_names(op: str, argument: str, names: Sequence[str], fields: Mapping[str, Any]) -> None:
    for name in names:
        if name not in fields:
            raise ValueError(
                f"{op}: {argument} must name fields ({', '.join(map(repr, fields))}), got {name!r}"
            )
