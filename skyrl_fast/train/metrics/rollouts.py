"""Metrics of rollouts, per trajectory and per turn. N rows, J trajectories, G groups.

A trajectory is one sample, whatever its number of steps: its reward is its last row's; earlier
steps are not samples with reward zero. Padding rows never count.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.row_index import dense_ids, row_index, row_lengths
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.ops import _backend, _ragged
from skyrl_fast.rollout.stop_reason import LENGTH
from skyrl_fast.rollout.trajectory import Trajectory

log = logging.getLogger(__name__)

MAX_WARNINGS = 20  # of metrics that are left out
_LEFT_OUT: set[str] = set()  # their names
PASS_THRESHOLD = 0.0  # a trajectory passes if its reward is larger
SLOW_PERCENTILE = 90  # of completion times
RENAMED_SOURCES = {None: "unknown", "": "unknown", "all": "all_"}  # eval/all/ covers all sources


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcome of each trajectory.

    Args:
        trajectory_ids: (N,) int32.
        last_rows: (J,) the last row of each trajectory.
        group_ids: (J,) int32.
        rewards: (J,) float64, sum of the last row's token rewards.
        positive_rewards: (J,) float64, sum of the last row's positive token rewards.
    """

    trajectory_ids: np.ndarray
    last_rows: np.ndarray
    group_ids: np.ndarray
    rewards: np.ndarray
    positive_rewards: np.ndarray

    def per_trajectory(self, per_row: np.ndarray) -> np.ndarray:
        """Return (J,) sums of a per-row array over each trajectory's rows."""
        return np.bincount(self.trajectory_ids, weights=per_row, minlength=len(self.last_rows))


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Tokens of each row, (N,) int64: of the prompt, of the response, and those trained."""

    prompt: np.ndarray
    response: np.ndarray
    trained: np.ndarray


def outcomes_of_output(
    output: Mapping[str, Any],
    uids: Sequence[str] | Sequence[int] | None = None,
    *,
    op: str = "outcomes_of_output",
) -> Outcomes:
    """Return the outcomes of the trajectories of a valid generator output.

    Args:
        output: a generator output.
        uids: N prompt names. None: from `trajectory_ids`; without these each row is a group.
        op: the caller's public name, for messages.
    """
    if uids is None and output.get("trajectory_ids") is None:
        uids = range(len(output["response_ids"]))
    index = row_index(op, output, uids)
    last_rows = np.flatnonzero(index.is_last_step)
    finals = list(compress(output["rewards"], index.is_last_step.tolist()))
    rewards, positive = _final_rewards(op, finals)
    return Outcomes(
        trajectory_ids=index.trajectory_ids,
        last_rows=last_rows,
        group_ids=index.group_ids[last_rows],
        rewards=rewards,
        positive_rewards=positive,
    )


def outcomes_of_trajectories(trajectories: Sequence[Trajectory]) -> Outcomes:
    """Return the outcomes of J trajectories, as if each had only its last row."""
    every = np.arange(len(trajectories), dtype=np.int32)
    last = [t.steps_or_placeholder()[-1] for t in trajectories]
    rewards = np.array([step.reward for step in last], dtype=np.float64)
    return Outcomes(
        trajectory_ids=every,
        last_rows=every,
        group_ids=dense_ids([t.uid for t in trajectories]).astype(np.int32),
        rewards=rewards,
        positive_rewards=np.maximum(rewards, 0.0),
    )


def outcomes_of_batch(batch: StepBatch) -> Outcomes:
    """Return the outcomes of the trajectories of a batch's real rows."""
    num_rows = batch.num_real_rows
    last_rows = np.flatnonzero(batch.is_last_step[:num_rows].numpy())
    rewards = batch.row_rewards[:num_rows].numpy()[last_rows].astype(np.float64)
    positive = np.maximum(rewards, 0.0)
    if batch.rewards.numel() and batch.rewards.numpy().min() < 0:
        tokens = batch.rewards.clamp(min=0).numpy()
        cu_responses = batch.cu_responses[: num_rows + 1].numpy()
        has_tokens = np.diff(cu_responses)[last_rows] > 0
        sums = segment_sums(tokens, cu_responses, np.float64)[last_rows]
        positive = np.where(has_tokens, sums, positive)
    return Outcomes(
        trajectory_ids=batch.trajectory_ids[:num_rows].numpy(),
        last_rows=last_rows,
        group_ids=batch.group_ids[:num_rows].numpy()[last_rows],
        rewards=rewards,
        positive_rewards=positive,
    )


