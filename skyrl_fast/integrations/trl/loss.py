"""TRL's GRPO losses by `policy_loss`. N rows, R response tokens."""

from __future__ import annotations

import torch

from skyrl_fast.ops.policy_loss.loss import PolicyLoss, policy_loss
from skyrl_fast.ops.policy_loss.losses import Cispo, Gspo, LossSettings, Regular, Sapo
from skyrl_fast.ops.policy_loss.reduction import reduction_weights

# TRL's loss types and their reductions. "tokens": divided by a number of tokens that the caller
# knows; "rows": sums per row, their mean.
REDUCTIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "dapo": "tokens",
    "cispo": "tokens",
    "vespo": "tokens",
    "luspo": "rows",
}
SEQUENCE_LEVEL = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOG_BOUND = 20.0  # bound of log ratios in VESPO
LOG_SMALLEST = -18.420680743952367  # log(1e-8), of a sequence's ratio in VESPO


def grpo_loss(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss_type: str = "dapo",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    importance_sampling_level: str = "token",
    importance_sampling_ratio: torch.Tensor | None = None,
    beta: float = 0.0,
    ref_per_token_logps: torch.Tensor | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    max_completion_length: int | None = None,
    num_items: torch.Tensor | float | None = None,
) -> PolicyLoss:
    """Return the loss of TRL's GRPOTrainer before gradient accumulation, with its gradient.

    Args:
        per_token_logps: (N, R). old_per_token_logps: (N, R), or None: the same, ratio 1.
        advantages: (N,) or (N, R). mask: (N, R).
        epsilon_low, epsilon_high, importance_sampling_level, beta: TRL's settings; "sequence"
            level is GSPO. For "cispo" epsilon_high is the largest ratio, at least 1.
        importance_sampling_ratio: (N, R) or (N, 1), of the trainer to the sampler: it weighs the
            policy loss, and in "vespo" is part of the sequence's ratio.
        ref_per_token_logps: (N, R), for `beta`.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: for "vespo", whose weight
            of a sequence with ratio w is exp(lambda) w^k exp(-lambda w).
        num_items: for "dapo", "cispo" and "vespo", the tokens to divide by, above 0; None: those
            of this call.
    """
    if loss_type not in REDUCTIONS:
        raise ValueError(
            f"grpo_loss: loss_type: expected one of {list(REDUCTIONS)}, got {loss_type}"
        )
    if beta and ref_per_token_logps is None:
        raise ValueError("grpo_loss: beta needs ref_per_token_logps, got None")
    levels = ("token", "sequence") if loss_type in SEQUENCE_LEVEL else ("token",)
    if importance_sampling_level not in levels:
        raise ValueError(
            f"grpo_loss: importance_sampling_level: expected one of {levels} for {loss_type}, got "
            f"{importance_sampling_level!r}"
        )
    if importance_sampling_level == "sequence" and advantages.dim() != 1:
        raise ValueError(
            f"grpo_loss: advantages: expected ({len(mask)},) at level 'sequence', got "
            f"{tuple(advantages.shape)}"
        )
    loss: LossSettings = Regular(epsilon_low, epsilon_high)
    if loss_type == "sapo":
        loss = Sapo(sapo_temperature_pos, sapo_temperature_neg)
    elif loss_type == "cispo":
        loss = Cispo(1.0, epsilon_high - 1.0)
    elif importance_sampling_level == "sequence":
        loss = Gspo(epsilon_low, epsilon_high)
    if advantages.dim() == 1:
        wide = advantages[:, None]
    else:
        wide = advantages
    token_weights = importance_sampling_ratio
    if importance_sampling_level == "sequence" and token_weights is not None:
        # One loss for all tokens of a row, so that its weight is the mean of the tokens' weights.
        count = mask.sum(-1, keepdim=True).clamp(min=1)
        token_weights = (token_weights * mask).sum(-1, keepdim=True) / count
    if loss_type == "vespo":
        token_weights = vespo_weights(
            per_token_logps,
            old_per_token_logps,
            wide,
            mask,
            importance_sampling_ratio,
            ((vespo_k_pos, vespo_lambda_pos), (vespo_k_neg, vespo_lambda_neg)),
        )
        loss, old_per_token_logps = Cispo(), None  # ratio 1: -weight * advantage * logprob
    reduction = REDUCTIONS[loss_type]
    if reduction == "rows":
        weights = mask.new_full((len(mask),), 1.0 / max(len(mask), 1), dtype=torch.float32)
    elif reduction == "tokens" and num_items is not None:
        count = torch.as_tensor(num_items, dtype=torch.float32, device=mask.device)
        weights = (1.0 / count).expand(len(mask))
    else:
        name = "token_mean" if reduction == "tokens" else reduction
        dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
        weights = reduction_weights(
            mask, reduction=name, max_seq_len=max_completion_length, dtype=dtype
        )
    out = policy_loss(
        per_token_logps,
        old_per_token_logps,
        wide.expand_as(mask),
        mask,
        loss=loss,
        row_weights=weights,
        token_weights=None if token_weights is None else token_weights.expand_as(mask),
    )
    if not beta or ref_per_token_logps is None:
        return out
    return _add_kl(out, per_token_logps, ref_per_token_logps, mask, weights, beta)


def _add_kl(
    out: PolicyLoss,
    logps: torch.Tensor,
    ref: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    beta: float,
) -> PolicyLoss:
    """Return the loss with TRL's KL penalty, which unlike `policy_loss`'s "k3" is not clamped."""
    difference = torch.where(mask != 0, ref - logps, 0.0)
    kl = difference.exp() - difference - 1
    penalty = (kl * weights[:, None]).sum()
    loss = out.loss + beta * penalty
    metrics = {
        "loss": loss.detach().double(),
        "kl_loss": penalty.detach().double(),
        "kl": kl.detach().sum(dtype=torch.float64) / out.metrics["num_tokens"].clamp(min=1),
    }
    return out._replace(loss=loss, metrics=out.metrics | metrics)


@torch.no_grad()
def vespo_weights(
    logps: torch.Tensor,
    old: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sampler_ratio: torch.Tensor | None,
    shapes: tuple[tuple[float, float], tuple[float, float]],
) -> torch.Tensor:
    """Return (N, 1) weights, or (N, R) where the advantages are per token.

    Args:
        logps, old, mask: (N, R). advantages: (N, 1) or (N, R). sampler_ratio: (N, R) or (N, 1).
        shapes: k and lambda for advantages of at least 0, and below.
    """
    if old is None:
        ratio = torch.zeros_like(logps)
    else:
        ratio = logps - old
    log_ratio = (ratio.clamp(-LOG_BOUND, LOG_BOUND) * mask).sum(-1, keepdim=True)
    if sampler_ratio is not None:
        log_sampler = sampler_ratio.log().clamp(LOG_SMALLEST, LOG_BOUND)
        log_ratio = log_ratio + log_sampler.sum(-1, keepdim=True)
    log_ratio = log_ratio.clamp(LOG_SMALLEST, LOG_BOUND)
    (k_up, lambda_up), (k_down, lambda_down) = shapes
    up = advantages >= 0
    k = torch.where(up, k_up, k_down)
    scale = torch.where(up, lambda_up, lambda_down).clamp(min=1e-4)
    return (scale + k * log_ratio - scale * log_ratio.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
