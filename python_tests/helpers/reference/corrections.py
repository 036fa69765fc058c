"""Off-policy correction of a mini-batch (section 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reference.losses import LIMIT


@dataclass(slots=True)
class Correction:
    """Weights of trained tokens, and what the metrics count.

    Args:
        weights: of each token in the policy loss; 0 where it is dropped.
        shares: number of tokens or sequences by metric, and of how many. Of tokens it is the share
            of those that the rules before have left.
    """

    weights: list[float]
    shares: dict[str, tuple[float, int]] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)


def correct(
    old: Sequence[float], sampled: Sequence[float], sequences: Sequence[int], settings: Any
) -> Correction:
    """Return the correction of the trained tokens of a mini-batch.

    Args:
        old, sampled: log-probabilities of the trainer before the update and of the sampler.
        sequences: number of each token's sequence.
    """
    logs = [
        max(-LIMIT, min(LIMIT, trainer - sampler))
        for trainer, sampler in zip(old, sampled, strict=True)
    ]
    ratios = [math.exp(value) for value in logs]
    count = len(ratios)
    numbers = sorted(set(sequences))
    result = Correction([1.0] * count, ratios=ratios)
    stays = [True] * count

    def members(number: int) -> list[int]:
        return [index for index in range(count) if sequences[index] == number and stays[index]]

    def outside(value: float, low: float | None, high: float | None) -> tuple[bool, bool]:
        return low is not None and value < low, high is not None and value > high

    def share(number: int, left: int) -> float:
        """Return the part of what earlier rules have left, in tokens of all."""
        return number / max(1, left) * count

    def mask(indices: Sequence[int]) -> None:
        for index in indices:
            stays[index] = False

    def mask_sequences(name: str, marks: dict[int, tuple[bool, bool]]) -> None:
        for number, (is_low, is_high) in marks.items():
            if is_low or is_high:
                mask(members(number))
        total = len(numbers)
        under = sum(is_low for is_low, _ in marks.values())
        over = sum(is_high for _, is_high in marks.values())
        either = sum(is_low or is_high for is_low, is_high in marks.values())
        result.shares[f"{name}_masked_ratio"] = (either, total)
        result.shares[f"{name}_under_low_ratio"] = (under, total)
        result.shares[f"{name}_over_high_ratio"] = (over, total)

    low = settings.outlier_token_is_threshold_low
    high = settings.outlier_token_is_threshold_high
    if low is not None or high is not None:
        marks = {}
        for number in numbers:
            each = [outside(ratios[index], low, high) for index in members(number)]
            marks[number] = any(one[0] for one in each), any(one[1] for one in each)
        mask_sequences("outlier_seq", marks)
    low = settings.token_mask_is_threshold_low
    high = settings.token_mask_is_threshold_high
    if low is not None or high is not None:
        left = sum(stays)
        dropped = [
            index
            for index in range(count)
            if stays[index] and any(outside(ratios[index], low, high))
        ]
        result.shares["token_mask_ratio"] = (share(len(dropped), left), count)
        mask(dropped)
    if settings.tis_ratio_type == "token":
        cap = settings.token_tis_ratio_clip_high
        capped = [index for index in range(count) if stays[index] and ratios[index] > cap]
        result.shares["tis_token_clip_high_ratio"] = (share(len(capped), sum(stays)), count)
        result.weights = [min(ratio, cap) for ratio in ratios]
    if settings.tis_ratio_type == "sequence":
        cap = settings.sequence_tis_ratio_clip_high
        over = 0
        for number in numbers:
            own = members(number)
            product = math.exp(max(-LIMIT, min(LIMIT, math.fsum(logs[index] for index in own))))
            over += bool(own) and product > cap
            for index in own:
                result.weights[index] = min(product, cap)
        result.shares["tis_seq_clip_high_ratio"] = (over, len(numbers))
    metric = settings.sequence_mask_metric
    if metric is not None:
        short = "geo" if metric == "geometric" else "product"
        low = getattr(settings, f"{short}_mask_low")
        high = getattr(settings, f"{short}_mask_high")
        marks = {}
        for number in numbers:
            own = members(number)
            if own:
                total = math.fsum(logs[index] for index in own)
                total = total / len(own) if metric == "geometric" else total
                marks[number] = outside(math.exp(total), low, high)
        mask_sequences(f"{short}_sequence_mask", marks)
    result.weights = [
        weight if is_left else 0.0 for weight, is_left in zip(result.weights, stays, strict=True)
    ]
    return result
