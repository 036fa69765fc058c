"""Checks of the offsets and lengths of rows. N rows."""

from __future__ import annotations

from typing import Any

import torch

from skyrl_fast.ops import _backend


def integer_vector(op: str, name: str, values: Any) -> torch.Tensor:
    """Return offsets or lengths as a 1-D integer tensor, on their device.

    Args:
        values: a tensor, a numpy array or a sequence of ints.

    Raises:
        TypeError: anything else.
        ValueError: floats, bools, not one dimension, or no values (the meta device).
    """
    try:
        vector = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{op}: {name} must be integers, got {type(values).__name__}") from error
    if not isinstance(values, torch.Tensor) and vector.numel() == 0:
        vector = vector.to(torch.int64)  # torch reads an empty list as float32
    is_integer = not (vector.is_floating_point() or vector.is_complex())
    if vector.dim() != 1 or not is_integer or vector.dtype == torch.bool:
        raise ValueError(
            f"{op}: {name} must be a 1-D vector of ints, got {vector.dtype} of shape "
            f"{tuple(vector.shape)}"
        )
    if vector.is_meta:
        raise ValueError(f"{op}: {name} must hold values, got a tensor on the meta device")
    return vector


def check_offsets(
    op: str,
    name: str,
    offsets: Any,
    *,
    total: int | None = None,
    dtype: torch.dtype = torch.int32,
) -> torch.Tensor:
    """Return (N + 1,) offsets as contiguous int32, or int64.

    Args:
        total: the last offset, where the caller does not check it; the others then rise to it
            from 0.
        dtype: int32 or int64.

    Raises:
        TypeError, ValueError: as `integer_vector`; no offset, one that `dtype` cannot hold, or
            offsets that do not rise from 0 to `total`.
    """
    # Values are checked on the CPU only: on a GPU that would wait for the device.
    cu = integer_vector(op, name, offsets)
    if cu.numel() == 0:
        raise ValueError(f"{op}: {name} must be (N + 1,) offsets, got none")
    most = torch.iinfo(dtype).max
    if torch.compiler.is_compiling():
        # A graph cannot depend on values: what int32 cannot hold stays out of range instead.
        return cu.to(torch.int64).clamp(-1, most).to(dtype).contiguous()
    if _backend.device_kind(cu.device) != "cpu":
        return cu.to(dtype).contiguous()
    values = cu.numpy()  # much faster than torch on a few values
    if cu.dtype != dtype and (values.min() < 0 or values.max() > most):
        wrong = values.min() if values.min() < 0 else values.max()
        raise ValueError(f"{op}: {name} must be offsets from 0 to {most}, got {wrong}")
    if total is not None and (
        values[0] != 0 or values[-1] != total or (values[1:] < values[:-1]).any()
    ):
        raise ValueError(
            f"{op}: {name} must be non-decreasing offsets from 0 to {total}, got "
            f"{values[:8].tolist()}"
        )
    return cu.to(dtype).contiguous()
