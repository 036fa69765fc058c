"""Plain-torch reference of packing. Shapes: N rows, S cells of all rows, W padded width."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from skyrl_fast.ops._ragged import Concat, Rows, is_flat


def row_tensors(rows: Rows, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return one 1-D tensor of `dtype` per row."""
    if isinstance(rows, Concat):
        parts = []
        for part in rows.parts:
            parts.append(row_tensors(part, dtype))
        return [torch.cat(row) for row in zip(*parts, strict=True)]
    if is_flat(rows):
        values = rows[0]
        cu = rows[1].tolist()
        rows = []
        for begin, end in itertools.pairwise(cu):
            rows.append(values[begin:end])
    return [_row(row, dtype) for row in rows]


def _row(row: object, dtype: torch.dtype) -> torch.Tensor:
    # torch takes no negative strides.
    values = np.ascontiguousarray(row) if isinstance(row, np.ndarray) else row
    tensor = torch.as_tensor(values, device="cpu")
    if tensor.numel() == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    if tensor.is_floating_point() and not dtype.is_floating_point:
        raise TypeError(f"a row of {tensor.dtype} cannot become {dtype}")
    if not dtype.is_floating_point and dtype != torch.bool:
        info = torch.iinfo(dtype)
        if int(tensor.min()) < info.min or int(tensor.max()) > info.max:
            raise ValueError(f"a row of {tensor.dtype} does not fit {dtype}")
    return tensor.detach().to(dtype)


def pack(rows: Rows, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows end to end, (S,)."""
    return torch.cat([_row([], dtype), *row_tensors(rows, dtype)])


def pad(rows: Rows, dtype: torch.dtype, width: int, side: str, pad_value: float) -> torch.Tensor:
    """Return the rows in an (N, width) tensor, padded on `side`."""
    tensors = row_tensors(rows, dtype)
    out = torch.full((len(tensors), width), pad_value, dtype=dtype, device="cpu")
    for row, tensor in zip(out, tensors, strict=True):
        if side == "left":
            cells = row[width - len(tensor) :]
        else:
            cells = row[: len(tensor)]
        cells.copy_(tensor)
    return out


def padded_to_flat(
    padded: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return the real cells of (N, W, ...) row after row, (S, ...)."""
    return padded[block_cells(starts, lengths, padded.shape[1]).to(padded.device)]


def position_ids(lengths: torch.Tensor) -> torch.Tensor:
    """Return (S,) int64: 0, 1, ... in each row."""
    total = int(lengths.sum())
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return torch.arange(total, device=lengths.device) - starts


def flat_to_padded(
    flat: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, width: int, pad_value: float
) -> torch.Tensor:
    """Return (N, W, ...) with the flat rows in the real cells and `pad_value` elsewhere."""
    shape = (len(lengths), width, *flat.shape[1:])
    out = torch.full(shape, pad_value, dtype=flat.dtype, device=flat.device)
    cells = block_cells(starts, lengths, width).to(flat.device)
    return out.masked_scatter(cells.reshape(shape[:2] + (1,) * (flat.dim() - 1)), flat)


def block_cells(starts: torch.Tensor, lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return (N, W) bool, True in the `lengths` cells of each row from column `starts` on."""
    columns = torch.arange(width, device=lengths.device)
    return (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])


def real_cells(lengths: torch.Tensor, width: int, side: str) -> torch.Tensor:
    """Return (N, W) bool, True in the cells of each row."""
    if side == "left":
        starts = width - lengths
    else:
        starts = torch.zeros_like(lengths)
    return block_cells(starts, lengths, width)


def batch_tensors(
    pad_token_id: int,
    prompts: Rows,
    responses: Rows,
    rewards: Any,
    loss_masks: Rows,
    logprobs: Rows | None,
) -> list[torch.Tensor | None]:
    """Return sequences, attention_mask, response_mask, rewards, loss_masks, logprobs."""
    tokens = Concat(prompts, responses)
    lengths = torch.tensor([len(row) for row in row_tensors(tokens, torch.int64)], device="cpu")
    response_rows = row_tensors(responses, torch.int64)
    response_lengths = torch.tensor([len(row) for row in response_rows], device="cpu")
    width = int(lengths.max())
    columns = int(response_lengths.max())
    response_mask = real_cells(response_lengths, columns, "left").to(torch.int64)

    def right_aligned(rows: Rows) -> torch.Tensor:
        return pad(rows, torch.float32, columns, "left", 0.0)

    sequences = pad(tokens, torch.int64, width, "left", pad_token_id)
    if bool((sequences[real_cells(lengths, width, "left")] < 0).any()):
        raise ValueError("token ids must not be negative")
    try:
        scores = torch.as_tensor(rewards, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError):
        scores = torch.empty((0, 0), device="cpu")
    if scores.dim() == 1:
        reward_tensor = torch.zeros((len(lengths), columns), dtype=torch.float32, device="cpu")
        if columns > 0:
            reward_tensor[:, -1] = scores
    else:
        reward_tensor = right_aligned(rewards)
    return [
        sequences,
        real_cells(lengths, width, "left").to(torch.int64),
        response_mask,
        reward_tensor,
        right_aligned(loss_masks),
        None if logprobs is None else right_aligned(logprobs),
    ]
