"""Plain-torch packing: what every other backend must equal. Shapes: N rows, W padded width."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from skyrl_fast.ops._ragged import Concat, Rows, is_flat


def row_tensors(rows: Rows, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return one 1-D tensor of `dtype` per row."""
    if isinstance(rows, Concat):
        parts = [row_tensors(part, dtype) for part in rows.parts]
        return [torch.cat(row) for row in zip(*parts, strict=True)]
    if is_flat(rows):
        values, cu = rows[0], torch.as_tensor(rows[1]).tolist()
        rows = [values[begin:end] for begin, end in itertools.pairwise(cu)]
    return [_row(row, dtype) for row in rows]


def _row(row: object, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.as_tensor(np.ascontiguousarray(row) if isinstance(row, np.ndarray) else row)
    if tensor.numel() == 0:
        return torch.empty(0, dtype=dtype)
    if tensor.is_floating_point() and not dtype.is_floating_point:
        raise TypeError(f"a row of {tensor.dtype} cannot become {dtype}")
    if not dtype.is_floating_point and dtype != torch.bool:
        info = torch.iinfo(dtype)
        if int(tensor.min()) < info.min or int(tensor.max()) > info.max:
            raise ValueError(f"a row of {tensor.dtype} does not fit {dtype}")
    return tensor.detach().to(dtype)


def pack(rows: Rows, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows end to end, (S,)."""
    return torch.cat([torch.empty(0, dtype=dtype), *row_tensors(rows, dtype)])


def pad(rows: Rows, dtype: torch.dtype, width: int, side: str, pad_value: float) -> torch.Tensor:
    """Return the rows in an (N, width) tensor, padded on `side`."""
    tensors = row_tensors(rows, dtype)
    out = torch.full((len(tensors), width), pad_value, dtype=dtype)
    for row, tensor in zip(out, tensors, strict=True):
        cells = row[width - len(tensor) :] if side == "left" else row[: len(tensor)]
        cells.copy_(tensor)
    return out


def padded_to_flat(padded: torch.Tensor, lengths: torch.Tensor, side: str) -> torch.Tensor:
    """Return the real cells of (N, W, ...) row after row, (S, ...)."""
    return padded[real_cells(lengths, padded.shape[1], side)]


def flat_to_padded(
    flat: torch.Tensor, lengths: torch.Tensor, width: int, side: str, pad_value: float
) -> torch.Tensor:
    """Return (N, W, ...) with the flat rows in the real cells and `pad_value` elsewhere."""
    shape = (len(lengths), width, *flat.shape[1:])
    out = torch.full(shape, pad_value, dtype=flat.dtype, device=flat.device)
    return out.masked_scatter(
        real_cells(lengths.to(flat.device), width, side).reshape(
            shape[:2] + (1,) * (flat.dim() - 1)
        ),
        flat,
    )


def real_cells(lengths: torch.Tensor, width: int, side: str) -> torch.Tensor:
    """Return (N, W) bool, True in the cells of each row."""
    columns = torch.arange(width, device=lengths.device)
    if side == "left":
        return columns >= (width - lengths)[:, None]
    return columns < lengths[:, None]
