"""Padded rows to flat rows, and back, on a GPU. N rows, W width, S real cells."""

from __future__ import annotations

from typing import Any

import torch

from skyrl_fast.ops import _backend, _ragged

PATTERN_BYTES = 16


def padded_to_flat(
    padded: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values (S, ...) and position ids (S,), in one launch.

    Args:
        padded: (N, W, ...) on a GPU.
        starts, lengths: (N,) int64 on the CPU; each row's real cells, within W.
    """
    cu, starts, total = _to_gpu(starts, lengths, padded.device)
    values, position_ids = _PaddedToFlat.apply(padded, cu, starts, total)
    return values, position_ids


def flat_to_padded(
    values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, width: int, pad_value: float
) -> torch.Tensor:
    """Return (N, W, ...); `starts` and `lengths` as above, as many cells as there are values."""
    cu, starts, _ = _to_gpu(starts, lengths, values.device)
    return _FlatToPadded.apply(values, cu, starts, width, pad_value)


def _to_gpu(
    starts: torch.Tensor, lengths: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return offsets (N + 1,) and starts (N,) on the device, in one transfer, and their total."""
    cu = _ragged.offsets(lengths)
    both = _backend.to_gpu(torch.cat([cu, starts]), device)
    return both[: len(cu)], both[len(cu) :], int(cu[-1])


def pattern_of(pad_value: float, dtype: torch.dtype) -> bytes:
    """Return the bytes of an element, repeated to 16.

    Example:
        >>> pattern_of(1, torch.int16) == bytes([1, 0]) * 8
        True
    """
    element = torch.full((1,), pad_value, dtype=dtype).view(torch.uint8).numpy().tobytes()
    return element * (PATTERN_BYTES // len(element))


def mask_blocks(op: str, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return starts and lengths, (N,) int64 on the CPU, of each row's one block of ones.

    One transfer to the CPU copies both, and the row checks.
    """
    ones = mask == 1
    lengths = ones.sum(1)
    columns = torch.arange(mask.shape[1], device=mask.device)
    starts = torch.zeros_like(lengths)
    if mask.shape[1] > 0:
        starts = ones.to(torch.uint8).argmax(1)  # the first of equal values
    block = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
    is_bad = ((ones != block) | (ones != (mask != 0))).any(1)
    starts, lengths, is_bad = torch.stack([starts, lengths, is_bad.to(lengths.dtype)]).cpu()
    if bool(is_bad.any()):
        raise ValueError(
            f"{op}: attention_mask must be 0 but for one block of 1 in each row, got something "
            f"else in row {int(is_bad.nonzero()[0])}"
        )
    return starts.contiguous(), lengths.contiguous()


def _gather(
    padded: torch.Tensor, cu: torch.Tensor, starts: torch.Tensor, total: int, positions: Any
) -> Any:
    out = padded.new_empty((total, *padded.shape[2:]))
    source = padded.detach().contiguous()
    _backend.run_kernel("padded_to_flat", False, padded, source, cu, starts, out, positions)
    return out


def _scatter(
    values: torch.Tensor, cu: torch.Tensor, starts: torch.Tensor, width: int, pad_value: float
) -> torch.Tensor:
    out = values.new_empty((starts.numel(), width, *values.shape[1:]))
    pattern = pattern_of(pad_value, values.dtype)
    source = values.detach().contiguous()
    _backend.run_kernel("flat_to_padded", False, values, source, cu, starts, pattern, out)
    return out


class _PaddedToFlat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, padded: torch.Tensor, cu: torch.Tensor, starts: torch.Tensor, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cu, starts)
        ctx.width = padded.shape[1]
        positions = torch.empty(total, dtype=torch.int64, device=padded.device)
        values = _gather(padded, cu, starts, total, positions)
        ctx.mark_non_differentiable(positions)
        return values, positions

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        return _FlatToPadded.apply(gradient, *ctx.saved_tensors, ctx.width, 0), None, None, None


class _FlatToPadded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        cu: torch.Tensor,
        starts: torch.Tensor,
        width: int,
        pad_value: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(cu, starts)
        ctx.total = len(values)
        return _scatter(values, cu, starts, width, pad_value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        flat, _ = _PaddedToFlat.apply(gradient, *ctx.saved_tensors, ctx.total)
        return flat, None, None, None, None
