"""How far rounding may move log-probabilities of the same weights: the limits of the probe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

QUANTILE = 0.9
# A change of the trainer's logprobs by this share of the limits is no accident: the engine's, which
# are the same in every bit for the same weights, must change, too.
STALE_SHARE = 0.02
MIN_LOGIT_STD = 0.01  # the log-softmax rounds even if all logits are equal


@dataclass(frozen=True, slots=True)
class ProbeDifference:
    """Distances between two lists of log-probabilities of the same tokens.

    Args:
        maximum, mean, quantile: of the tokens; the quantile is that of 90 %.
        logit_std: standard deviation of a token's logits, their unit.
    """

    maximum: float
    mean: float
    quantile: float
    logit_std: float

    @classmethod
    def of(cls, distances: Sequence[float], logit_std: float) -> ProbeDifference:
        """Return the statistics of these distances, of which there is at least one."""
        ascending = np.sort(distances)
        at = math.ceil(QUANTILE * (len(ascending) - 1))  # interpolation has no answer for inf
        return cls(float(ascending[-1]), float(ascending.mean()), float(ascending[at]), logit_std)


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """The largest differences that rounding explains; None: any.

    Args:
        maximum: of a single token.
        mean, quantile: of all tokens, as a share of the logits' standard deviation.
    """

    maximum: float | None = None
    mean: float | None = None
    quantile: float | None = None

    def allow(self, difference: ProbeDifference, *, share: float = 1.0) -> bool:
        """Return whether the difference is at most this share of the limits; NaN is not."""
        return all(got <= share * limit for _, got, limit in self._compared(difference))

    def describe(self, difference: ProbeDifference) -> str:
        """Return each limited value next to its limit."""
        return ", ".join(
            f"{name} {got:.3g}, allowed {limit:.3g}"
            for name, got, limit in self._compared(difference)
        )

    def _compared(self, difference: ProbeDifference) -> list[tuple[str, float, float]]:
        unit = max(difference.logit_std, MIN_LOGIT_STD)
        rows = [
            ("maximum", difference.maximum, self.maximum, 1.0),
            ("mean", difference.mean, self.mean, unit),
            ("90 % quantile", difference.quantile, self.quantile, unit),
        ]
        return [(name, got, limit * scale) for name, got, limit, scale in rows if limit is not None]


# In float32 the engine is 1e-6 to 1e-5 away from the trainer, whatever the model. With 8 or 11 bits
# of mantissa the error grows with logits and depth, and its maximum with the vocabulary's tail;
# its mean stays below 0.03 standard deviations of the logits (docs/design/007).
_HALF = ProbeLimits(mean=0.05, quantile=0.1)
LIMITS = {torch.float32: ProbeLimits(maximum=1e-3), torch.bfloat16: _HALF, torch.float16: _HALF}
