"""Checks of the arguments that ops on rows share. N rows, R padded cells, A ragged cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend
from skyrl_fast.ops._offsets import check_offsets

Layout = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, bool]


@dataclass(frozen=True, slots=True)
class Rows:
    """Checked arguments of an op on rows.

    Args:
        rewards: float32 (N,), (N, R) or (A,).
        last: (N,) bool, or None: every row is a trajectory.
        mask: in `shape`, or None: all ones.
        cu_seqlens: (N + 1,) int32, or None: padded.
        ragged_rewards: rewards are (A,).
    """

    op: str
    rewards: torch.Tensor
    num_rows: int
    last: torch.Tensor | None
    mask: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    ragged_rewards: bool
    shape: torch.Size

    @property
    def layout(self) -> Layout:
        """What every native kernel gets after the values of the rows."""
        return self.last, self.mask, self.cu_seqlens, self.ragged_rewards

    def empty(self) -> torch.Tensor:
        return _backend.empty(self.shape, torch.float32)

    def last_or_all(self) -> torch.Tensor:
        """Return (N,) bool on the rewards' device."""
        if self.last is None:
            return torch.ones(self.num_rows, dtype=torch.bool, device=self.rewards.device)
        return self.last.to(self.rewards.device)

    def lengths(self) -> torch.Tensor | None:
        """Return (N,) int64 cells of each row, or None where rows are padded."""
        if self.cu_seqlens is None:
            return None
        return self.cu_seqlens.diff().to(self.rewards.device, torch.int64)

    def row_sums(self) -> torch.Tensor:
        """Return (N,) float64, the sum of each row's rewards."""
        if not self.ragged_rewards:
            sums = self.rewards.double()
            if sums.dim() == 1:
                return sums
            return sums.sum(1)
        lengths = self.lengths()
        assert lengths is not None
        # One float64 sum per row, in the order of its cells, as in the kernels.
        row_ids = torch.arange(self.num_rows, device=self.rewards.device)
        row_ids = torch.repeat_interleave(row_ids, lengths)
        sums = self.rewards.new_zeros(self.num_rows, dtype=torch.float64)
        return sums.index_add_(0, row_ids, self.rewards.double())

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return (N,) float32 values broadcast over the cells of their rows, times the mask."""
        lengths = self.lengths()
        if lengths is not None:
            values = torch.repeat_interleave(values, lengths)
        elif len(self.shape) == 2:
            values = values[:, None].expand(self.shape)
        if self.mask is not None:
            return values * self.mask
        return values.clone()


def check_rows(
    op: str,
    rewards: torch.Tensor,
    num_rows: int | None,
    is_last_step: torch.Tensor | Sequence[bool] | None,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    *,
    mask_name: str = "response_mask",
    prefers_tokens: bool = False,
) -> Rows:
    """Return the arguments checked and made contiguous.

    Args:
        prefers_tokens: with as many tokens as rows, rewards of one dimension are those of tokens,
            not of rows.
        num_rows: N where known from the group ids; None: taken from the other arguments.
    """
    if not isinstance(rewards, torch.Tensor):
        raise TypeError(f"{op}: rewards: expected a torch tensor, got {type(rewards).__name__}")
    if not rewards.is_floating_point():
        raise ValueError(f"{op}: rewards: expected a floating-point tensor, got {rewards.dtype}")
    # (N,) and (A,) both have one dimension; which of them it is follows from the offsets below.
    if rewards.dim() not in (1, 2):
        raise ValueError(
            f"{op}: rewards: expected (N,), (N, R) or (A,), got {tuple(rewards.shape)}"
        )
    if cu_seqlens is not None:
        cu_seqlens = check_offsets(op, "cu_seqlens", cu_seqlens, num_rows=num_rows)
    if num_rows is None:
        if cu_seqlens is None:
            num_rows = rewards.shape[0]
        else:
            num_rows = cu_seqlens.numel() - 1
    elif cu_seqlens is None and rewards.shape[0] != num_rows:
        raise ValueError(
            f"{op}: rewards: expected one row per group id ({num_rows}), got {rewards.shape[0]}"
        )
    if mask is not None:
        _backend.check_device(op, rewards, mask)
        mask = mask.contiguous()
    shape = _result_shape(op, rewards, mask, cu_seqlens, num_rows, mask_name)
    return Rows(
        op=op,
        # Advantages are constants of a loss: nothing flows back to rewards.
        rewards=rewards.detach().to(torch.float32).contiguous(),
        num_rows=num_rows,
        last=_check_last(op, is_last_step, num_rows),
        mask=mask,
        cu_seqlens=cu_seqlens,
        ragged_rewards=cu_seqlens is not None
        and rewards.shape == shape
        and (prefers_tokens or rewards.shape != (num_rows,)),
        shape=shape,
    )


def check_row_ids(
    op: str, name: str, ids: Sequence[str] | Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """Return (N,) int64, equal where ids are equal; strings are numbered by first appearance."""
    if isinstance(ids, torch.Tensor):
        if ids.is_floating_point() or ids.dim() != 1:
            raise ValueError(
                f"{op}: {name}: expected (N,) ints, got {ids.dtype} of shape {tuple(ids.shape)}"
            )
        return ids.to(torch.int64).contiguous()
    # It is a sequence of strings, too: each character would be the id of a row.
    if isinstance(ids, str):
        raise TypeError(f"{op}: {name}: expected one id per row, got a single string")
    return dense_ids(op, name, ids)


def dense_ids(op: str, name: str, ids: Sequence[Any] | np.ndarray | torch.Tensor) -> torch.Tensor:
    """Return (N,) int64, the number of each id (string or int) by first appearance."""
    if hasattr(ids, "tolist"):
        labels = ids.tolist()
    else:
        labels = ids
    dense = torch.empty(len(labels), dtype=torch.int64, device="cpu")
    _C.dense_ids(labels, dense, op, name)
    return dense


def check_trajectories(rows: Rows, group_ids: torch.Tensor | None = None) -> None:
    """Refuse a last row that is no last step, and a trajectory in two groups."""
    # The native CPU kernels check this themselves. Flags are checked on their device.
    last = rows.last
    if last is None or rows.num_rows == 0:  # without flags each row is a trajectory
        return
    if not bool(last[-1]):
        raise ValueError(f"{rows.op}: is_last_step: expected True in the last row, got False")
    if group_ids is None:
        return
    ids = group_ids.to(last.device)
    split = (ids[1:] != ids[:-1]) & ~last[:-1]
    if bool(split.any()):
        row = int(split.nonzero()[0])
        raise ValueError(
            f"{rows.op}: group_ids: expected one id within a trajectory, but row {row} (not a last "
            f"step) and row {row + 1} differ"
        )


def check_finite(rows: Rows, sums: torch.Tensor, where: torch.Tensor | None = None) -> None:
    """Refuse row sums that are NaN or infinite; `where`: (N,) bool, rows that count."""
    bad = ~torch.isfinite(sums)
    if where is not None:
        bad = bad & where
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"{rows.op}: rewards: expected finite numbers, but those of row {row} sum to "
            f"{float(sums[row])}"
        )


def check_discount(op: str, name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{op}: {name}: expected a number from 0 to 1, got {value}")


def _result_shape(
    op: str,
    rewards: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    num_rows: int,
    mask_name: str,
) -> torch.Size:
    """Return the shape of the result: the mask's, which must fit the rows."""
    if cu_seqlens is not None:
        # On a GPU the last offset is read, which waits for the device, only where nothing else says
        # how many cells there are.
        says_cells = mask is not None or rewards.shape != (num_rows,)
        if _backend.on_gpu(cu_seqlens) and says_cells:
            if mask is not None:
                shape = mask.shape
            else:
                shape = rewards.shape
        else:
            shape = torch.Size([int(cu_seqlens[-1])])
        if rewards.shape not in (shape, (num_rows,)):
            raise ValueError(
                f"{op}: rewards: expected ({num_rows},) or {tuple(shape)}, got "
                f"{tuple(rewards.shape)}"
            )
        wanted = str(tuple(shape))
    else:
        if mask is not None:
            shape = mask.shape
        else:
            shape = rewards.shape
        wanted = f"({num_rows},) or ({num_rows}, R)"
    if cu_seqlens is None:
        fits = shape[0] == num_rows and len(shape) <= 2
    else:
        fits = True
    if not fits or (mask is not None and mask.shape != shape):
        if mask is not None:
            got = tuple(mask.shape)
        else:
            got = tuple(shape)
        raise ValueError(f"{op}: {mask_name}: expected shape {wanted}, got {got}")
    return shape


def _check_last(
    op: str, is_last_step: torch.Tensor | Sequence[bool] | None, num_rows: int
) -> torch.Tensor | None:
    if is_last_step is None:
        return None
    if isinstance(is_last_step, (list, tuple)):
        last = torch.empty(len(is_last_step), dtype=torch.bool, device="cpu")
        _C.flags(is_last_step, last, "is_last_step", op)
    else:
        device = is_last_step.device if isinstance(is_last_step, torch.Tensor) else "cpu"
        last = torch.as_tensor(is_last_step, dtype=torch.bool, device=device).contiguous()
    if last.shape != (num_rows,):
        raise ValueError(
            f"{op}: is_last_step: expected shape ({num_rows},), got {tuple(last.shape)}"
        )
    return last
