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

SIDES = ("left", "right", "both")
NATIVE_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


class Varlen(NamedTuple):
    """The inputs of a variable-length attention kernel, and where the rows were.

    values: (S, ...). cu_seqlens: (N + 1,) int32. position_ids: (S,) int64, 0, 1, ... in each row.
    starts: (N,) int64 on the CPU, the column of each row's first real cell.
    """

    values: torch.Tensor
    cu_seqlens: torch.Tensor
    position_ids: torch.Tensor
    starts: torch.Tensor


def padded_to_varlen(
    padded: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    side: str = "left",
    backend: str | None = None,
) -> Varlen:
    """Return the real cells of a padded tensor row after row, with offsets and positions.

    Args:
        padded: (N, W, ...), any dtype; differentiable where it is floating point.
        attention_mask: (N, W), 1 in the real cells, which are one block: at the row's end (padding
            on the left), at its beginning, or anywhere (padding on both sides). Give this or
            `lengths`. A mask on a GPU costs a synchronization: the shape of the result depends on
            it.
        lengths: (N,) integers, the number of real cells of each row; on the CPU, so that nothing
            synchronizes.
        starts: (N,) integers, on the CPU, the column of each row's first real cell; with `lengths`
            and side "both" only.
        side: of the padding: "left", "right", or "both", as where a prompt padded on the left comes
            before a response padded on the right.
        backend: "native", "torch", or None to choose.

    Returns:
        Varlen(values (S, ...), cu_seqlens (N + 1,) int32, position_ids (S,) int64, starts (N,)).

    Raises:
        ValueError: neither or both of mask and lengths, shapes that do not match, a mask with holes
            or padding on the other side, rows beyond W, more than 2^31 - 1 cells.

    Example:
        >>> padded_to_varlen(torch.tensor([[0, 5], [6, 7]]), torch.tensor([[0, 1], [1, 1]]))
        Varlen(values=tensor([5, 6, 7]), cu_seqlens=tensor([0, 1, 3], dtype=torch.int32),
               position_ids=tensor([0, 0, 1]), starts=tensor([1, 0]))
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
        if starts is not None:
            raise ValueError(f"{op}: give starts with lengths only, not with attention_mask")
        starts, lengths = _mask_blocks(op, attention_mask, side)
    else:
        lengths = _check_lengths(op, lengths, len(padded), padded.shape[1])
        starts = _check_starts(op, starts, side, lengths, padded.shape[1])
    use_native = _select(op, padded, backend)
    cu_seqlens = _ragged.int32_offsets(op, "padded", lengths)
    if use_native and _backend.on_gpu(padded):
        values, position_ids = varlen_cuda.padded_to_flat(padded, starts, lengths)
        return Varlen(values, _backend.to_gpu(cu_seqlens, padded.device), position_ids, starts)
    values = _PaddedToFlat.apply(padded, starts, lengths, use_native)
    position_ids = _position_ids(lengths, cu_seqlens, use_native)
    return Varlen(values, cu_seqlens.to(padded.device), position_ids.to(padded.device), starts)


def varlen_to_padded(
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    width: int | None = None,
    starts: torch.Tensor | None = None,
    side: str = "left",
    pad_value: float = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """Return rows stored end to end as one padded tensor.

    Args:
        values: (S, ...), any dtype; differentiable where it is floating point.
        cu_seqlens: (N + 1,) int32 or int64 offsets from 0 to S.
        width: W; None: the longest row.
        starts: (N,) integers, the column of each row's first cell; with side "both" only.
        side: of the padding, "left", "right" or "both".
        pad_value: the value of the padding cells.
        backend: "native", "torch", or None to choose.

    Returns:
        (N, W, ...) of the values' dtype.

    Raises:
        ValueError: decreasing offsets, or not from 0 to S; a row beyond W.

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
    starts = _check_starts(op, starts, side, lengths, width)
    use_native = _select(op, values, backend)
    if use_native and _backend.on_gpu(values):
        return varlen_cuda.flat_to_padded(values, starts, lengths, width, pad_value)
    return _FlatToPadded.apply(values, starts, lengths, width, pad_value, use_native)


