"""Rewards of training and evaluation, over trajectories. N rows, J trajectories, G groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from skyrl_fast.batch import StepBatch
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.metrics.outcomes import (
    mean,
    outcomes_of_samples,
    outcomes_of_trajectories,
)
from skyrl_fast.train.metrics.rollouts import environment_metrics

PASS_THRESHOLD = 0.0  # a trajectory passes if its reward is larger


def reward_metrics(
    batch: StepBatch, *, samples_per_prompt: int, sums_rewards: bool = False
) -> dict[str, float]:
    """Return mean reward, pass@n (groups with a reward above 0) and mean positive reward.

    Trajectories that failed are left out.
    """
    table = outcomes_of_samples(batch, sums_rewards=sums_rewards)
    passed = np.zeros(batch.num_groups, dtype=bool)
    passed[table.group_ids[table.rewards > PASS_THRESHOLD]] = True
    return {
        "reward/avg_raw_reward": mean(table.rewards),
        f"reward/avg_pass_at_{samples_per_prompt}": mean(passed[np.unique(table.group_ids)]),
        "reward/mean_positive_reward": mean(table.positive_rewards),
    }


def reward_spread(
    batch: StepBatch,
    *,
    tolerance: float = 0.0,
    compares_group: bool = True,
    sums_rewards: bool = False,
) -> dict[str, float]:
    """Return the standard deviation of rewards, and the share of groups whose rewards are equal.

    Differences up to `tolerance` count as equal, and trajectories that failed are left out. The
    share is left out where an advantage does not compare a trajectory with its group.
    """
    table = outcomes_of_samples(batch, sums_rewards=sums_rewards)
    deviation = {"reward/std_raw_reward": float(table.rewards.std()) if table.rewards.size else 0.0}
    if not compares_group:
        return deviation
    groups = batch.num_groups
    lowest = np.full(groups, np.inf)
    highest = np.full(groups, -np.inf)
    np.minimum.at(lowest, table.group_ids, table.rewards)
    np.maximum.at(highest, table.group_ids, table.rewards)
    present = np.unique(table.group_ids)
    equal = (highest - lowest)[present] <= tolerance
    return deviation | {"reward/zero_variance_share": mean(equal)}


def eval_metrics(
    trajectories: Sequence[Trajectory],
    *,
    ks: Iterable[int] = (1,),
    data_sources: Sequence[str | None] | None = None,
    sums_rewards: bool = False,
) -> dict[str, float]:
    """Return mean score, pass@k, mean positive reward and share of failures of an evaluation.

    A trajectory that failed counts as reward 0. With them come the means of what environments have
    reported, such as named parts of rewards.

    Args:
        ks: pass@k is the unbiased estimator of `pass_at_k`, averaged over groups; each k at most
            the smallest group.
        data_sources: J names; each gets its metrics under `eval/<name>/`, all trajectories under
            `eval/all/`.

    Raises:
        ValueError: a k below 1 or above the size of a group.
    """
    table = outcomes_of_trajectories(trajectories, sums_rewards=sums_rewards)
    failed = np.array([t.failure is not None for t in trajectories], dtype=np.float64)
    parts = {"all": np.ones(len(trajectories), dtype=bool)}
    if data_sources is not None:
        # Sources whose names map to the same one are merged: "a/b" and "a_b" are both a_b.
        sources = [metric_name(source) for source in data_sources]
        parts |= {name: np.array(sources) == name for name in sorted(set(sources))}
    metrics = {}
    for name, chosen in parts.items():
        group = table.group_ids[chosen]
        size = np.bincount(group)
        # Groups of other sources have size 0 here and are left out below.
        passed = np.bincount(group, weights=table.rewards[chosen] > PASS_THRESHOLD)
        metrics[f"eval/{name}/avg_score"] = mean(table.rewards[chosen])
        for k in ks:
            share = mean(pass_at_k(size[size > 0], passed[size > 0], k))
            metrics[f"eval/{name}/pass_at_{k}"] = share
        metrics[f"eval/{name}/mean_positive_reward"] = mean(table.positive_rewards[chosen])
        metrics[f"eval/{name}/failed_share"] = mean(failed[chosen])
        reports = [trajectories[index].env_metrics for index in np.flatnonzero(chosen)]
        metrics |= environment_metrics(reports, prefix=f"eval/{name}/")
    return metrics


def source_statistics(
    trajectories: Sequence[Trajectory], *, sums_rewards: bool = False
) -> dict[str, dict[str, float]]:
    """Return statistics of each source's groups in a batch, by `data_source`.

    `avg_raw_reward` is the mean reward of the trajectories, `zero_variance_share` the share of
    groups of one reward, `num_groups` their number. Trajectories that failed are left out, and so
    is a source of which nothing else is left.
    """
    groups: dict[str, dict[str, list[float]]] = {}
    for trajectory in trajectories:
        if trajectory.has_acted and trajectory.data_source:
            of_source = groups.setdefault(trajectory.data_source, {})
            outcome = trajectory.outcome(sums_rewards=sums_rewards)
            of_source.setdefault(trajectory.uid, []).append(outcome)
    statistics = {}
    for source, rewards in groups.items():
        every = [reward for group in rewards.values() for reward in group]
        equal = [min(group) == max(group) for group in rewards.values()]
        statistics[source] = {
            "avg_raw_reward": sum(every) / len(every),
            "zero_variance_share": sum(equal) / len(equal),
            "num_groups": float(len(rewards)),
        }
    return statistics


def source_metrics(statistics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the statistics as metrics, where a batch has several sources."""
    if len(statistics) < 2:
        return {}
    result: dict[str, float] = {}
    for source, values in statistics.items():
        for name, value in values.items():
            result[f"data/{metric_name(source)}/{name}"] = value
    return result


def metric_name(source: str | None) -> str:
    if not source:
        return "unknown"
    return "all_" if source == "all" else source.replace("/", "_")  # eval/all/ covers all sources


def pass_at_k(num_samples: np.ndarray, num_passed: np.ndarray, k: int) -> np.ndarray:
    """Return (G,) float64, the probability that one of k samples without replacement passes.

    Args:
        num_samples: (G,) n, samples of each group.
        num_passed: (G,) c, samples that passed.
        k: 1 to min(n).

    Example:
        >>> pass_at_k(np.array([4]), np.array([1]), 2)
        array([0.5])
    """
    # 1 - C(n - c, k) / C(n, k), unbiased, in contrast to 1 - (1 - c / n)^k: Chen et al. 2021,
    # arXiv:2107.03374, section 2.1.
    n = np.asarray(num_samples, dtype=np.float64)
    c = np.asarray(num_passed, dtype=np.float64)
    if n.size and not 1 <= k <= n.min():
        raise ValueError(f"pass_at_k: k: expected 1 to the smallest group ({n.min():.0f}), got {k}")
    draws = np.arange(k)[:, None]
    failing = np.clip(n - c - draws, 0.0, None) / (n - draws)  # the i-th draw fails too
    return 1.0 - failing.prod(axis=0)
