"""What was sampled: tokens, turns, times and stop reasons. N rows, J trajectories."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.batch.token_counts import token_counts
from skyrl_fast.rollout.stop_reason import LENGTH
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.metrics.outcomes import mean, outcomes_of_batch

log = logging.getLogger(__name__)

MAX_WARNINGS = 20  # warnings about metrics that are left out
_LEFT_OUT: set[str] = set()  # their names
SLOW_PERCENTILE = 90  # percentile of completion times


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Tokens of each row, (N,) int64: of the prompt, of the response, and those trained."""

    prompt: np.ndarray
    response: np.ndarray
    trained: np.ndarray


def _sizes_of_batch(batch: StepBatch) -> RowSizes:
    cu_responses = batch.cu_responses.numpy()
    responses = np.diff(cu_responses).astype(np.int64)
    return RowSizes(
        prompt=np.diff(batch.cu_seqlens.numpy()) - responses,
        response=responses,
        trained=segment_sums(batch.loss_mask.numpy(), cu_responses, np.int64),
    )


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


def trajectory_metrics(
    trajectories: Sequence[Trajectory], batch: StepBatch, *, sums_rewards: bool = False
) -> dict[str, float]:
    """Return the metrics of `rollout_metrics`; `batch` has the trajectories' steps as rows."""
    reports = Reports(
        stop_reasons=[t.stop_reason for t in trajectories],
        seconds=[t.seconds for t in trajectories],
        time_splits={
            "llm": [t.llm_seconds for t in trajectories],
            "env": [t.env_seconds for t in trajectories],
        },
        env_metrics=[t.env_metrics for t in trajectories],
    )
    return rollout_metrics(batch, reports, sums_rewards=sums_rewards)


def rollout_metrics(
    batch: StepBatch, reports: Reports, *, sums_rewards: bool = False
) -> dict[str, float]:
    """Return lengths, turns, stop reasons, times and environment metrics of the rollouts.

    `generate/...` is per trajectory, `generate/per_turn/...` per row. The tokens of a trajectory
    are those of all its responses; its final context is its last row's prompt and response.

    Args:
        sums_rewards: a trajectory's reward is the sum of its rows', not its last row's.
    """
    table = outcomes_of_batch(batch, sums_rewards=sums_rewards)
    sizes = _sizes_of_batch(batch)
    lengths = sizes.prompt + sizes.response
    tokens = table.per_trajectory(sizes.response)
    return {
        "generate/num_trajectories": float(len(table.last_rows)),
        "generate/num_empty_trajectories": float(np.count_nonzero(tokens == 0)),
        **_spread("generate/{}_num_tokens", tokens),
        "generate/avg_tokens_non_zero_rewards": mean(tokens[table.rewards > 0]),
        "generate/avg_tokens_zero_rewards": mean(tokens[table.rewards == 0]),
        **_spread("generate/{}_assistant_tokens", table.per_trajectory(sizes.trained)),
        **_spread("generate/{}_num_turns", _num_turns(batch, table.trajectory_ids)),
        **_spread("generate/{}_final_context_length", lengths[table.last_rows]),
        **_spread("generate/per_turn/{}_response_length", sizes.response),
        **_spread("generate/per_turn/{}_prompt_length", sizes.prompt),
        **_spread("generate/per_turn/{}_num_tokens", lengths),
        **_stop_metrics(reports),
        **_time_metrics(reports),
        **environment_metrics(reports.env_metrics or ()),
    }


def _num_turns(batch: StepBatch, trajectory_ids: np.ndarray) -> np.ndarray:
    """Return (J,) numbers of turns: rows but for summaries."""
    summaries = np.bincount(trajectory_ids, weights=batch.summary_rows.numpy())
    return np.bincount(trajectory_ids) - summaries.astype(np.int64)


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        name.format("avg"): mean(values),
        name.format("min"): float(values.min()),
        name.format("max"): float(values.max()),
        name.format("std"): float(values.std()),
    }


def _stop_metrics(reports: Reports) -> dict[str, float]:
    if reports.stop_reasons is None:
        return {}
    counts = Counter(reports.stop_reasons)
    total = len(reports.stop_reasons)
    result: dict[str, float] = {}
    for reason, n in sorted(counts.items()):
        result[f"generate/stop_reason/{reason}"] = n / total
    return result


