"""SkyRL 0.3.0's policy loss, KL penalty and off-policy correction, and TRL's loss, restated as the
torch calls that they make. Shapes: N rows, R padded response cells; all tensors are (N, R) float32.

The weights per row are multiplied into the advantages beforehand, so the loss is a plain sum.
"""

from __future__ import annotations

import torch

EXPONENT_CLAMP = 20.0
K3_CLAMP = 10.0


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1.0)


def _ratio(delta: torch.Tensor) -> torch.Tensor:
    return delta.float().clamp(-EXPONENT_CLAMP, EXPONENT_CLAMP).exp()


def scale_advantages(advantages: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return the advantages over the number of trained tokens (token_mean)."""
    return advantages / loss_mask.sum().clamp(min=1)


def ppo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    scaled_advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    eps_clip: float = 0.2,
) -> tuple[torch.Tensor, float]:
    """Return PPO's loss and the share of clipped tokens, which synchronizes with the device."""
    ratio = _ratio(logprobs - old_logprobs)
    free = ratio * scaled_advantages
    bound = ratio.clamp(1 - eps_clip, 1 + eps_clip) * scaled_advantages
    loss = -torch.min(free, bound)
    clip_ratio = _masked_mean((-bound > -free).float(), loss_mask).detach().item()
    return (loss * loss_mask).sum(), clip_ratio


def kl_k3(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """Return the per-token k3 estimate, 0 where masked."""
    x = (ref_logprobs - logprobs).clamp(-EXPONENT_CLAMP, EXPONENT_CLAMP)
    kl = (x.exp() - x - 1).contiguous().clamp(-K3_CLAMP, K3_CLAMP)
    return torch.where(loss_mask.bool(), kl * loss_mask, 0.0)


def trl_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    ref_logprobs: torch.Tensor | None = None,
    beta: float = 0.0,
    eps_clip: float = 0.2,
) -> torch.Tensor:
    """Return the token mean of TRL's clipped loss ("dapo"), with its unclamped k3."""
    ratio = torch.exp(logprobs - old_logprobs)
    free = ratio * advantages
    bound = torch.clamp(ratio, 1 - eps_clip, 1 + eps_clip) * advantages
    tokens = -torch.min(free, bound)
    if ref_logprobs is not None:
        x = ref_logprobs - logprobs
        tokens = tokens + beta * (torch.exp(x) - x - 1)
    return (tokens * loss_mask).sum() / loss_mask.sum().clamp(min=1.0)


def token_tis(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, loss_mask: torch.Tensor, cap: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the token weights of truncated importance sampling, and their metrics."""
    ratio = _ratio(old_logprobs - rollout_logprobs)
    metrics = {
        "is_ratio_mean": _masked_mean(ratio, loss_mask).item(),
        "is_ratio_std": (ratio * loss_mask).std().item(),
        "is_ratio_max": (ratio * loss_mask).max().item(),
        "is_ratio_min": (ratio * loss_mask).min().item(),
    }
    again = _ratio(old_logprobs - rollout_logprobs)
    capped = (again > cap) & (loss_mask > 0)
    share = capped.sum() / (loss_mask > 0).sum().clamp(min=1)
    metrics["tis_token_clip_high_ratio"] = share.item()
    return again.clamp(max=cap), metrics


def full_correction(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    cap: float,
    outlier_high: float,
    bounds: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Return outliers, TIS by sequence and the geometric mask, by row: weights, mask, metrics."""
    ratio = _ratio(old_logprobs - rollout_logprobs)
    metrics = {
        "is_ratio_mean": _masked_mean(ratio, loss_mask).item(),
        "is_ratio_std": (ratio * loss_mask).std().item(),
        "is_ratio_max": (ratio * loss_mask).max().item(),
        "is_ratio_min": (ratio * loss_mask).min().item(),
    }
    num_rows = float(loss_mask.shape[0])
    again = _ratio(old_logprobs - rollout_logprobs)
    over = (again > outlier_high) & (loss_mask > 0)
    under = torch.zeros_like(loss_mask, dtype=torch.bool)
    valid = ((~over & ~under) | (loss_mask == 0)).all(dim=-1, keepdim=True)
    metrics["outlier_seq_masked_ratio"] = ((~valid.squeeze(-1)).sum() / num_rows).item()
    metrics["outlier_seq_over_high_ratio"] = (over.any(-1).sum() / num_rows).item()
    metrics["outlier_seq_under_low_ratio"] = (under.any(-1).sum() / num_rows).item()
    mask = loss_mask * valid.float()
    delta = old_logprobs - rollout_logprobs
    _ratio(delta)
    product = _ratio((delta * mask).sum(-1, keepdim=True))
    metrics["tis_seq_clip_high_ratio"] = ((product > cap).sum() / num_rows).item()
    delta = old_logprobs - rollout_logprobs
    tokens = mask.sum(-1, keepdim=True).clamp(min=1.0)
    mean = _ratio((delta * mask).sum(-1, keepdim=True) / tokens)
    above, below = mean > bounds[1], mean < bounds[0]
    inside = ~above & ~below
    metrics["geo_sequence_mask_masked_ratio"] = ((~inside).sum() / num_rows).item()
    metrics["geo_sequence_mask_over_high_ratio"] = (above.sum() / num_rows).item()
    metrics["geo_sequence_mask_under_low_ratio"] = (below.sum() / num_rows).item()
    return product.clamp(max=cap), mask * inside.float(), metrics
