"""Filters: zero reward on non-stop, overlong filter, overflowed summaries, zero-variance filter.

Each filter takes a batch and its sequences, and returns changed copies and metrics. N rows, U
sequences (rows or trajectories, see `sequence_scope`), A response tokens.

Design: docs/design/012-filters-and-scope.md.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import Config, sums_rewards
from skyrl_fast.rollout.stop_reason import LENGTH, STOP
from skyrl_fast.train.algorithm.sequence_scope import Sequences, group_spread, sequences

logger = logging.getLogger(__name__)

# The model ended its last response itself; running out of turns is the environment's limit.
FINISHED_REASONS = frozenset({"stop", "max_turns"})
OVERLONG_REASONS = frozenset({"length"})

# The batch and its sequences after the filter, and metrics.
Filtered = tuple[StepBatch, Sequences, dict[str, float]]


def filter_rollouts(batch: StepBatch, config: Config) -> Filtered:
    """Apply the generator's filters: zero reward on non-stop, then the overlong filter."""
    # They look at each sequence alone, so dynamic sampling can judge groups after them.
    scope = config.trainer.algorithm.sequence_scope
    units = sequences(batch, scope, sums_rewards=sums_rewards(config))
    metrics: dict[str, float] = {}
    if config.generator.zero_reward_on_non_stop:
        batch, units, counts = zero_reward_on_non_stop(batch, units)
        metrics |= counts
    if config.generator.apply_overlong_filtering:
        batch, units, counts = overlong_filter(batch, units)
        metrics |= counts
    if config.trainer.algorithm.mask_overflowed_summaries:
        batch, counts = mask_overflowed_summaries(batch)
        units = replace(units, live=units.live & sequences(batch, scope).live)
        metrics |= counts
    return batch, units, metrics


def filter_groups(batch: StepBatch, units: Sequences, config: Config) -> Filtered:
    """Apply the zero-variance filter if it is enabled; warn if nothing is left to train."""
    algorithm = config.trainer.algorithm
    metrics: dict[str, float] = {}
    if algorithm.zero_variance_filter:
        batch, units, metrics = zero_variance_filter(
            batch, units, tolerance=algorithm.zero_variance_filter_tol
        )
    # Not an error: a later batch may train again.
    if not bool(batch.loss_mask.any()):
        logger.warning(
            "no token of the batch's %d rows is trained: the loss is 0 and no weight changes",
            batch.num_rows,
        )
    return batch, units, metrics


def zero_reward_on_non_stop(batch: StepBatch, units: Sequences) -> Filtered:
    """Return the batch with reward 0 for every unfinished sequence.

    A sequence is unfinished if its last row's stop reason is neither "stop" nor "max_turns". All
    rewards of all its rows become 0, per row, per token and per part.

    Raises:
        ValueError: no stop reasons.
    """
    reasons = _reasons("zero_reward_on_non_stop", batch, units)
    cut = np.array([reason not in FINISHED_REASONS for reason in reasons], dtype=bool)
    # Reported as 0, too: a missing metric means that the filter is off.
    metrics = {"generate/num_zeroed_rewards": float(cut.sum())}
    if not cut.any():
        return batch, units, metrics
    rows = torch.from_numpy(cut[units.sequence_ids])
    # All forms, as estimators read rewards of tokens or of rows, or named parts.
    filtered = batch.with_(
        rewards=batch.rewards.masked_fill(_response_tokens(batch, rows), 0.0),
        row_rewards=batch.row_rewards.masked_fill(rows, 0.0),
    )
    if batch.reward_parts is not None:
        parts = batch.reward_parts.masked_fill(rows[:, None], 0.0)
        filtered = filtered.with_(reward_parts=parts)
    return filtered, replace(units, scores=np.where(cut, 0.0, units.scores)), metrics


