"""KL divergence from the reference model, subtracted from rewards (section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from reference.rows import Row

LARGEST_CHANGE = 0.2


@dataclass(frozen=True, slots=True)
class KlReport:
    """Means over trajectories that have a trained token, and the next coefficient."""

    mean: float
    largest: float
    next_coefficient: float


def subtract_kl(
    rows: Sequence[Row],
    penalties: Sequence[Sequence[float]],
    coefficient: float,
    algorithm: Any,
    *,
    reads_all_rewards: bool,
) -> KlReport:
    """Subtract the penalty of trained tokens, each a value per response token, from rewards."""
    means = []
    numbered = list(enumerate(rows))
    for _, own in groupby(numbered, key=lambda pair: pair[1].trajectory):
        earlier = 0.0
        trained: list[float] = []
        for number, row in own:
            of_row = 0.0
            for token, is_trained in enumerate(row.mask):
                if is_trained:
                    penalty = penalties[number][token]
                    row.rewards[token] -= coefficient * penalty
                    of_row += penalty
                    trained.append(penalty)
            if row.is_last and not reads_all_rewards:
                _add_last(row, -coefficient * earlier)
            earlier += of_row
        if trained:
            means.append(math.fsum(trained) / len(trained))
    mean = math.fsum(means) / len(means) if means else 0.0
    acted = {row.trajectory for row in rows if not row.is_placeholder}
    control = algorithm.kl_ctrl
    following = coefficient
    if control.type == "adaptive":
        error = max(-LARGEST_CHANGE, min(LARGEST_CHANGE, mean / control.kl_target - 1))
        following = coefficient * (1 + error * len(acted) / control.horizon)
    return KlReport(mean, max(means, default=0.0), following)


def _add_last(row: Row, reward: float) -> None:
    if row.rewards:
        row.rewards[-1] += reward
    else:
        row.trailing += reward
