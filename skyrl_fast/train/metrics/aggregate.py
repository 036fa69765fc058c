"""How metrics of passes and mini-batches add up: by the column `over` of the metric table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_fast.train.output.metric_table import Over, find_over

CROSS_ENTROPY_TOKENS = "policy/cross_entropy_tokens"


@dataclass(frozen=True, slots=True)
class Part:
    """Metrics of a pass or a mini-batch, and the numbers that its means are over.

    Args:
        metrics: by name, without those that the part cannot have, such as means over no token.
        tokens: trained tokens.
        sequences: sequences with a trained token.
    """

    metrics: Mapping[str, float]
    tokens: float
    sequences: float = 0

    def count(self, over: Over) -> float:
        """Return how many tokens or sequences a mean of this part is over."""
        if over == "sequences":
            return self.sequences
        if over == "cross_entropy_tokens":
            # Absent where all trained tokens are supervised.
            return self.metrics.get(CROSS_ENTROPY_TOKENS, self.tokens)
        return self.tokens


def add_up_passes(passes: Sequence[Part]) -> dict[str, float]:
    """Return the metrics of a mini-batch from those of its passes.

    Example:
        >>> passes = [Part({"policy/kl": 1.0}, tokens=1), Part({"policy/kl": 0.0}, tokens=3)]
        >>> add_up_passes(passes)
        {'policy/kl': 0.25}
    """
    return _add_up(passes, num_sums=1)


def add_up_mini_batches(mini_batches: Sequence[Part]) -> dict[str, float]:
    """Return the metrics of a batch from those of its mini-batches.

    Sums become means over mini-batches, like the loss: one of which no row has a gradient counts
    as 0.
    """
    return _add_up(mini_batches, num_sums=len(mini_batches))


def _add_up(parts: Sequence[Part], *, num_sums: int) -> dict[str, float]:
    result = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        having = [part for part in parts if name in part.metrics]
        result[name] = _total(name, having, num_sums)
    return result


def _total(name: str, parts: Sequence[Part], num_sums: int) -> float:
    """Return a metric of the parts together, all of which have it."""
    over = find_over(name)
    values = [part.metrics[name] for part in parts]
    if over == "max":
        return max(values)
    if over == "min":
        return min(values)
    if over == "sum":
        return sum(values) / num_sums
    if over == "mini_batches":
        return sum(values) / len(values)
    if over == "std":
        return _pooled_std(name, parts)
    return _mean(values, [part.count(over) for part in parts])


def _mean(values: Sequence[float], counts: Sequence[float]) -> float:
    # Passes and mini-batches differ in tokens: the mean of their means would not be that of all.
    total = sum(counts)
    if total:
        return sum(v * n for v, n in zip(values, counts, strict=True)) / total
    return 0.0


def _pooled_std(name: str, parts: Sequence[Part]) -> float:
    """Return the standard deviation of all tokens from those of the parts."""
    mean_name = f"{name.removesuffix('_std')}_mean"
    means = [part.metrics[mean_name] for part in parts]
    counts = [part.tokens for part in parts]
    mean = _mean(means, counts)
    squares = 0.0
    for part, its_mean in zip(parts, means, strict=True):
        within = part.metrics[name] ** 2 * max(0, part.tokens - 1)
        squares += within + part.tokens * (its_mean - mean) ** 2
    return float((squares / max(1, sum(counts) - 1)) ** 0.5)
