"""Rewards of training and evaluation, over trajectories. N rows, J trajectories, G groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from skyrl_fast.batch import StepBatch
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.metrics.outcomes import (
    Outcomes,
    last_row_values,
    mean,
    outcomes_of_batch,
    outcomes_of_output,
    outcomes_of_trajectories,
)

PASS_THRESHOLD = 0.0  # a trajectory passes if its reward is larger
RENAMED_SOURCES = {None: "unknown", "": "unknown", "all": "all_"}  # eval/all/ covers all sources


def reward_metrics(
    rows: Mapping[str, Any] | StepBatch | Sequence[Trajectory],
    *,
    samples_per_prompt: int,
    uids: Sequence[str] | Sequence[int] | None = None,
    data_sources: Sequence[str | None] | None = None,
) -> dict[str, float]:
    """Return mean reward, pass@n and mean positive reward, over trajectories.

    Args:
        rows: a valid generator output, a batch, or trajectories (then N is their number).
        samples_per_prompt: n, for the name of pass@n. A group passes when any of its trajectories
            has a reward above 0.
        uids: N prompt names, if a generator output has no `trajectory_ids`.
        data_sources: N names; each gets the same metrics under `reward/<name>/`.

    Example:
        >>> output = {"prompt_token_ids": [[1], [1]], "response_ids": [[2], [3]],
        ...           "loss_masks": [[1], [1]], "rewards": [1.0, 0.0]}
        >>> reward_metrics(output, uids=["a", "a"], samples_per_prompt=2)["reward/avg_raw_reward"]
        0.5
    """
    table = _table(rows, uids, "reward_metrics")
    metrics = {}
    for prefix, chosen in _by_source("reward", data_sources, table):
        passed = np.zeros(int(table.group_ids.max()) + 1, dtype=bool)
        passed[table.group_ids[chosen & (table.rewards > PASS_THRESHOLD)]] = True
        groups = np.unique(table.group_ids[chosen])
        metrics[f"{prefix}/avg_raw_reward"] = mean(table.rewards[chosen])
        metrics[f"{prefix}/avg_pass_at_{samples_per_prompt}"] = mean(passed[groups])
        metrics[f"{prefix}/mean_positive_reward"] = mean(table.positive_rewards[chosen])
    return metrics


def reward_spread(batch: StepBatch, *, tolerance: float = 0.0) -> dict[str, float]:
    """Return the standard deviation of the trajectories' rewards, and the share of groups whose
    rewards are equal, so that they have no advantage.

    Args:
        batch: rows of at least one trajectory.
        tolerance: largest difference of rewards that count as equal.
    """
    table = outcomes_of_batch(batch)
    groups = int(table.group_ids.max()) + 1
    lowest, highest = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(lowest, table.group_ids, table.rewards)
    np.maximum.at(highest, table.group_ids, table.rewards)
    present = np.unique(table.group_ids)
    return {
        "reward/std_raw_reward": float(table.rewards.std()),
        "reward/zero_variance_share": mean((highest - lowest)[present] <= tolerance),
    }


def eval_metrics(
    rows: Mapping[str, Any] | StepBatch | Sequence[Trajectory],
    *,
    ks: Iterable[int] = (1,),
    uids: Sequence[str] | Sequence[int] | None = None,
    data_sources: Sequence[str | None] | None = None,
) -> dict[str, float]:
    """Return mean score, pass@k and mean positive reward of an evaluation, over trajectories.

    Args:
        rows: a valid generator output, a batch, or trajectories (then N is their number).
        ks: pass@k is the unbiased estimator of `pass_at_k`, averaged over groups; each k at most
            the smallest group.
        uids: N prompt names, if a generator output has no `trajectory_ids`.
        data_sources: N names; each gets its metrics under `eval/<name>/`, all rows under
            `eval/all/`.

    Raises:
        ValueError: a k below 1 or above the size of a group.
    """
    table = _table(rows, uids, "eval_metrics")
    metrics = {}
    for prefix, chosen in _by_source("eval", data_sources, table):
        name = "eval/all" if prefix == "eval" else prefix
        group = table.group_ids[chosen]
        size = np.bincount(group)
        passed = np.bincount(group, weights=table.rewards[chosen] > PASS_THRESHOLD)
        metrics[f"{name}/avg_score"] = mean(table.rewards[chosen])
        for k in ks:
            metrics[f"{name}/pass_at_{k}"] = mean(pass_at_k(size[size > 0], passed[size > 0], k))
        metrics[f"{name}/mean_positive_reward"] = mean(table.positive_rewards[chosen])
    return metrics


def pass_at_k(num_samples: np.ndarray, num_passed: np.ndarray, k: int) -> np.ndarray:
    """Return (G,) float64, the probability that one of k samples without replacement passes.

    1 - C(n - c, k) / C(n, k), unbiased, in contrast to 1 - (1 - c / n)^k: Chen et al. 2021,
    arXiv:2107.03374, section 2.1.

    Args:
        num_samples: (G,) n, samples of each group.
        num_passed: (G,) c, samples that passed.
        k: 1 to min(n).

    Example:
        >>> pass_at_k(np.array([4]), np.array([1]), 2)
        array([0.5])
    """
    n = np.asarray(num_samples, dtype=np.float64)
    c = np.asarray(num_passed, dtype=np.float64)
    if n.size and not 1 <= k <= n.min():
        raise ValueError(
            f"pass_at_k: k must be from 1 to the smallest group ({n.min():.0f}), got {k}"
        )
    draws = np.arange(k)[:, None]
    failing = np.clip(n - c - draws, 0.0, None) / (n - draws)  # the i-th draw fails too
    return 1.0 - failing.prod(axis=0)


def _table(
    rows: Mapping[str, Any] | StepBatch | Sequence[Trajectory],
    uids: Sequence[Any] | None,
    op: str,
) -> Outcomes:
    if isinstance(rows, StepBatch):
        return outcomes_of_batch(rows)
    if not isinstance(rows, Mapping):
        return outcomes_of_trajectories(rows)
    if uids is None and rows.get("trajectory_ids") is None:
        raise ValueError(f"{op}: uids must name each row's prompt where trajectory_ids is missing")
    return outcomes_of_output(rows, uids, op=op)


def _by_source(
    prefix: str, data_sources: Sequence[str | None] | None, table: Outcomes
) -> list[tuple[str, np.ndarray]]:
    """Return (name prefix, (J,) bool) for all trajectories and for those of each data source."""
    everything = [(prefix, np.ones(len(table.last_rows), dtype=bool))]
    if data_sources is None:
        return everything
    if len(data_sources) != len(table.trajectory_ids):
        raise ValueError(
            f"{prefix}_metrics: data_sources must have one entry per row "
            f"({len(table.trajectory_ids)}), got {len(data_sources)}"
        )
    sources = last_row_values(data_sources, table)
    # Sources whose names map to the same one are merged: "a/b" and "a_b" are both a_b.
    names = np.array([RENAMED_SOURCES.get(name, name).replace("/", "_") for name in sources])
    return everything + [(f"{prefix}/{name}", names == name) for name in np.unique(names).tolist()]
