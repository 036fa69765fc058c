"""GDPO: advantages of several rewards, each compared by itself. N rows, K parts, A ragged cells.

Design: docs/design/003-advantage.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops._rows import (
    Rows,
    check_finite,
    check_row_ids,
    check_rows,
    check_trajectories,
)
from skyrl_fast.ops.advantage import reference
from skyrl_fast.ops.advantage.group import group_advantage
from skyrl_fast.ops.advantage.reference import EPSILON

OP = "gdpo_advantage"


def gdpo_advantage(
    part_rewards: torch.Tensor,
    group_ids: Sequence[str] | Sequence[int] | torch.Tensor,
    *,
    weights: Sequence[float] | None = None,
    is_last_step: torch.Tensor | Sequence[bool] | None = None,
    response_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return each row's advantage by GDPO: of every part in its group, added, then normalized.

    Liu et al. 2026, arXiv:2601.05242, where each reward is normalized before they are added:
    A_k = (r_k - mean) / (std + 1e-6), r_k the part k of a trajectory, over its group;
    A = sum over k of w_k A_k;
    the result is (A - mean) / (std + 1e-6) over the trajectories of all groups.
    Deviations are unbiased. A trajectory counts once, whatever its number of rows. One that is
    alone in its group is compared with nothing: it has 0, and is left out of the last mean and
    deviation. Statistics are float64, in a fixed order.

    Args:
        part_rewards: (N, K) float, the parts of each row's reward; those of a trajectory's last row
            are its own, those of other rows are not read.
        group_ids: N strings or ints, the prompt of each row. Equal within a trajectory; rows of a
            group need not be adjacent.
        weights: K finite numbers, of which a negative one is that of a cost; None: all 1.
        is_last_step: (N,) bool, True at each trajectory's final row. None: every row is a
            separate trajectory.
        response_mask: bool, uint8, int64 or float32, (N, R) or (A,): the shape of the result, which
            is multiplied by it. None: all ones, one per row, or per cell of `cu_seqlens`.
        cu_seqlens: (N + 1,) int32 offsets of the rows' cells, for ragged (A,) data.
        backend: "native", "torch", or None to choose.

    Returns:
        float32 in the shape of `response_mask`, (A,) with `cu_seqlens` alone, else (N,).

    Raises:
        ValueError: shapes that do not match, a weight that is not finite, a last row that is no
            last step, two groups in one trajectory, or a part that is NaN or infinite.

    Example:
        Two prompts of two samples. In the second one the better sample is better in both parts.

        >>> parts = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
        >>> gdpo_advantage(parts, ["a", "a", "b", "b"])
        tensor([-0.5477,  0.5477, -1.0954,  1.0954])
    """
    ids = check_row_ids(OP, "group_ids", group_ids)
    _check_parts(part_rewards, ids.numel())
    shares = _check_weights(weights, part_rewards.shape[1])
    rows = check_rows(OP, part_rewards[:, 0], ids.numel(), is_last_step, response_mask, cu_seqlens)
    chosen = _backend.select(OP, rows.rewards, backend=backend)
    check_trajectories(rows, ids)
    last = rows.last_or_all()
    parts = part_rewards.detach().to(torch.float32)
    for part in parts.unbind(1):
        check_finite(rows, part, last)
    if rows.num_rows == 0:
        return rows.rewards.new_zeros(rows.shape)
    if chosen == "torch":
        # Group by group in Python: on a GPU each one would wait for the device.
        values = reference.gdpo_advantage(parts.cpu(), ids.cpu(), last.cpu(), shares)
        return rows.spread(values.to(rows.rewards.device, torch.float32))
    values = _added_and_normalized(rows, parts, ids, last, shares)
    return rows.spread(values.to(torch.float32))


def _added_and_normalized(
    rows: Rows,
    parts: torch.Tensor,
    ids: torch.Tensor,
    last: torch.Tensor,
    weights: Sequence[float],
) -> torch.Tensor:
    """Return (N,) float64 advantages of the rows' trajectories."""
    total = torch.zeros(rows.num_rows, dtype=torch.float64)
    for part, weight in zip(parts.unbind(1), weights, strict=True):
        of_part = group_advantage(
            part.contiguous(), ids, is_last_step=rows.last, estimator="grpo", backend="native"
        )
        total += weight * of_part.double()
    _, group_of_row = torch.unique(ids, return_inverse=True)
    sizes = torch.bincount(group_of_row[last])
    is_compared = sizes[group_of_row] > 1
    # NumPy: torch's order of a sum depends on the number of threads.
    counted = total[last & is_compared].numpy()
    if counted.size == 0:
        return torch.zeros_like(total)
    mean = float(counted.mean())
    deviation = float(counted.std(ddof=1))
    normalized = (total - mean) / (deviation + EPSILON)
    return normalized.masked_fill(~is_compared, 0.0)


def _check_parts(parts: torch.Tensor, num_rows: int) -> None:
    if not isinstance(parts, torch.Tensor):
        raise TypeError(f"{OP}: part_rewards: expected a torch tensor, got {type(parts).__name__}")
    if not parts.is_floating_point():
        raise ValueError(f"{OP}: part_rewards: expected a floating-point tensor, got {parts.dtype}")
    is_table = parts.dim() == 2 and parts.shape[1] > 0
    if not is_table or parts.shape[0] != num_rows:
        raise ValueError(
            f"{OP}: part_rewards: expected ({num_rows}, K), K >= 1, got {tuple(parts.shape)}"
        )


def _check_weights(weights: Sequence[float] | None, num_parts: int) -> list[float]:
    if weights is None:
        return [1.0] * num_parts
    shares = [float(weight) for weight in weights]
    if len(shares) != num_parts or not all(math.isfinite(share) for share in shares):
        raise ValueError(
            f"{OP}: weights: expected {num_parts} finite numbers, one for each part, got {shares}"
        )
    return shares
