"""Group-wise advantages. Shapes: N rows (steps), R padded cells, A ragged cells, J trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend
from skyrl_fast.ops.reference import advantage as reference

OP = "group_advantage"
ESTIMATORS = {"grpo": 0, "dr_grpo": 1, "rloo": 2, "maxrl": 3}
TEMPORAL_ESTIMATORS = ("gae", "reinforce++")


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
    """Return each row's advantage: its trajectory's outcome against the other ones of its group.

    The score of a trajectory is the sum of its last row's rewards. Scores are compared within
    their group, and every row of a trajectory receives the trajectory's advantage times its own
    mask. Statistics are taken in float64 with a centred variance, in a fixed order.

    With s a score, mean, std (unbiased) and n of its group (in brackets: a group of one):
    "grpo" (s - mean) / (std + 1e-6) [s / (1 + 1e-6)], Shao et al. 2024, arXiv:2402.03300;
    "dr_grpo" s - mean [s], Liu et al. 2025, arXiv:2503.20783;
    "rloo" (s - mean) * n / (n - 1) [0], Ahmadian et al. 2024, arXiv:2402.14740;
    "maxrl" (s - mean) / (mean + 1e-6) [s], Tajwar et al. 2026.

    Args:
        rewards: float32; (N,) one per row, (N, R) per padded response token, or, with
            `cu_seqlens`, (A,) per response token. Rewards of rows that are not last are not read.
        group_ids: N strings or ints, the prompt of each row. Equal within a trajectory; rows of a
            group need not be adjacent.
        is_last_step: (N,) bool, True at each trajectory's final row. None: every row is a
            trajectory of its own.
        response_mask: bool, uint8, int64 or float32, (N, R) or (A,): the shape of the result.
            None: all ones, in the shape of `rewards`.
        cu_seqlens: (N + 1,) int32 offsets of the rows' cells, for ragged (A,) data.
        estimator: see above. "gae" and "reinforce++" need a reward at each time step and are
            refused: a broadcast of the last step's value is not what they define.
        backend: "native", "torch", or None to choose.

    Returns:
        float32 in the shape of `response_mask` (of `rewards` where there is none).

    Raises:
        ValueError: shapes that disagree, an unknown or temporal estimator, a last row that is no
            last step, two groups in one trajectory, or a score that is NaN or infinite.

    Example:
        >>> group_advantage(torch.tensor([0.0, 1.0, 0.0]), ["a", "a", "a"],
        ...                 is_last_step=[False, True, True])
        tensor([ 0.7071,  0.7071, -0.7071])
    """
    _check_estimator(estimator)
    ids = _dense_group_ids(group_ids)
    num_rows = ids.numel()
    rewards = _check_rewards(rewards, num_rows, cu_seqlens)
    last = _check_last(is_last_step, num_rows)
    mask = response_mask.contiguous() if response_mask is not None else None
    cu_seqlens = _check_cu_seqlens(cu_seqlens, num_rows)
    shape = _result_shape(rewards, mask, cu_seqlens, num_rows)
    ragged_rewards = cu_seqlens is not None and rewards.shape == shape
    if _backend.select(OP, rewards, backend=backend) == "torch":
        return _torch(rewards, ids, last, mask, cu_seqlens, ragged_rewards, shape, estimator)
    out = _backend.empty(shape, torch.float32)
    threads = _backend.num_threads()
    code = ESTIMATORS[estimator]
    _C.group_advantage(rewards, ids, last, mask, cu_seqlens, ragged_rewards, code, out, threads)
    return out


def _check_estimator(estimator: str) -> None:
    if estimator in TEMPORAL_ESTIMATORS:
        raise ValueError(
            f"{OP}: estimator {estimator!r} is temporal: it needs rewards and values along the "
            "time steps, and broadcasting the last step's value to the others is not what it "
            f"defines; choose one of {sorted(ESTIMATORS)}"
        )
    if estimator not in ESTIMATORS:
        raise ValueError(f"{OP}: estimator must be one of {sorted(ESTIMATORS)}, got {estimator!r}")


def _dense_group_ids(group_ids: Sequence[str] | Sequence[int] | torch.Tensor) -> torch.Tensor:
    if isinstance(group_ids, torch.Tensor):
        if group_ids.is_floating_point() or group_ids.dim() != 1:
            raise ValueError(
                f"{OP}: group_ids must be (N,) ints, got {group_ids.dtype} of shape "
                f"{tuple(group_ids.shape)}"
            )
        return group_ids.to(torch.int64).contiguous()
    if isinstance(group_ids, str):
        raise TypeError(f"{OP}: group_ids must be one id per row, got a single string")
    labels = group_ids.tolist() if hasattr(group_ids, "tolist") else group_ids
    ids = torch.empty(len(labels), dtype=torch.int64)
    _C.dense_ids(labels, ids)
    return ids


def _check_rewards(
    rewards: torch.Tensor, num_rows: int, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    if not isinstance(rewards, torch.Tensor):
        raise TypeError(f"{OP}: rewards must be a torch tensor, got {type(rewards).__name__}")
    if not rewards.is_floating_point():
        raise ValueError(f"{OP}: rewards must be floating point, got {rewards.dtype}")
    if rewards.dim() not in (1, 2):
        raise ValueError(f"{OP}: rewards must be (N,), (N, R) or (A,), got {tuple(rewards.shape)}")
    if cu_seqlens is None and rewards.shape[0] != num_rows:
        raise ValueError(
            f"{OP}: rewards must have one row per group id ({num_rows}), got {rewards.shape[0]}"
        )
    return rewards.detach().to(torch.float32).contiguous()


def _check_cu_seqlens(cu_seqlens: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
    if cu_seqlens is None:
        return None
    cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
    if cu_seqlens.shape != (num_rows + 1,) or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(
            f"{OP}: cu_seqlens must be {num_rows + 1} non-decreasing offsets, got "
            f"{cu_seqlens.tolist()[:8]}"
        )
    return cu_seqlens


def _result_shape(
    rewards: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    num_rows: int,
) -> torch.Size:
    """Return the shape of the result: the mask's, which must fit the rows."""
    if cu_seqlens is not None:
        shape = torch.Size([int(cu_seqlens[-1])])
        if rewards.shape not in (shape, (num_rows,)):
            raise ValueError(
                f"{OP}: rewards must be ({num_rows},) or {tuple(shape)}, got {tuple(rewards.shape)}"
            )
        wanted = str(tuple(shape))
    else:
        shape = mask.shape if mask is not None else rewards.shape
        wanted = f"({num_rows},) or ({num_rows}, R)"
    fits = shape[0] == num_rows and len(shape) <= 2 if cu_seqlens is None else True
    if not fits or (mask is not None and mask.shape != shape):
        got = tuple(mask.shape) if mask is not None else tuple(shape)
        raise ValueError(f"{OP}: response_mask must be of shape {wanted}, got {got}")
    return shape


