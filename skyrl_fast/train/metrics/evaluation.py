"""Metrics of an evaluation, and paired comparison of two on the same prompts. P prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from skyrl_fast.config import Config, sums_rewards
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.metrics.rewards import eval_metrics


class Estimate(NamedTuple):
    """A mean over prompts, and its standard error (NaN: of one prompt)."""

    mean: float
    error: float


def evaluation_metrics(
    trajectories: Sequence[Trajectory], config: Config, *, ks: Iterable[int]
) -> dict[str, float]:
    """Return the metrics `eval/...` of an evaluation.

    Args:
        trajectories: at least one.
        ks: of pass@k, each at most `generator.eval_n_samples_per_prompt`.
    """
    # Where no row names its source, eval/all has everything.
    sources = [trajectory.data_source for trajectory in trajectories]
    is_named = any(source is not None for source in sources)
    metrics = eval_metrics(
        trajectories,
        ks=sorted(ks),
        data_sources=sources if is_named else None,
        sums_rewards=sums_rewards(config),
    )
    turns = sum(len(trajectory.steps) for trajectory in trajectories)
    metrics["eval/all/avg_num_turns"] = turns / len(trajectories)
    return metrics


def prompt_scores(
    trajectories: Sequence[Trajectory], *, sums_rewards: bool = False
) -> dict[str, float]:
    """Return the mean outcome of each prompt's trajectories, by uid."""
    outcomes: dict[str, list[float]] = {}
    for trajectory in trajectories:
        outcome = trajectory.outcome(sums_rewards=sums_rewards)
        outcomes.setdefault(trajectory.uid, []).append(outcome)
    result: dict[str, float] = {}
    for uid, values in outcomes.items():
        result[uid] = sum(values) / len(values)
    return result


def estimate(scores: Mapping[str, float]) -> Estimate:
    """Return the mean of the prompts' scores with its standard error.

    Prompts are the independent units: samples of one prompt are a cluster, of which only the mean
    counts (Miller 2024, arXiv:2411.00640, section 2.2).

    Example:
        >>> estimate({"a": 0.0, "b": 1.0, "c": 0.5})
        Estimate(mean=0.5, error=0.2886751345948129)
    """
    values = np.array(list(scores.values()), dtype=np.float64)
    if len(values) < 2:
        return Estimate(float(values.mean()) if len(values) else float("nan"), float("nan"))
    return Estimate(float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5))


def paired_difference(first: Mapping[str, float], second: Mapping[str, float]) -> Estimate:
    """Return the mean of `second - first` over the prompts, with its standard error.

    The same prompts are hard for both, so that the error of the difference is usually smaller than
    the two errors suggest (Miller 2024, section 4.2).

    Raises:
        ValueError: they are of other prompts.

    Example:
        >>> paired_difference({"a": 0.0, "b": 0.5}, {"a": 0.5, "b": 1.0})
        Estimate(mean=0.5, error=0.0)
    """
    if first.keys() != second.keys():
        raise ValueError(
            "paired_difference: expected scores of the same prompts, got "
            f"{len(first.keys() - second.keys())} and {len(second.keys() - first.keys())} others"
        )
    return estimate({uid: second[uid] - score for uid, score in first.items()})
