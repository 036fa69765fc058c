"""Padded tensors to flat rows, and back. Shapes: N rows, W padded width, S real cells.

The trailing dimensions (...) of both layouts are equal: token ids have none, hidden states one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend, _ragged
from skyrl_fast.ops._offsets import integer_vector
from skyrl_fast.ops.pack import reference

SIDES = ("left", "right", "both")
# What the kernels store at once.
PATTERN_BYTES = 16
NATIVE_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
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
        raise ValueError(f"{op}: padded: expected (N, W, ...), got shape {tuple(padded.shape)}")
    if (attention_mask is None) == (lengths is None):
        raise ValueError(f"{op}: give either attention_mask or lengths")
    if attention_mask is not None:
        if attention_mask.shape != padded.shape[:2]:
            raise ValueError(
                f"{op}: attention_mask: expected shape {tuple(padded.shape[:2])}, got "
                f"{tuple(attention_mask.shape)}"
            )
        if starts is not None:
            raise ValueError(f"{op}: give starts with lengths only, not with attention_mask")
        starts, lengths = _mask_blocks(op, attention_mask, side)
    else:
        lengths = _check_lengths(op, lengths, len(padded), padded.shape[1])
        starts = _check_starts(op, starts, side, lengths, padded.shape[1])
    use_native = _select(op, padded, backend)
    # 32 bits for attention kernels; ours take 64.
    cu_seqlens = _ragged.int32_offsets(op, "padded", lengths)
    if use_native:
        rows = _place_rows(starts, lengths, padded.device)
        values, position_ids = _PaddedToFlat.apply(padded, *rows, int(cu_seqlens[-1]))
    else:
        values = reference.padded_to_flat(padded, starts, lengths)
        position_ids = reference.position_ids(lengths).to(padded.device)
    return Varlen(values, _backend.to_device_of(cu_seqlens, padded), position_ids, starts)


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
    if values.dim() < 1:
        raise ValueError(f"{op}: values: expected (S, ...), got shape {tuple(values.shape)}")
    # By torch, not `check_offsets`: inside torch.func.grad they are no plain array.
    cu = integer_vector(op, "cu_seqlens", cu_seqlens).cpu().to(torch.int64)
    lengths = cu.diff()
    if len(cu) == 0 or cu[0] != 0 or cu[-1] != len(values) or bool((lengths < 0).any()):
        raise ValueError(
            f"{op}: cu_seqlens: expected non-decreasing offsets from 0 to {len(values)}, got "
            f"{cu[:8].tolist()}"
        )
    if len(lengths):
        longest = int(lengths.max())
    else:
        longest = 0
    if width is None:
        width = longest
    if width < longest:
        raise ValueError(f"{op}: width: expected at least the longest row ({longest}), got {width}")
    starts = _check_starts(op, starts, side, lengths, width)
    if _select(op, values, backend):
        rows = _place_rows(starts, lengths, values.device)
        padded: torch.Tensor = _FlatToPadded.apply(values, *rows, width, pad_value)
        return padded
    return reference.flat_to_padded(values, starts, lengths, width, pad_value)


class _PaddedToFlat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, padded: torch.Tensor, cu: torch.Tensor, starts: torch.Tensor, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cu, starts)
        ctx.width = padded.shape[1]
        values = _backend.empty((total, *padded.shape[2:]), padded.dtype, padded.device)
        positions = _backend.empty((total,), torch.int64, padded.device)
        source = padded.detach().contiguous()
        rows = (source, cu, starts, values, positions)
        _backend.run_kernel("padded_to_flat", False, padded, *rows)
        ctx.mark_non_differentiable(positions)
        return values, positions

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        # Each is the other's derivative, so that any order of derivatives exists.
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
        shape = (len(starts), width, *values.shape[1:])
        out = _backend.empty(shape, values.dtype, values.device)
        pattern = pattern_of(pad_value, values.dtype)
        source = values.detach().contiguous()
        _backend.run_kernel("flat_to_padded", False, values, source, cu, starts, pattern, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        flat, _ = _PaddedToFlat.apply(gradient, *ctx.saved_tensors, ctx.total)
        return flat, None, None, None, None


def pattern_of(pad_value: float, dtype: torch.dtype) -> bytes:
    """Return the bytes of an element, repeated to 16.

    Example:
        >>> pattern_of(1, torch.int16) == bytes([1, 0]) * 8
        True
    """
    # As bytes: the kernels pad every dtype by the same code.
    element = (
        torch.full((1,), pad_value, dtype=dtype, device="cpu").view(torch.uint8).numpy().tobytes()
    )
    return element * (PATTERN_BYTES // len(element))


def _place_rows(
    starts: torch.Tensor, lengths: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return offsets (N + 1,) and starts (N,) on the device, in one transfer."""
    cu = _ragged.offsets(lengths)
    if _backend.device_kind(device) == "cpu":
        return cu, starts
    # Both are a few numbers per row; each transfer has a fixed cost.
    both = _backend.to_gpu(torch.cat([cu, starts]), device)
    return both[: len(cu)], both[len(cu) :]


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
        raise ValueError(f"{op}: side: expected 'left', 'right' or 'both', got {side!r}")


