"""Token-level advantages, along the trained tokens of a trajectory.

N rows (steps), R padded cells, A ragged cells, J trajectories.

Design: docs/design/011-turn-and-token-advantages.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from skyrl_fast import _C
from skyrl_fast.ops import _backend
from skyrl_fast.ops._rows import (
    Rows,
    check_discount,
    check_finite,
    check_rows,
    check_trajectories,
)
from skyrl_fast.ops.advantage import reference
from skyrl_fast.ops.advantage.reference import trajectory_numbers


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    *,
    is_last_step: torch.Tensor | Sequence[bool] | None = None,
    loss_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    gamma: float = 1.0,
    lambd: float = 1.0,
    normalize: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns by generalised advantage estimation, linked across steps.

    Schulman et al. 2016, arXiv:1506.02438. The time steps are the trained tokens of a trajectory:
    those of step 0 in order, then those of step 1, and so on; after the last trained token of a
    step follows the first one of the next. With V the value of a trained token, V' and A' those of
    the trained token after it (0 after the last one):
    delta = r + gamma * V' - V,  A = delta + gamma * lambd * A',  return = A + V.
    A token that is not trained (an observation, an appended end token) is no time step: it is not
    discounted and its value is not read. Its reward is a result of the trained token before it and
    is added there: r is a token's reward plus those up to the next trained token. Rewards before
    the first trained token are ignored. Sums are float64, in a fixed order.

    Args:
        rewards: float; (N, R) per padded response token, with `cu_seqlens` (A,) per response
            token, or (N,), one per row, given after the row's last token. Padded cells hold 0.
        values: float, (N, R) or (A,): the critic's value of the state before each token.
        is_last_step: (N,) bool, True at each trajectory's final row; its rows are adjacent and in
            time order. None: every row is a separate trajectory.
        loss_mask: bool, uint8, int64 or float32, (N, R) or (A,), not 0 on trained tokens; 0 in
            padded cells and padding rows. None: all are trained.
        cu_seqlens: (N + 1,) int32 offsets of the rows' cells, for ragged (A,) data.
        gamma: discount of one trained token, from 0 to 1.
        lambd: from 0 (one-step returns) to 1 (full returns).
        normalize: scale the advantages to mean 0 and (biased) variance 1 over all trained tokens;
            returns are computed before that.
        backend: "native", "torch", or None to choose.

    Returns:
        advantages and returns, float32 in the shape of `values`; 0 where `loss_mask` is 0.

    Raises:
        ValueError: shapes that do not match, a factor out of range, a last row that is no last
            step, a reward or the value of a trained token that is NaN or infinite.

    Example:
        One trajectory of two steps of one token, rewarded at its end.

        >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25]), is_last_step=[False, True],
        ...     lambd=0.5)
        (tensor([0.1250, 0.7500]), tensor([0.6250, 1.0000]))
    """
    op = "gae"
    check_discount(op, "gamma", gamma)
    check_discount(op, "lambd", lambd)
    rows = _check(op, rewards, values, is_last_step, loss_mask, cu_seqlens)
    values = values.detach().to(torch.float32).contiguous()
    if _backend.select(op, rows.rewards, values, backend=backend) == "torch":
        return _torch(rows, values, gamma, lambd, normalize)
    advantages = rows.empty()
    returns = rows.empty()
    _native(rows, values, gamma, lambd, normalize, advantages, returns)
    return advantages, returns