def _check_last(
    is_last_step: torch.Tensor | Sequence[bool] | None, num_rows: int
) -> torch.Tensor | None:
    if is_last_step is None:
        return None
    if isinstance(is_last_step, (list, tuple)):
        last = torch.empty(len(is_last_step), dtype=torch.bool)
        _C.flags(is_last_step, last, "is_last_step")
    else:
        last = torch.as_tensor(is_last_step, dtype=torch.bool).contiguous()
    if last.shape != (num_rows,):
        raise ValueError(
            f"{OP}: is_last_step must be of shape ({num_rows},), got {tuple(last.shape)}"
        )
    return last


def _torch(
    rewards: torch.Tensor,
    ids: torch.Tensor,
    last: torch.Tensor | None,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    ragged_rewards: bool,
    shape: torch.Size,
    estimator: str,
) -> torch.Tensor:
    num_rows = ids.numel()
    ids = ids.to(rewards.device)
    last = torch.ones(num_rows, dtype=torch.bool) if last is None else last
    last = last.to(rewards.device)
    if num_rows == 0:
        return rewards.new_zeros(shape)
    if not bool(last[-1]):
        raise ValueError(f"{OP}: is_last_step must be True in the last row, got False")
    split = (ids[1:] != ids[:-1]) & ~last[:-1]
    if bool(split.any()):
        row = int(split.nonzero()[0])
        raise ValueError(
            f"{OP}: group_ids must be equal within a trajectory, but row {row} (not a last step) "
            f"and row {row + 1} differ"
        )
    lengths = cu_seqlens.diff().to(rewards.device, torch.int64) if cu_seqlens is not None else None
    if ragged_rewards:
        assert lengths is not None
        rows = torch.repeat_interleave(torch.arange(num_rows, device=rewards.device), lengths)
        scores = rewards.new_zeros(num_rows, dtype=torch.float64)
        scores.index_add_(0, rows, rewards.double())
    else:
        scores = rewards.double().reshape(num_rows, -1).sum(1)
    bad = last & ~torch.isfinite(scores)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"{OP}: rewards must be finite, but those of row {row} sum to {float(scores[row])}"
        )
    advantage = reference.group_advantage(scores, ids, last, estimator).to(torch.float32)
    if lengths is not None:
        advantage = torch.repeat_interleave(advantage, lengths)
    elif len(shape) == 2:
        advantage = advantage[:, None].expand(shape)
    return advantage * mask if mask is not None else advantage.clone()
