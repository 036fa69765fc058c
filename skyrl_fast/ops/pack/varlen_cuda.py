"""Padded rows to flat rows, and back, on a GPU. N rows, W width, S real cells."""

from __future__ import annotations

from typing import Any

import torch

from skyrl_fast.ops import _backend, _ragged

LEFT = 0
PATTERN_BYTES = 16


def padded_to_flat(
    padded: torch.Tensor, lengths: torch.Tensor, side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values (S, ...) and position ids (S,), in one launch.

    Args:
        padded: (N, W, ...) on a GPU.
        lengths: (N,) int64 on the CPU, from 0 to W.
        side: of the padding, 0 left or 1 right.
    """
    cu = _ragged.offsets(lengths)
    total = int(cu[-1])
    device_cu = _backend.to_gpu(cu, padded.device)
    values, position_ids = _PaddedToFlat.apply(padded, device_cu, total, side)
    return values, position_ids


def flat_to_padded(
    values: torch.Tensor, lengths: torch.Tensor, width: int, side: int, pad_value: float
) -> torch.Tensor:
    """Return (N, W, ...); `lengths` (N,) int64 on the CPU, their sum the number of values."""
    device_cu = _backend.to_gpu(_ragged.offsets(lengths), values.device)
    return _FlatToPadded.apply(values, device_cu, width, side, pad_value)


def pattern_of(pad_value: float, dtype: torch.dtype) -> bytes:
    """Return the bytes of an element, repeated to 16.

    Example:
        >>> pattern_of(1, torch.int16) == bytes([1, 0]) * 8
        True
    """
    element = torch.full((1,), pad_value, dtype=dtype).view(torch.uint8).numpy().tobytes()
    return element * (PATTERN_BYTES // len(element))


def mask_lengths(op: str, mask: torch.Tensor, side: int) -> torch.Tensor:
    """Return (N,) int64 on the CPU, if each row is padding on `side` and ones elsewhere.

    One transfer to the CPU copies the lengths and the row checks.
    """
    ones = mask == 1
    lengths = ones.sum(1)
    columns = torch.arange(mask.shape[1], device=mask.device)
    if side == LEFT:
        block = columns >= (mask.shape[1] - lengths)[:, None]
    else:
        block = columns < lengths[:, None]
    is_bad = ((ones != block) | (ones != (mask != 0))).any(1)
    lengths, is_bad = torch.stack([lengths, is_bad.to(lengths.dtype)]).cpu()
    if bool(is_bad.any()):
        where = "0 in the padding on the left and 1 after it"
        if side != LEFT:
            where = "1 in each row's cells and 0 in the padding on the right"
        raise ValueError(
            f"{op}: attention_mask must be {where}, got something else in row "
            f"{int(is_bad.nonzero()[0])}"
        )
    return lengths.contiguous()


def _gather(padded: torch.Tensor, cu: torch.Tensor, total: int, side: int, positions: Any) -> Any:
    out = padded.new_empty((total, *padded.shape[2:]))
    source = padded.detach().contiguous()
    _backend.run_kernel("padded_to_flat", False, padded, source, cu, side, out, positions)
    return out


def _scatter(
    values: torch.Tensor, cu: torch.Tensor, width: int, side: int, pad_value: float
) -> torch.Tensor:
    out = values.new_empty((cu.numel() - 1, width, *values.shape[1:]))
    pattern = pattern_of(pad_value, values.dtype)
    source = values.detach().contiguous()
    _backend.run_kernel("flat_to_padded", False, values, source, cu, side, pattern, out)
    return out


class _PaddedToFlat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, padded: torch.Tensor, cu: torch.Tensor, total: int, side: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cu)
        ctx.rows = (padded.shape[1], side)
        positions = torch.empty(total, dtype=torch.int64, device=padded.device)
        values = _gather(padded, cu, total, side, positions)
        ctx.mark_non_differentiable(positions)
        return values, positions

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        (cu,) = ctx.saved_tensors
        return _FlatToPadded.apply(gradient, cu, *ctx.rows, 0), None, None, None


class _FlatToPadded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, cu: torch.Tensor, width: int, side: int, pad_value: float
    ) -> torch.Tensor:
        ctx.save_for_backward(cu)
        ctx.rows = (len(values), side)
        return _scatter(values, cu, width, side, pad_value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (cu,) = ctx.saved_tensors
        return _PaddedToFlat.apply(gradient, cu, *ctx.rows)[0], None, None, None, None
