"""Advantages of a batch's response tokens. N rows, A response tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from skyrl_fast.ops.advantage import group_advantage
from skyrl_fast.ops.credit_tokens import gae, reinforce_plus_plus
from skyrl_fast.ops.credit_turns import (
    gigpo_advantage,
    turn_group_advantage,
    turn_level_returns,
)

if TYPE_CHECKING:
    from skyrl_fast.batch.step_batch import StepBatch

MIN_VARIANCE = 1e-8
ALWAYS_NORMALIZED = ("gae", "reinforce++")


def advantages(
    batch: StepBatch,
    *,
    estimator: str = "grpo",
    normalize: bool = False,
    gamma: float = 1.0,
    step_advantage_w: float = 1.0,
    baseline: str = "turn",
    scale_by_std: bool | None = None,
) -> torch.Tensor:
    """Return (A,) float32, the advantage of each response token; for `gae` see `gae_advantages`.

    Padding rows are in groups of their own and do not move others.

    Args:
        batch: whole groups. Outcome estimators read the rewards of last steps, the others those of
            every row. "gigpo" needs `anchor_ids`.
        estimator: as for `ops.group_advantage`, or "turn_level_returns", "turn_level_group",
            "gigpo", "reinforce++".
        normalize: centre and scale over the batch's trained tokens, see `normalize_advantages`;
            "reinforce++" does so always.
        gamma: discount, but for outcome estimators.
        step_advantage_w: of "gigpo".
        baseline: of "turn_level_group".
        scale_by_std: of "turn_level_group" and "gigpo"; None: their own defaults.

    Raises:
        ValueError: as the estimator's op; "gigpo" without `anchor_ids`.
    """
    if estimator == "reinforce++":
        return reinforce_plus_plus(
            _token_rewards(batch),
            is_last_step=batch.is_last_step,
            loss_mask=batch.loss_mask,
            cu_seqlens=batch.cu_responses,
            gamma=gamma,
        )
    rewards, ids, last = batch.row_rewards, batch.group_ids, batch.is_last_step
    if estimator == "turn_level_returns":
        of_rows = turn_level_returns(rewards, is_last_step=last, gamma=gamma)
    elif estimator == "turn_level_group":
        of_rows = turn_group_advantage(
            rewards,
            ids,
            is_last_step=last,
            gamma=gamma,
            baseline=baseline,
            scale_by_std=bool(scale_by_std),
        )
    elif estimator == "gigpo":
        if batch.anchor_ids is None:
            raise ValueError("advantages: gigpo needs the batch's anchor_ids, got None")
        of_rows = gigpo_advantage(
            rewards,
            ids,
            batch.anchor_ids,
            is_last_step=last,
            gamma=gamma,
            step_advantage_w=step_advantage_w,
            scale_by_std=scale_by_std is not False,
        )
    else:
        of_rows = group_advantage(rewards, ids, is_last_step=last, estimator=estimator)
    raw = spread_over_tokens(of_rows, batch.response_lengths)
    return normalize_advantages(raw, batch.loss_mask) if normalize else raw


def spread_over_tokens(of_rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return (A,) each row's value once per token; by NumPy, which wakes no thread for so little.

    Args:
        of_rows: (N,). lengths: (N,) ints, how often each value is wanted.
    """
    return torch.from_numpy(np.repeat(of_rows.numpy(), lengths.numpy()))


def gae_advantages(batch: StepBatch, *, gamma: float = 1.0, lambd: float = 1.0) -> StepBatch:
    """Return the batch with advantages and returns by `ops.gae`, the advantages normalised.

    Args:
        batch: with `values`.

    Raises:
        ValueError: as `ops.gae`; no values.
    """
    if batch.values is None:
        raise ValueError("gae_advantages: gae needs the batch's values, got None")
    of_tokens, returns = gae(
        _token_rewards(batch),
        batch.values,
        is_last_step=batch.is_last_step,
        loss_mask=batch.loss_mask,
        cu_seqlens=batch.cu_responses,
        gamma=gamma,
        lambd=lambd,
        normalize=True,
    )
    return batch.with_(advantages=of_tokens, returns=returns)


def _token_rewards(batch: StepBatch) -> torch.Tensor:
    """Return (A,) rewards; those of rows without tokens lie on the token before, if there is one.

    There, where no token is left to carry it, the chain would put it anyway.
    """
    lost = ((batch.response_lengths == 0) & (batch.row_rewards != 0)).nonzero()[:, 0].tolist()
    if not lost:
        return batch.rewards
    rewards, cu, lengths = batch.rewards.clone(), batch.cu_responses, batch.response_lengths
    for row in lost:
        owner = row
        while owner > 0 and lengths[owner] == 0 and not batch.is_last_step[owner - 1]:
            owner -= 1
        if lengths[owner]:
            rewards[int(cu[owner + 1]) - 1] += batch.row_rewards[row]
    return rewards


def normalize_advantages(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the advantages with mean 0 and (biased) variance 1 over the cells where mask is 1.

    Mean and variance are masked both, in float64: padded cells and padding rows do not move them.
    Cells outside the mask become 0.

    Args:
        advantages: float32 of any shape.
        mask: of the same shape; 0 in padded cells and padding rows.

    Example:
        >>> normalize_advantages(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([1, 1, 0]))
        tensor([-1.,  1.,  0.])
    """
    if advantages.shape != mask.shape:
        raise ValueError(
            f"normalize_advantages: mask must be of shape {tuple(advantages.shape)}, "
            f"got {tuple(mask.shape)}"
        )
    kept = mask != 0
    count = kept.sum().clamp(min=1)
    values = advantages.double().where(kept, 0.0)
    centred = (values - values.sum() / count).where(kept, 0.0)
    variance = centred.square().sum() / count
    return (centred * variance.clamp(min=MIN_VARIANCE).rsqrt()).to(advantages.dtype)