def reinforce_plus_plus(
    rewards: torch.Tensor,
    *,
    is_last_step: torch.Tensor | Sequence[bool] | None = None,
    loss_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    gamma: float = 1.0,
    normalize: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Return REINFORCE++ advantages: rewards to go per token, normalised over the batch.

    Hu et al. 2025, arXiv:2501.03262. The chain is that of `gae` (linked across the steps of a
    trajectory, over trained tokens) without values: return = r + gamma * return of the trained
    token after it. The batch's masked mean is the baseline and its masked (biased) standard
    deviation, at least 1e-4, the scale; padded cells and padding rows do not affect them.

    Args:
        rewards, is_last_step, cu_seqlens, gamma, backend: as `gae`. With (N,) `rewards` and no
            mask, each row counts as one token.
        loss_mask: as `gae`; also the shape of the result.
        normalize: False: return the rewards to go.

    Returns:
        float32 in the shape of `loss_mask` (of `rewards` where there is none); 0 where it is 0.

    Raises:
        ValueError: as `gae`.

    Example:
        >>> reinforce_plus_plus(torch.tensor([0.0, 1.0, 0.0]), is_last_step=[False, True, True],
        ...                     gamma=0.5, normalize=False)
        tensor([0.5000, 1.0000, 0.0000])
    """
    op = "reinforce_plus_plus"
    check_discount(op, "gamma", gamma)
    rows = _check(op, rewards, None, is_last_step, loss_mask, cu_seqlens)
    if _backend.select(op, rows.rewards, backend=backend) == "torch":
        return _torch(rows, None, gamma, 1.0, normalize)[0]
    # The chain of `gae`: without values and with lambda 1 its advantages are the rewards to go.
    advantages = rows.empty()
    _native(rows, None, gamma, 1.0, normalize, advantages, None)
    return advantages


def _check(
    op: str,
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    is_last_step: torch.Tensor | Sequence[bool] | None,
    loss_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> Rows:
    if values is not None:
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            if isinstance(values, torch.Tensor):
                got = values.dtype
            else:
                got = type(values).__name__
            raise ValueError(f"{op}: values: expected a floating-point tensor, got {got}")
        if loss_mask is None:
            # The mask gives the result its shape.
            loss_mask = torch.ones(values.shape, dtype=torch.bool, device=rewards.device)
    rows = check_rows(
        op,
        rewards,
        None,
        is_last_step,
        loss_mask,
        cu_seqlens,
        mask_name="loss_mask",
        prefers_tokens=True,
    )
    if values is not None and values.shape != rows.shape:
        raise ValueError(
            f"{op}: values: expected shape {tuple(rows.shape)}, got {tuple(values.shape)}"
        )
    # `check_rows` takes rewards of any width, for ops that only sum them.
    if not rows.ragged_rewards and rows.rewards.dim() == 2 and rows.rewards.shape != rows.shape:
        raise ValueError(
            f"{op}: rewards: expected ({rows.num_rows},) or {tuple(rows.shape)}, "
            f"got {tuple(rows.rewards.shape)}"
        )
    return rows


def _native(rows: Rows, values: torch.Tensor | None, *options: Any) -> None:
    """Write advantages and returns, the last two of `options`."""
    arguments: tuple[Any, ...] = (*rows.layout, *options, _backend.num_threads())
    _C.token_chain(rows.op, rows.num_rows, rows.rewards, values, *arguments)


def _torch(
    rows: Rows, values: torch.Tensor | None, gamma: float, lambd: float, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    check_trajectories(rows)
    check_finite(rows, rows.row_sums())
    lengths = rows.lengths()
    if lengths is None:
        if len(rows.shape) == 2:
            width = rows.shape[1]
        else:
            width = 1
        lengths = torch.full((rows.num_rows,), width, device="cpu")
    # The reference goes cell by cell: on a GPU each one would wait for the device.
    lengths = lengths.cpu()
    row_ids = torch.repeat_interleave(lengths)
    cells = row_ids.numel()
    trained = torch.ones(cells, dtype=torch.bool, device="cpu")
    if rows.mask is not None:
        trained = rows.mask.cpu().reshape(-1) != 0
    flat = torch.zeros(cells, device="cpu", dtype=torch.float32)
    if values is not None:
        flat = values.cpu().reshape(-1)
    # Values of observations are not read, so they may be anything, NaN included.
    flat = flat.where(trained, 0.0)
    bad = (~torch.isfinite(flat)).nonzero()
    if bad.numel():
        cell = int(bad[0])
        raise ValueError(
            f"{rows.op}: values: expected finite ones for trained tokens, but row "
            f"{int(row_ids[cell])} "
            f"has {float(flat[cell])}"
        )
    trajectory = trajectory_numbers(rows.last_or_all().cpu())[row_ids]
    advantages, returns = reference.token_chain(
        _rewards_per_cell(rows, lengths), flat, trained, trajectory, gamma, lambd
    )
    if normalize:
        advantages = reference.normalize(advantages, trained)
    device = rows.rewards.device
    advantages, returns = (
        x.to(device, torch.float32).reshape(rows.shape) for x in (advantages, returns)
    )
    return advantages, returns


def _rewards_per_cell(rows: Rows, lengths: torch.Tensor) -> torch.Tensor:
    """Return (cells,) rewards; a reward per row is on the row's last cell."""
    rewards = rows.rewards.cpu()
    if rows.ragged_rewards or rewards.dim() == 2:
        return rewards.reshape(-1)
    cells = torch.zeros(int(lengths.sum()), dtype=torch.float64, device="cpu")
    # An empty row's reward is added to the last cell before it, if of the same trajectory.
    trajectory = trajectory_numbers(rows.last_or_all().cpu())
    ends = lengths.cumsum(0)
    for row in range(rows.num_rows):
        cell = int(ends[row]) - 1
        owner = row
        while owner >= 0 and int(lengths[owner]) == 0:
            owner -= 1
        if owner >= 0 and trajectory[owner] == trajectory[row]:
            cells[cell] += float(rewards[row])
    return cells