class _PaddedToFlat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        padded: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        use_native: bool,
    ) -> torch.Tensor:
        ctx.rows = (starts, lengths, padded.shape[1], use_native)
        if not use_native:
            return reference.padded_to_flat(padded, starts, lengths)
        shape = (int(lengths.sum()), *padded.shape[2:])
        out = _backend.empty(shape, padded.dtype)
        source = padded.detach().contiguous()
        _C.padded_to_flat(source, starts, lengths, out, _backend.num_threads())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        starts, lengths, width, use_native = ctx.rows
        padded = _FlatToPadded.apply(gradient, starts, lengths, width, 0, use_native)
        return padded, None, None, None


class _FlatToPadded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        width: int,
        pad_value: float,
        use_native: bool,
    ) -> torch.Tensor:
        ctx.rows = (starts, lengths, use_native)
        if not use_native:
            return reference.flat_to_padded(values, starts, lengths, width, pad_value)
        out = _backend.empty((len(lengths), width, *values.shape[1:]), values.dtype)
        cell = torch.full(values.shape[1:], pad_value, dtype=values.dtype)
        source = values.detach().contiguous()
        _C.flat_to_padded(source, starts, lengths, cell, out, _backend.num_threads())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        starts, lengths, use_native = ctx.rows
        flat = _PaddedToFlat.apply(gradient, starts, lengths, use_native)
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
        raise ValueError(f"{op}: side must be 'left', 'right' or 'both', got {side!r}")


def _mask_blocks(op: str, mask: torch.Tensor, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return starts and lengths, (N,) int64 on the CPU, of each row's block of ones."""
    if _backend.on_gpu(mask):
        starts, lengths = varlen_cuda.mask_blocks(op, mask.detach())
    else:
        starts, lengths = torch.empty(2, len(mask), dtype=torch.int64)
        known = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32)
        mask = (mask if mask.dtype in known else mask.to(torch.float32)).detach().cpu()
        _C.mask_blocks(op, mask.contiguous(), starts, lengths, _backend.num_threads())
    if side == "both":
        return starts, lengths
    expected = _starts_of(side, lengths, mask.shape[1])
    is_bad = (starts != expected) & (lengths > 0)
    if bool(is_bad.any()):
        where = {"left": "0 in the padding on the left and 1 after it"}.get(
            side, "1 in each row's cells and 0 in the padding on the right"
        )
        raise ValueError(
            f"{op}: attention_mask must be {where}, got something else in row "
            f"{int(is_bad.nonzero()[0])}; for padding on both sides: side='both'"
        )
    return expected, lengths


def _starts_of(side: str, lengths: torch.Tensor, width: int) -> torch.Tensor:
    return width - lengths if side == "left" else torch.zeros_like(lengths)


def _check_starts(
    op: str, starts: Any, side: str, lengths: torch.Tensor, width: int
) -> torch.Tensor:
    if (starts is None) == (side == "both"):
        wanted = "starts" if starts is None else "no starts"
        raise ValueError(f"{op}: side={side!r} wants {wanted} with the lengths of rows")
    if starts is None:
        return _starts_of(side, lengths, width)
    starts = integer_vector(op, "starts", starts).cpu().to(torch.int64).contiguous()
    if starts.shape != lengths.shape:
        raise ValueError(
            f"{op}: starts must be ({len(lengths)},) integers, got shape {tuple(starts.shape)}"
        )
    is_bad = (starts < 0) | (starts > width - lengths)
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        raise ValueError(
            f"{op}: starts must be from 0 to {width} minus the row's length "
            f"({int(lengths[row])}), got {int(starts[row])} in row {row}"
        )
    return starts


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