def _mask_blocks(op: str, mask: torch.Tensor, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return starts and lengths, (N,) int64 on the CPU, of each row's block of ones."""
    if _backend.on_gpu(mask):
        starts, lengths = _mask_blocks_on_gpu(op, mask.detach())
    else:
        starts, lengths = torch.empty((2, len(mask)), dtype=torch.int64, device="cpu")
        # Other dtypes are read as float32.
        known = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32)
        mask = (mask if mask.dtype in known else mask.to(torch.float32)).detach().cpu()
        _C.mask_blocks(op, mask.contiguous(), starts, lengths, _backend.num_threads())
    if side == "both":
        return starts, lengths
    expected = _starts_of(side, lengths, mask.shape[1])
    # An empty row has no block, so where it starts says nothing.
    is_bad = (starts != expected) & (lengths > 0)
    if bool(is_bad.any()):
        where = {"left": "0 in the padding on the left and 1 after it"}.get(
            side, "1 in each row's cells and 0 in the padding on the right"
        )
        raise ValueError(
            f"{op}: attention_mask: expected {where}, got something else in row "
            f"{int(is_bad.nonzero()[0])}; for padding on both sides: side='both'"
        )
    return expected, lengths


def _mask_blocks_on_gpu(op: str, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ones = mask == 1
    lengths = ones.sum(1)
    columns = torch.arange(mask.shape[1], device=mask.device)
    starts = torch.zeros_like(lengths)
    if mask.shape[1] > 0:
        starts = ones.to(torch.uint8).argmax(1)  # the first of equal values
    block = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
    is_bad = ((ones != block) | (ones != (mask != 0))).any(1)
    # One transfer for all three: each waits for the device.
    starts, lengths, is_bad = torch.stack([starts, lengths, is_bad.to(lengths.dtype)]).cpu()
    if bool(is_bad.any()):
        raise ValueError(
            f"{op}: attention_mask: expected 0 but for one block of 1 in each row, got something "
            f"else in row {int(is_bad.nonzero()[0])}"
        )
    return starts.contiguous(), lengths.contiguous()


def _starts_of(side: str, lengths: torch.Tensor, width: int) -> torch.Tensor:
    if side == "left":
        return width - lengths
    return torch.zeros_like(lengths)


def _check_starts(
    op: str, starts: Any, side: str, lengths: torch.Tensor, width: int
) -> torch.Tensor:
    if (starts is None) == (side == "both"):
        if starts is None:
            wanted = "starts"
        else:
            wanted = "no starts"
        raise ValueError(f"{op}: side={side!r} wants {wanted} with the lengths of rows")
    if starts is None:
        return _starts_of(side, lengths, width)
    starts = integer_vector(op, "starts", starts).cpu().to(torch.int64).contiguous()
    if starts.shape != lengths.shape:
        raise ValueError(
            f"{op}: starts: expected ({len(lengths)},) integers, got shape {tuple(starts.shape)}"
        )
    is_bad = (starts < 0) | (starts > width - lengths)
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        raise ValueError(
            f"{op}: starts: expected 0 to {width} minus the row's length "
            f"({int(lengths[row])}), got {int(starts[row])} in row {row}"
        )
    return starts


def _check_lengths(op: str, lengths: Any, num_rows: int, width: int) -> torch.Tensor:
    lengths = integer_vector(op, "lengths", lengths).cpu().to(torch.int64).contiguous()
    if lengths.shape != (num_rows,):
        raise ValueError(
            f"{op}: lengths: expected ({num_rows},) integers, got shape {tuple(lengths.shape)}"
        )
    if num_rows and not 0 <= int(lengths.min()) <= int(lengths.max()) <= width:
        raise ValueError(
            f"{op}: lengths: expected 0 to {width}, got {int(lengths.min())} to "
            f"{int(lengths.max())}"
        )
    return lengths
