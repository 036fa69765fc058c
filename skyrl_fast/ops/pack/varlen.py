"""Padded tensors to flat rows, and back. Shapes: N rows, W padded width, S real cells.

The trailing dimensions (...) of both layouts are equal: token ids have none, hidden states one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend, _ragged
from skyrl_fast.ops._offsets import integer_vector
from skyrl_fast.ops.pack import reference, varlen_cuda

SIDES = {"left": 0, "right": 1}
NATIVE_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


class Varlen(NamedTuple):
    """The inputs of a variable-length attention kernel.

    values: (S, ...). cu_seqlens: (N + 1,) int32. position_ids: (S,) int64, 0, 1, ... in each row.
    """

    values: torch.Tensor
    cu_seqlens: torch.Tensor
    position_ids: torch.Tensor


def padded_to_varlen(
    padded: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | None = None,
    side: str = "left",
    backend: str | None = None,
) -> Varlen:
    """Return the real cells of a padded tensor row after row, with offsets and positions.

    Args:
        padded: (N, W, ...), any dtype; differentiable where it is floating point.
        attention_mask: (N, W), 1 in the real cells, which are one block at the row's end (padding
            on the left) or beginning. Give this or `lengths`. A mask on a GPU costs a
            synchronization: the shape of the result depends on it.
        lengths: (N,) integers, the number of real cells of each row; on the CPU, so that nothing
            synchronizes.
        side: of the padding, "left" or "right".
        backend: "native", "torch", or None to choose.

    Returns:
        Varlen(values (S, ...), cu_seqlens (N + 1,) int32, position_ids (S,) int64).

    Raises:
        ValueError: neither or both of mask and lengths, shapes that do not match, a mask with holes
            or padding on the other side, lengths over W, more than 2^31 - 1 cells.

    Example:
        >>> padded_to_varlen(torch.tensor([[0, 5], [6, 7]]), torch.tensor([[0, 1], [1, 1]]))
        Varlen(values=tensor([5, 6, 7]), cu_seqlens=tensor([0, 1, 3], dtype=torch.int32),
               position_ids=tensor([0, 0, 1]))
    """
    op = "padded_to_varlen"
    _check_side(op, side)
    if padded.dim() < 2:
        raise ValueError(f"{op}: padded must be (N, W, ...), got shape {tuple(padded.shape)}")
    if (attention_mask is None) == (lengths is None):
        raise ValueError(f"{op}: give either attention_mask or lengths")
    if attention_mask is not None:
        if attention_mask.shape != padded.shape[:2]:
            raise ValueError(
                f"{op}: attention_mask must be of shape {tuple(padded.shape[:2])}, got "
                f"{tuple(attention_mask.shape)}"
            )
        lengths = _mask_lengths(op, attention_mask, side)
    lengths = _check_lengths(op, lengths, len(padded), padded.shape[1])
    use_native = _select(op, padded, backend)
    cu_seqlens = _ragged.int32_offsets(op, "padded", lengths)
    if use_native and _backend.on_gpu(padded):
        values, position_ids = varlen_cuda.padded_to_flat(padded, lengths, SIDES[side])
        return Varlen(values, _backend.to_gpu(cu_seqlens, padded.device), position_ids)
    values = _PaddedToFlat.apply(padded, lengths, side, use_native)
    position_ids = _position_ids(lengths, cu_seqlens, use_native)
    return Varlen(values, cu_seqlens.to(padded.device), position_ids.to(padded.device))


def varlen_to_padded(
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    width: int | None = None,
    side: str = "left",
    pad_value: float = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """Return rows stored end to end as one padded tensor.

    Args:
        values: (S, ...), any dtype; differentiable where it is floating point.
        cu_seqlens: (N + 1,) int32 or int64 offsets from 0 to S.
        width: W; None: the longest row.
        side: of the padding, "left" or "right".
        pad_value: the value of the padding cells.
        backend: "native", "torch", or None to choose.

    Returns:
        (N, W, ...) of the values' dtype.

    Raises:
        ValueError: decreasing offsets, or not from 0 to S; a row longer than W.

    Example:
        >>> varlen_to_padded(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 3]))
        tensor([[0, 5], [6, 7]])
    """
    op = "varlen_to_padded"
    _check_side(op, side)
    cu = integer_vector(op, "cu_seqlens", cu_seqlens).cpu().to(torch.int64)
    if values.dim() < 1 or len(cu) == 0:
        raise ValueError(
            f"{op}: values must be (S, ...) and cu_seqlens (N + 1,), got shapes "
            f"{tuple(values.shape)} and {tuple(cu.shape)}"
        )
    lengths = cu.diff()
    if int(cu[0]) != 0 or int(cu[-1]) != len(values) or bool((lengths < 0).any()):
        raise ValueError(
            f"{op}: cu_seqlens must be non-decreasing offsets from 0 to {len(values)}, got "
            f"{int(cu[0])} to {int(cu[-1])}"
        )
    longest = int(lengths.max()) if len(lengths) else 0
    width = longest if width is None else width
    if width < longest:
        raise ValueError(f"{op}: width must hold the longest row ({longest}), got {width}")
    use_native = _select(op, values, backend)
    if use_native and _backend.on_gpu(values):
        return varlen_cuda.flat_to_padded(values, lengths, width, SIDES[side], pad_value)
    return _FlatToPadded.apply(values, lengths, width, side, pad_value, use_native)


class _PaddedToFlat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, padded: torch.Tensor, lengths: torch.Tensor, side: str, use_native: bool
    ) -> torch.Tensor:
        ctx.rows = (lengths, padded.shape[1], side, use_native)
        if not use_native:
            return reference.padded_to_flat(padded, lengths.to(padded.device), side)
        shape = (int(lengths.sum()), *padded.shape[2:])
        out = _backend.empty(shape, padded.dtype)
        source = padded.detach().contiguous()
        _C.padded_to_flat(source, lengths, SIDES[side], out, _backend.num_threads())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        lengths, width, side, use_native = ctx.rows
        padded = _FlatToPadded.apply(gradient, lengths, width, side, 0, use_native)
        return padded, None, None, None


class _FlatToPadded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        lengths: torch.Tensor,
        width: int,
        side: str,
        pad_value: float,
        use_native: bool,
    ) -> torch.Tensor:
        ctx.rows = (lengths, side, use_native)
        if not use_native:
            return reference.flat_to_padded(values, lengths, width, side, pad_value)
        out = _backend.empty((len(lengths), width, *values.shape[1:]), values.dtype)
        cell = torch.full(values.shape[1:], pad_value, dtype=values.dtype)
        source = values.detach().contiguous()
        _C.flat_to_padded(source, lengths, SIDES[side], cell, out, _backend.num_threads())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        lengths, side, use_native = ctx.rows
        flat = _PaddedToFlat.apply(gradient, lengths, side, use_native)
        return flat, None, None, None, None, None


def _select(op: str, values: torch.Tensor, backend: str | None) -> bool:
    """Return whether the native kernels run; other dtypes go to torch."""
    available = ("native", "torch") if values.dtype in NATIVE_DTYPES else ("torch",)
    return (
        _backend.select(
            op, values, backend=backend, available=available, available_on_gpu=available
        )
        == "native"
    )


def _check_side(op: str, side: str) -> None:
    if side not in SIDES:
        raise ValueError(f"{op}: side must be 'left' or 'right', got {side!r}")


def _mask_lengths(op: str, mask: torch.Tensor, side: str) -> torch.Tensor:
    if _backend.on_gpu(mask):
        return varlen_cuda.mask_lengths(op, mask.detach(), SIDES[side])
    lengths = torch.empty(len(mask), dtype=torch.int64)
    known = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32)
    mask = (mask if mask.dtype in known else mask.to(torch.float32)).detach().cpu().contiguous()
    _C.mask_lengths(op, mask, SIDES[side], lengths, _backend.num_threads())
    return lengths


def _check_lengths(op: str, lengths: Any, num_rows: int, width: int) -> torch.Tensor:
    lengths = integer_vector(op, "lengths", lengths).cpu().to(torch.int64).contiguous()
    if lengths.shape != (num_rows,):
        raise ValueError(
            f"{op}: lengths must be ({num_rows},) integers, got shape {tuple(lengths.shape)}"
        )
    if num_rows and not 0 <= int(lengths.min()) <= int(lengths.max()) <= width:
        raise ValueError(
            f"{op}: lengths must be from 0 to {width}, got {int(lengths.min())} to "
            f"{int(lengths.max())}"
        )
    return lengths


def _position_ids(
    lengths: torch.Tensor, cu_seqlens: torch.Tensor, use_native: bool
) -> torch.Tensor:
    total = int(cu_seqlens[-1])
    if not use_native:
        starts = torch.repeat_interleave(cu_seqlens[:-1].to(torch.int64), lengths)
        return torch.arange(total) - starts
    out = _backend.empty((total,), torch.int64)
    _C.position_ids(lengths, out, _backend.num_threads())
    return out
