"""Plain-torch reference of the off-policy correction. C flat cells, U sequences.

Nothing here synchronizes with the device: every condition is a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from skyrl_fast.ops.policy_loss.reference import mask_values, ratio_of


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules to apply, in this order; None: not applied.

    Args:
        outlier_low, outlier_high: a token outside drops its sequence.
        tis, cap: "token" or "sequence", and the largest weight.
        sequence_mask, mask_low, mask_high: "geometric" or "product", and its bounds.
    """

    outlier_low: float | None
    outlier_high: float | None
    token_low: float | None
    token_high: float | None
    tis: str | None
    cap: float
    sequence_mask: str | None
    mask_low: float
    mask_high: float

    @property
    def has_outlier_rule(self) -> bool:
        return self.outlier_low is not None or self.outlier_high is not None

    @property
    def has_token_mask(self) -> bool:
        return self.token_low is not None or self.token_high is not None

    @property
    def can_mask(self) -> bool:
        return self.has_outlier_rule or self.has_token_mask or self.sequence_mask is not None


def off_policy_correction(
    rules: Rules,
    old: torch.Tensor,
    rollout: torch.Tensor,
    live: torch.Tensor,
    sequence: torch.Tensor,
    num_sequences: int,
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (C,) token weights (None without TIS), (C,) bool mask, and the metrics.

    Args:
        old, rollout: (C,) log-probabilities.
        live: (C,) bool, trained tokens.
        sequence: (C,) int64, the sequence of each cell, below `num_sequences`.
    """
    delta = mask_values(old, live) - mask_values(rollout, live)
    ratio = ratio_of(delta)
    zeros = torch.zeros(num_sequences, dtype=torch.float64, device=old.device)

    def per_sequence(values: torch.Tensor) -> torch.Tensor:
        return zeros.index_add(0, sequence, values.double())

    # Sequences of the given mask: shares are over these, whatever earlier rules have dropped.
    trained = per_sequence(live) > 0
    metrics = _ratio_metrics(delta, ratio, live)

    def share(flags: torch.Tensor) -> torch.Tensor:
        return (flags & trained).sum().double() / trained.sum().double().clamp(min=1)

    keep = live
    if rules.has_outlier_rule:
        if rules.outlier_high is None:
            high = torch.inf
        else:
            high = rules.outlier_high
        if rules.outlier_low is None:
            low = -torch.inf
        else:
            low = rules.outlier_low
        # NaN compares as false: it is no outlier, and outside of the token bounds below.
        over = per_sequence(live & (ratio > high)) > 0
        under = per_sequence(live & (ratio < low)) > 0
        metrics["outlier_seq_masked_ratio"] = share(over | under)
        metrics["outlier_seq_over_high_ratio"] = share(over)
        metrics["outlier_seq_under_low_ratio"] = share(under)
        keep = keep & ~(over | under)[sequence]
    if rules.has_token_mask:
        before = keep.sum().double().clamp(min=1)
        if rules.token_high is None:
            high = torch.inf
        else:
            high = rules.token_high
        if rules.token_low is None:
            low = -torch.inf
        else:
            low = rules.token_low
        inside = (ratio >= low) & (ratio <= high)
        metrics["token_mask_ratio"] = (keep & ~inside).sum().double() / before
        keep = keep & inside
    # A sum of logs: the product of many ratios would overflow before it is clamped.
    log_product = per_sequence(mask_values(delta, keep))
    weights = None
    if rules.tis == "token":
        num_kept = keep.sum().double().clamp(min=1)
        metrics["tis_token_clip_high_ratio"] = (keep & (ratio > rules.cap)).sum() / num_kept
        weights = ratio.clamp(max=rules.cap)
    elif rules.tis == "sequence":
        product = ratio_of(log_product)
        metrics["tis_seq_clip_high_ratio"] = share(product > rules.cap)
        weights = product.clamp(max=rules.cap).to(old.dtype)[sequence]
    if rules.sequence_mask is not None:
        tokens = per_sequence(keep).clamp(min=1)
        if rules.sequence_mask == "geometric":
            exponent = log_product / tokens
        else:
            exponent = log_product
        sequence_ratio = ratio_of(exponent)
        over = sequence_ratio > rules.mask_high
        under = sequence_ratio < rules.mask_low
        if rules.sequence_mask == "geometric":
            prefix = "geo"
        else:
            prefix = "product"
        metrics[f"{prefix}_sequence_mask_masked_ratio"] = share(over | under)
        metrics[f"{prefix}_sequence_mask_over_high_ratio"] = share(over)
        metrics[f"{prefix}_sequence_mask_under_low_ratio"] = share(under)
        keep = keep & ~(over | under)[sequence]
    return None if weights is None else mask_values(weights, keep), keep, metrics


def _ratio_metrics(
    delta: torch.Tensor, ratio: torch.Tensor, live: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return moments and extremes of the ratio over trained tokens; extremes ignore NaN."""
    count = live.sum().double()
    some = count > 0
    zero = torch.zeros_like(count)
    values = ratio.double()
    mean = mask_values(values, live).sum() / count.clamp(min=1)
    # Around the mean: of ratios near 1 a difference of squares would lose the digits.
    squares = mask_values((values - mean).square(), live).sum()
    known = live & ~delta.isnan()
    cell = torch.zeros(1, dtype=torch.float64, device=ratio.device)  # for a batch without cells
    most = torch.cat([mask_values(values, known), cell]).amax()
    inf = torch.full_like(cell, torch.inf)
    least = torch.cat([torch.where(known, values, inf), inf]).amin()
    return {
        "is_ratio_mean": mean,
        "is_ratio_std": (squares / (count - 1).clamp(min=1)).sqrt(),
        "is_ratio_max": torch.where(some, most, zero),
        "is_ratio_min": torch.where(some, least, zero),
    }
