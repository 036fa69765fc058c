"""Advantages of a batch's response tokens. A response tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from skyrl_fast.ops.advantage import group_advantage

if TYPE_CHECKING:
    from skyrl_fast.batch import StepBatch

MIN_VARIANCE = 1e-8


def advantages(
    batch: StepBatch, *, estimator: str = "grpo", normalize: bool = False
) -> torch.Tensor:
    """Return (A,) float32, the advantage of each response token: its trajectory's outcome.

    Padding rows are in groups of their own and do not move others.

    Args:
        batch: whole groups; its rows' rewards count where they are last steps.
        estimator: as for `ops.group_advantage`.
        normalize: centre and scale over the batch's trained tokens, see `normalize_advantages`.

    Raises:
        ValueError: as `ops.group_advantage`.
    """
    of_rows = group_advantage(
        batch.row_rewards,
        batch.group_ids,
        is_last_step=batch.is_last_step,
        estimator=estimator,
    )
    raw = torch.repeat_interleave(of_rows, batch.response_lengths.long())
    return normalize_advantages(raw, batch.loss_mask) if normalize else raw


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