def _time_metrics(reports: Reports) -> dict[str, float]:
    metrics = {}
    if reports.seconds is not None:
        seconds = np.array(reports.seconds, dtype=np.float64)
        name = "generate/trajectory_completion_time"
        metrics[f"{name}_mean"] = mean(seconds)
        metrics[f"{name}_p{SLOW_PERCENTILE}"] = float(np.percentile(seconds, SLOW_PERCENTILE))
        metrics[f"{name}_max"] = float(seconds.max())
    splits = {name: np.array(v, dtype=np.float64) for name, v in reports.time_splits.items()}
    total = sum(float(split.sum()) for split in splits.values())
    for name, split in splits.items():
        metrics[f"generate/trajectory_time/{name}_mean"] = mean(split)
        metrics[f"generate/trajectory_time/{name}_share"] = (
            float(split.sum()) / total if total > 0 else 0.0
        )
    return metrics


def environment_metrics(
    reports: Iterable[Mapping[str, Any] | None], *, prefix: str = ""
) -> dict[str, float]:
    """Return the mean of each finite number that is reported, over those that report one.

    Args:
        reports: what the environment of each trajectory has reported, named parts of rewards among
            it.
        prefix: of the names, before `environment/`.
    """
    values: dict[str, list[float]] = {}
    for reported in reports:
        for name, value in (reported or {}).items():
            number = _as_float(value)
            if number is not None:
                values.setdefault(name, []).append(number)
            elif value is not None:
                _warn_of_metric(str(name), f"{value!r:.80}")
    return {f"{prefix}environment/{name}": sum(v) / len(v) for name, v in values.items()}


def _as_float(value: Any) -> float | None:
    if not isinstance(value, (bool, int, float, np.number)):
        return None
    try:
        number = float(value)
    except (OverflowError, TypeError):  # a huge integer, a complex number
        return None
    return number if math.isfinite(number) else None


def _warn_of_metric(name: str, value: str) -> None:
    # An environment may report thousands of names.
    if name not in _LEFT_OUT and len(_LEFT_OUT) < MAX_WARNINGS:
        _LEFT_OUT.add(name)
        log.warning("environment/%s: expected finite numbers, left out %s", name, value)


def prefix_cache_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of prompt tokens that were in the engine's prefix cache, if it is known."""
    steps = []
    for t in trajectories:
        for s in t.steps:
            if s.num_cached_tokens is not None:
                steps.append(s)
    total = sum(len(step.prompt_token_ids) for step in steps)
    cached = sum(step.num_cached_tokens or 0 for step in steps)
    if total:
        return {"generate/prefix_cache_share": cached / total}
    return {}


def truncation_metrics(
    trajectories: Sequence[Trajectory], max_generate_length: int
) -> dict[str, float]:
    """Return the shares of turns cut at the maximum length, and of prompts that were too long."""
    # A trajectory's last turn has the trajectory's stop reason, which is "length" also where the
    # next prompt was too long; so the number of tokens counts as well.
    num_turns = sum(len(trajectory.steps) for trajectory in trajectories)
    ended_by_length = [t for t in trajectories if t.stop_reason == LENGTH]
    cut = sum(
        step.stop_reason == LENGTH and len(step.response_ids) >= max_generate_length
        for trajectory in trajectories
        for step in trajectory.steps
    )
    too_long = sum(
        not trajectory.steps or len(trajectory.steps[-1].response_ids) < max_generate_length
        for trajectory in ended_by_length
    )
    return {
        "generate/truncated_turn_share": cut / num_turns if num_turns else 0.0,
        "generate/too_long_prompt_share": too_long / len(trajectories) if trajectories else 0.0,
    }


def batch_metrics(
    batch: StepBatch, *, num_rows_before_merge: int | None = None
) -> dict[str, float]:
    """Return the size of the batch by form of its rows, and the share of padding if padded."""
    num_rows = batch.num_rows
    lengths = batch.lengths.numpy()
    if num_rows:
        width = int(lengths.max())
    else:
        width = 0
    cells = num_rows * width
    trained = float(np.count_nonzero(batch.loss_mask.numpy()))  # uint8: faster than torch's sum
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
    tokens = token_counts(batch)
    metrics["generate/batch_num_tokens_merged"] = float(tokens.merged)
    metrics["generate/batch_num_tokens_tree"] = float(tokens.tree)
    if cells:
        metrics["generate/batch_token_saving"] = 1 - tokens.tree / int(lengths.sum())
    return metrics