def overlong_filter(batch: StepBatch, units: Sequences) -> Filtered:
    """Return the batch with the loss mask 0 in sequences that were truncated for their length.

    DAPO's overlong filtering (arXiv:2503.14476, section 3.4): a truncated answer is no evidence of
    its quality. A trajectory is truncated if its last row's stop reason is "length"; then all its
    rows are masked, the finished turns too. Rewards stay: they still count as outcomes in their
    groups.
    """
    reasons = _reasons("overlong_filter", batch, units)
    overlong = np.array([reason in OVERLONG_REASONS for reason in reasons], dtype=bool)
    metrics = {"generate/num_overlong_filtered": float(overlong.sum())}
    return *_mask_sequences(batch, units, overlong), metrics


def mask_overflowed_summaries(batch: StepBatch) -> tuple[StepBatch, dict[str, float]]:
    """Return the batch with the loss mask 0 where summaries went on beyond a limit; and metrics.

    That is: all rows of a trajectory that has a summary and did not end by itself, the rule of
    SUPO's overlong masking (arXiv:2510.06727), without which a policy may learn to summarise for
    ever; and a summary that was truncated. Rewards stay.

    Raises:
        ValueError: no stop reasons.
    """
    if batch.stop_reasons is None:
        raise ValueError("mask_overflowed_summaries: batch must have stop_reasons, got None")
    if batch.is_summary is None:
        return batch, {"generate/num_overflowed_filtered": 0.0}
    is_summary = batch.is_summary.numpy() != 0
    has_summary = batch.summary_rows.numpy()
    reasons = np.array(batch.stop_reasons)
    trajectory_ids = batch.trajectory_ids.numpy()
    summarised = np.bincount(trajectory_ids, weights=has_summary) > 0
    unfinished = reasons[batch.is_last_step.numpy()] != STOP
    overflowed = summarised & unfinished
    # A summary ends its context, and so its row.
    cut_rows = has_summary & (reasons == LENGTH)
    lengths = batch.response_lengths.numpy()
    masked = np.repeat(overflowed[trajectory_ids], lengths)
    masked |= is_summary & np.repeat(cut_rows, lengths)
    metrics = {"generate/num_overflowed_filtered": float(overflowed.sum())}
    if not masked.any():
        return batch, metrics
    return batch.with_(loss_mask=batch.loss_mask.masked_fill(torch.from_numpy(masked), 0)), metrics


def zero_variance_filter(batch: StepBatch, units: Sequences, *, tolerance: float = 0.0) -> Filtered:
    """Return the batch with the loss mask 0 in groups whose sequences all have the same score.

    Only sequences with a trained token are compared; a group with fewer than two of them is
    unchanged.

    Args:
        tolerance: largest difference between scores that count as equal.
    """
    groups = group_spread(units)
    # One live sequence is no comparison: its group stays.
    equal = (groups.num_live > 1) & (groups.spread <= tolerance)
    metrics = {"reward/num_zero_variance_filtered": float(equal.sum())}
    return *_mask_sequences(batch, units, equal[units.group_ids]), metrics


def _reasons(op: str, batch: StepBatch, units: Sequences) -> list[str]:
    if batch.stop_reasons is None:
        raise ValueError(f"{op}: batch must have stop_reasons, got None")
    return [batch.stop_reasons[row] for row in units.last_rows.tolist()]


def _response_tokens(batch: StepBatch, rows: torch.Tensor) -> torch.Tensor:
    """Return (A,) bool, True on the response tokens of these rows."""
    return torch.from_numpy(np.repeat(rows.numpy(), batch.response_lengths.numpy()))


def _mask_sequences(
    batch: StepBatch, units: Sequences, masked: np.ndarray
) -> tuple[StepBatch, Sequences]:
    """Return both with the loss mask 0 in the sequences of (U,) bool `masked`."""
    if not masked.any():
        return batch, units
    tokens = _response_tokens(batch, torch.from_numpy(masked[units.sequence_ids]))
    return (
        batch.with_(loss_mask=batch.loss_mask.masked_fill(tokens, 0)),
        replace(units, live=units.live & ~masked),
    )
