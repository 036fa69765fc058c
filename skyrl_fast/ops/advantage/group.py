"""Group-wise advantages. Shapes: N rows (steps), R padded cells, A ragged cells, J trajectories.

Design: docs/design/003-advantage.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend
from skyrl_fast.ops._rows import (
    Rows,
    check_finite,
    check_row_ids,
    check_rows,
    check_trajectories,
)
from skyrl_fast.ops.advantage import reference

OP = "group_advantage"
ESTIMATORS = {"grpo": 0, "dr_grpo": 1, "rloo": 2, "maxrl": 3}
TEMPORAL_ESTIMATORS = {"gae": "gae", "reinforce++": "reinforce_plus_plus"}  # and their ops


def group_advantage(
    rewards: torch.Tensor,
    group_ids: Sequence[str] | Sequence[int] | torch.Tensor,
    *,
    is_last_step: torch.Tensor | Sequence[bool] | None = None,
    response_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    estimator: str = "grpo",
    backend: str | None = None,
) -> torch.Tensor:
    """Return each row's advantage: its trajectory's outcome relative to those of its group.

    The score of a trajectory is the sum of its last row's rewards. Scores are compared within
    their group, and every row of a trajectory gets the trajectory's advantage times the row's
    mask. Statistics are float64 with a centred variance, in a fixed order.

    With rewards on a GPU nothing synchronizes: what could only be checked by waiting (a score that
    is not finite, flags and ids that are on the GPU) gives NaN, not an error.

    With s a score, and mean, std (unbiased) and size n of its group (in brackets: a group of one):
    "grpo" (s - mean) / (std + 1e-6) [s / (1 + 1e-6)], Shao et al. 2024, arXiv:2402.03300;
    "dr_grpo" s - mean [s], Liu et al. 2025, arXiv:2503.20783;
    "rloo" (s - mean) * n / (n - 1) [0], Ahmadian et al. 2024, arXiv:2402.14740;
    "maxrl" (s - mean) / (mean + 1e-6) [s], Tajwar et al. 2026.

    Args:
        rewards: float32; (N,) one per row, (N, R) per padded response token, or, with
            `cu_seqlens`, (A,) per response token; one per row where A = N. Rewards of rows that
            are not last are not read.
        group_ids: N strings or ints, the prompt of each row. Equal within a trajectory; rows of a
            group need not be adjacent.
        is_last_step: (N,) bool, True at each trajectory's final row. None: every row is a
            separate trajectory.
        response_mask: bool, uint8, int64 or float32, (N, R) or (A,): the shape of the result.
            None: all ones, in the shape of `rewards`.
        cu_seqlens: (N + 1,) int32 offsets of the rows' cells, for ragged (A,) data.
        estimator: see above. "gae" and "reinforce++" need a reward at each time step and are
            refused: broadcasting the last step's value would be another estimator. Use the ops
            `gae` and `reinforce_plus_plus`.
        backend: "native", "torch", or None to choose.

    Returns:
        float32 in the shape of `response_mask` (of `rewards` where there is none).

    Raises:
        ValueError: shapes that do not match, an unknown or temporal estimator, a last row that is
            no last step, two groups in one trajectory, or a score that is NaN or infinite.

    Example:
        >>> group_advantage(torch.tensor([0.0, 1.0, 0.0]), ["a", "a", "a"],
        ...                 is_last_step=[False, True, True])
        tensor([ 0.7071,  0.7071, -0.7071])
    """
    # Groups are found by the values of ids, which a compiled graph does not have.
    _backend.break_graph(OP, "which rows form a group")
    _check_estimator(estimator)
    ids = check_row_ids(OP, "group_ids", group_ids)
    rows = check_rows(OP, rewards, ids.numel(), is_last_step, response_mask, cu_seqlens)
    chosen = _backend.select(
        OP, rows.rewards, backend=backend, available_on_gpu=("native", "torch")
    )
    if chosen == "torch":
        return _torch(rows, ids, estimator)
    if _backend.on_gpu(rows.rewards):
        given = (group_ids, is_last_step)
        on_gpu = any(isinstance(x, torch.Tensor) and _backend.on_gpu(x) for x in given)
        return _on_gpu(rows, ids, estimator, sort_there=on_gpu)
    out = rows.empty()
    kind = ESTIMATORS[estimator]
    _C.group_advantage(rows.rewards, ids, *rows.layout, kind, out, _backend.num_threads())
    return out


def _on_gpu(rows: Rows, ids: torch.Tensor, estimator: str, *, sort_there: bool) -> torch.Tensor:
    """Gather the last rows of each group and run three launches; `sort_there`: without checks."""
    device = rows.rewards.device
    if rows.last is None:
        last = None
    else:
        last = _backend.to_gpu(rows.last, device)
    if rows.cu_seqlens is None:
        cu = None
    else:
        cu = _backend.to_gpu(rows.cu_seqlens, device)
    # Fetching ids or flags from the GPU would wait for it: all rows are sorted there instead.
    if sort_there:
        keys = _backend.to_gpu(ids, device)
        no_group = torch.iinfo(torch.int64).max
        # Rows that end no trajectory sort behind all groups.
        if last is not None:
            keys = torch.where(last, keys, no_group)
        groups, order = torch.sort(keys, stable=True)
    else:
        check_trajectories(rows, ids)
        groups, order = _backend.to_gpu(_by_group(ids, rows.last), device)
    scores = torch.empty(rows.num_rows, dtype=torch.float64, device=device)
    out = torch.empty(rows.shape, dtype=torch.float32, device=device)
    mask = rows.mask
    # Kernels exist for these dtypes alone.
    if mask is not None and mask.dtype not in (torch.bool, torch.uint8, torch.int64, torch.float32):
        mask = mask.to(torch.float32)
    _backend.run_kernel(
        "group_advantage",
        False,
        rows.rewards,
        rows.rewards,
        groups,
        order,
        last,
        mask,
        cu,
        rows.ragged_rewards,
        ESTIMATORS[estimator],
        scores,
        scores.new_empty(rows.num_rows, dtype=torch.float32),
        out,
    )
    return out


def _by_group(ids: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    """Return (2, J) groups and rows of the trajectories' last rows, by group, then by row."""
    if last is None:
        order = torch.arange(ids.numel(), device=ids.device)
    else:
        order = last.nonzero()[:, 0]
    if last is None:
        groups = ids
    else:
        groups = ids[order]
    if bool((groups[1:] < groups[:-1]).any()):  # rows of a group are usually adjacent
        # Stable: sums run over rows in order, as on the CPU, and have its bits.
        groups, places = torch.sort(groups, stable=True)
        order = order[places]
    return torch.stack([groups, order])


def _check_estimator(estimator: str) -> None:
    if estimator in TEMPORAL_ESTIMATORS:
        raise ValueError(
            f"{OP}: estimator {estimator!r} is temporal: it needs rewards and values along the "
            "time steps, and broadcasting the last step's value to the others is not what it "
            f"defines; use skyrl_fast.{TEMPORAL_ESTIMATORS[estimator]}, or choose one of "
            f"{sorted(ESTIMATORS)}"
        )
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"{OP}: estimator: expected one of {sorted(ESTIMATORS)}, got {estimator!r}"
        )


def _torch(rows: Rows, ids: torch.Tensor, estimator: str) -> torch.Tensor:
    # The reference looks for the trajectory of each row, and there is none.
    if rows.num_rows == 0:
        return rows.rewards.new_zeros(rows.shape)
    check_trajectories(rows, ids)
    last = rows.last_or_all()
    scores = rows.row_sums()
    check_finite(rows, scores, last)
    advantage = reference.group_advantage(scores, ids.to(scores.device), last, estimator)
    return rows.spread(advantage.to(torch.float32))
