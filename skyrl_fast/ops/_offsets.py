"""Checks of the offsets and lengths of rows. N rows."""

from __future__ import annotations

from typing import Any

import torch

from skyrl_fast.ops import _backend


def integer_vector(op: str, name: str, values: Any) -> torch.Tensor:
    """Return a tensor, a numpy array or a sequence of ints as a 1-D tensor, on its device.

    Raises:
        TypeError: anything else.
        ValueError: floats, bools, not one dimension, or no values (the meta device).
    """
    try:
        # Not on torch's default device, which may be a GPU.
        device = values.device if isinstance(values, torch.Tensor) else "cpu"
        vector = torch.as_tensor(values, device=device).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{op}: {name}: expected integers, got {type(values).__name__}") from error
    if not isinstance(values, torch.Tensor) and vector.numel() == 0:
        vector = vector.to(torch.int64)  # torch reads an empty list as float32
    is_integer = not (vector.is_floating_point() or vector.is_complex())
    if vector.dim() != 1 or not is_integer or vector.dtype == torch.bool:
        raise ValueError(
            f"{op}: {name}: expected a 1-D vector of ints, got {vector.dtype} of shape "
            f"{tuple(vector.shape)}"
        )
    if vector.is_meta:
        raise ValueError(f"{op}: {name}: expected values, got a tensor on the meta device")
    return vector


def check_offsets(
    op: str,
    name: str,
    offsets: Any,
    *,
    total: int | None = None,
    num_rows: int | None = None,
    dtype: torch.dtype = torch.int32,
    to_cpu: bool = False,
) -> torch.Tensor:
    """Return (N + 1,) offsets, which rise from 0, as contiguous int32 or int64.

    Args:
        total, num_rows: the last offset, and N; None: any.
        to_cpu: return them on the CPU, and check their values on any device.

    Raises:
        TypeError, ValueError: as `integer_vector`; no offset, another number of them, one that
            `dtype` cannot hold, or offsets that do not rise from 0 to `total`.
    """
    cu = integer_vector(op, name, offsets)
    if cu.numel() == 0:
        raise ValueError(f"{op}: {name}: expected (N + 1,) offsets, got none")
    if num_rows is not None and cu.numel() != num_rows + 1:
        raise ValueError(
            f"{op}: {name}: expected ({num_rows + 1},) offsets, one more than the rows, "
            f"got ({cu.numel()},)"
        )
    most = torch.iinfo(dtype).max
    if to_cpu:
        cu = cu.cpu()
    elif torch.compiler.is_compiling():
        # A graph cannot depend on values: what int32 cannot hold stays out of range instead.
        return cu.to(torch.int64).clamp(-1, most).to(dtype).contiguous()
    if _backend.device_kind(cu.device) != "cpu":
        return cu.to(dtype).contiguous()  # reading the values would wait for the device
    values = cu.numpy()  # much faster than torch on a few values
    # Before the conversion, which wraps what it cannot hold.
    if cu.dtype != dtype and (values.min() < 0 or values.max() > most):
        if values.min() < 0:
            wrong = values.min()
        else:
            wrong = values.max()
        raise ValueError(f"{op}: {name}: expected offsets from 0 to {most}, got {wrong}")
    if total is None:
        total = int(values[-1])
    if values[0] != 0 or values[-1] != total or (values[1:] < values[:-1]).any():
        raise ValueError(
            f"{op}: {name}: expected non-decreasing offsets from 0 to {total}, got "
            f"{values[:8].tolist()}"
        )
    return cu.to(dtype).contiguous()