def _sizes_of_output(output: Mapping[str, Any]) -> RowSizes:
    op = "rollout_metrics"
    masks, offsets = _flat_rows(op, "loss_masks", output["loss_masks"])
    return RowSizes(
        prompt=row_lengths(op, "prompt_token_ids", output["prompt_token_ids"]),
        response=row_lengths(op, "response_ids", output["response_ids"]),
        trained=segment_sums(masks, offsets, np.float64).astype(np.int64),
    )


def _sizes_of_batch(batch: StepBatch) -> RowSizes:
    num_rows = batch.num_real_rows
    cu_responses = batch.cu_responses[: num_rows + 1].numpy()
    responses = np.diff(cu_responses).astype(np.int64)
    return RowSizes(
        prompt=np.diff(batch.cu_seqlens[: num_rows + 1].numpy()) - responses,
        response=responses,
        trained=segment_sums(batch.loss_mask.numpy(), cu_responses, np.int64),
    )


def _flat_rows(op: str, field: str, rows: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return (S,) float32 values of all rows, read in one pass, and their (N + 1,) offsets."""
    read = _ragged.read_field(op, field, rows)
    offsets = _ragged.offsets(read.lengths)
    flat = _backend.empty((int(offsets[-1]),), torch.float32)
    _ragged.fill(op, _ragged.copy_jobs(read, flat, offsets[:-1]))
    return flat.numpy(), offsets.numpy()


def _final_rewards(op: str, finals: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    if finals and isinstance(finals[0], (float, int, np.number)):
        rewards = np.array(finals, dtype=np.float64)
        return rewards, np.maximum(rewards, 0.0)
    values, offsets = _flat_rows(op, "rewards", finals)
    totals = segment_sums(values, offsets, np.float64)
    return totals, segment_sums(np.maximum(values, 0.0), offsets, np.float64)


# --- rollout metrics ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reports:
    """Reports of J trajectories, other than their tokens; None if not available.

    Args:
        stop_reasons: J, the stop reason of each trajectory.
        seconds: J, from start to end.
        time_splits: name of a share of the time -> J seconds.
        env_metrics: J, metrics of the environments by name.
    """

    stop_reasons: Sequence[str] | None
    seconds: Sequence[float] | None
    time_splits: Mapping[str, Sequence[float]]
    env_metrics: Sequence[Mapping[str, Any] | None] | None


def rollout_metrics(
    output: Mapping[str, Any],
    *,
    uids: Sequence[str] | Sequence[int] | None = None,
    batch: StepBatch | None = None,
) -> dict[str, float]:
    """Return lengths, turns, stop reasons, times and environment metrics of the rollouts.

    `generate/...` is per trajectory, `generate/per_turn/...` per row. The tokens of a trajectory
    are those of all its responses; its final context is its last row's prompt and response.

    Args:
        output: a valid generator output.
        uids: N prompt names, if `trajectory_ids` is missing.
        batch: the batch of `output`, if it was built: avoids reading the lists again.
    """
    if batch is None:
        table = outcomes_of_output(output, uids, op="rollout_metrics")
        sizes = _sizes_of_output(output)
    else:
        table, sizes = outcomes_of_batch(batch), _sizes_of_batch(batch)

    def last_values(field: str) -> list[Any] | None:
        values = output.get(field)
        return None if values is None else _last_row_values(values, table)

    splits = output.get("trajectory_time_splits") or {}
    reports = Reports(
        stop_reasons=last_values("stop_reasons"),
        seconds=last_values("trajectory_generation_times"),
        time_splits={name: _last_row_values(values, table) for name, values in splits.items()},
        env_metrics=last_values("env_metrics"),
    )
    return _rollout_metrics(table, sizes, reports)


def trajectory_metrics(trajectories: Sequence[Trajectory], batch: StepBatch) -> dict[str, float]:
    """Return the metrics of `rollout_metrics` for trajectories.

    Args:
        trajectories: J.
        batch: their rows, one per step.
    """
    reports = Reports(
        stop_reasons=[t.stop_reason for t in trajectories],
        seconds=[t.seconds for t in trajectories],
        time_splits={
            "llm": [t.llm_seconds for t in trajectories],
            "env": [t.env_seconds for t in trajectories],
        },
        env_metrics=[t.env_metrics for t in trajectories],
    )
    return _rollout_metrics(outcomes_of_batch(batch), _sizes_of_batch(batch), reports)


def _rollout_metrics(table: Outcomes, sizes: RowSizes, reports: Reports) -> dict[str, float]:
    lengths = sizes.prompt + sizes.response
    tokens = table.per_trajectory(sizes.response)
    return {
        "generate/num_trajectories": float(len(table.last_rows)),
        "generate/num_empty_trajectories": float(np.count_nonzero(tokens == 0)),
        **_spread("generate/{}_num_tokens", tokens),
        "generate/avg_tokens_non_zero_rewards": _mean(tokens[table.rewards > 0]),
        "generate/avg_tokens_zero_rewards": _mean(tokens[table.rewards == 0]),
        **_spread("generate/{}_assistant_tokens", table.per_trajectory(sizes.trained)),
        **_spread("generate/{}_num_turns", np.bincount(table.trajectory_ids)),
        **_spread("generate/{}_final_context_length", lengths[table.last_rows]),
        **_spread("generate/per_turn/{}_response_length", sizes.response),
        **_spread("generate/per_turn/{}_prompt_length", sizes.prompt),
        **_spread("generate/per_turn/{}_num_tokens", lengths),
        **_stop_metrics(reports),
        **_time_metrics(reports),
        **_environment_metrics(reports),
    }


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        name.format("avg"): _mean(values),
        name.format("min"): float(values.min()),
        name.format("max"): float(values.max()),
        name.format("std"): float(values.std()),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def _last_row_values(values: Sequence[Any], table: Outcomes) -> list[Any]:
    return [values[row] for row in table.last_rows.tolist()]


def _stop_metrics(reports: Reports) -> dict[str, float]:
    if reports.stop_reasons is None:
        return {}
    counts = Counter(reports.stop_reasons)
    total = len(reports.stop_reasons)
    return {f"generate/stop_reason/{reason}": n / total for reason, n in sorted(counts.items())}


def _time_metrics(reports: Reports) -> dict[str, float]:
    metrics = {}
    if reports.seconds is not None:
        seconds = np.array(reports.seconds, dtype=np.float64)
        name = "generate/trajectory_completion_time"
        metrics[f"{name}_mean"] = _mean(seconds)
        metrics[f"{name}_p{SLOW_PERCENTILE}"] = float(np.percentile(seconds, SLOW_PERCENTILE))
        metrics[f"{name}_max"] = float(seconds.max())
    splits = {name: np.array(v, dtype=np.float64) for name, v in reports.time_splits.items()}
    total = sum(float(split.sum()) for split in splits.values())
    for name, split in splits.items():
        metrics[f"generate/trajectory_time/{name}_mean"] = _mean(split)
        metrics[f"generate/trajectory_time/{name}_share"] = (
            float(split.sum()) / total if total > 0 else 0.0
        )
    return metrics


def _environment_metrics(reports: Reports) -> dict[str, float]:
    """Return the mean of each finite number that is reported, over those that report one."""
    values: dict[str, list[float]] = {}
    for reported in reports.env_metrics or ():
        for name, value in (reported or {}).items():
            number = _as_float(value)
            if number is not None:
                values.setdefault(name, []).append(number)
            elif value is not None:
                _warn_of_metric(str(name), f"{value!r:.80}")
    return {f"environment/{name}": sum(v) / len(v) for name, v in values.items()}


def _as_float(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if not isinstance(value, (bool, int, float, np.number)):
        return None
    try:
        number = float(value)
    except (OverflowError, TypeError):  # a huge integer, a complex number
        return None
    return number if math.isfinite(number) else None


def _warn_of_metric(name: str, value: str) -> None:
    """Log that a metric's value has no part in the mean, once for each name."""
    if name not in _LEFT_OUT and len(_LEFT_OUT) < MAX_WARNINGS:
        _LEFT_OUT.add(name)
        log.warning("environment/%s: expected finite numbers, left out %s", name, value)


# --- reward and evaluation metrics --------------------------------------------------------------


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
        metrics[f"{prefix}/avg_raw_reward"] = _mean(table.rewards[chosen])
        metrics[f"{prefix}/avg_pass_at_{samples_per_prompt}"] = _mean(passed[groups])
        metrics[f"{prefix}/mean_positive_reward"] = _mean(table.positive_rewards[chosen])
    return metrics


def reward_spread(batch: StepBatch, *, tolerance: float = 0.0) -> dict[str, float]:
    """Return the standard deviation of the trajectories' rewards, and the share of groups whose
    rewards are equal, so that they have no advantage.

    Args:
        batch: real rows of at least one trajectory.
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
        "reward/zero_variance_share": _mean((highest - lowest)[present] <= tolerance),
    }


def prefix_cache_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of prompt tokens that were in the engine's prefix cache, if it is known."""
    steps = [s for t in trajectories for s in t.steps if s.num_cached_tokens is not None]
    total = sum(len(step.prompt_token_ids) for step in steps)
    cached = sum(step.num_cached_tokens or 0 for step in steps)
    return {"generate/prefix_cache_share": cached / total} if total else {}


def truncated_turn_share(trajectories: Sequence[Trajectory], max_generate_length: int) -> float:
    """Return the share of turns whose response was cut at the maximum length.

    A trajectory's last turn has the trajectory's stop reason, which is "length" also where the next
    prompt was too long; so the number of tokens counts as well.
    """
    turns = [step for trajectory in trajectories for step in trajectory.steps]
    cut = sum(
        step.stop_reason == LENGTH and len(step.response_ids) >= max_generate_length
        for step in turns
    )
    return cut / len(turns) if turns else 0.0


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
        metrics[f"{name}/avg_score"] = _mean(table.rewards[chosen])
        for k in ks:
            metrics[f"{name}/pass_at_{k}"] = _mean(pass_at_k(size[size > 0], passed[size > 0], k))
        metrics[f"{name}/mean_positive_reward"] = _mean(table.positive_rewards[chosen])
    return metrics


def pass_at_k(num_samples: np.ndarray, num_passed: np.ndarray, k: int) -> np.ndarray:
    """Return (G,) float64, the probability that one of k samples without replacement passes.

    1 - C(n - c, k) / C(n, k), unbiased, in contrast to 1 - (1 - c / n)^k: Chen et al. 2021,
    arXiv:2107.03374, section 2.1.

    Args:
        num_samples: (G,) n, samples of each group.
        num_passed: (G,) c, samples that passed.
        k: 1 to min(n).

    Raises:
        ValueError: k out of range.

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
    sources = _last_row_values(data_sources, table)
    # Sources whose names map to the same one are merged: "a/b" and "a_b" are both a_b.
    names = np.array([RENAMED_SOURCES.get(name, name).replace("/", "_") for name in sources])
    return everything + [(f"{prefix}/{name}", names == name) for name in np.unique(names).tolist()]


# --- batch metrics -----------------------------------------------------------------------------


def batch_metrics(
    batch: StepBatch, *, num_rows_before_merge: int | None = None
) -> dict[str, float]:
    """Return the size of the batch, and the share of padding if it were padded.

    Args:
        batch: N real rows of at most T tokens.
        num_rows_before_merge: rows before steps were merged; None: no metrics of merging.
    """
    num_rows = batch.num_real_rows
    cu_seqlens = batch.cu_seqlens[: num_rows + 1].numpy()
    lengths = np.diff(cu_seqlens)
    width = int(lengths.max()) if num_rows else 0
    cells = num_rows * width
    trained = float(batch.loss_mask.sum())
    metrics = {
        "generate/batch_num_seq": float(num_rows),
        "generate/batch_padded_seq_len": float(width),
        "generate/batch_num_tokens": float(lengths.sum()),
        "generate/batch_padding_share": 1.0 - float(lengths.sum()) / cells if cells else 0.0,
        "generate/batch_trained_share": trained / cells if cells else 0.0,
    }
    if num_rows_before_merge is not None:
        metrics["generate/num_seq_before_merge"] = float(num_rows_before_merge)
        metrics["generate/num_seq_after_merge"] = float(num_rows)
    return metrics
