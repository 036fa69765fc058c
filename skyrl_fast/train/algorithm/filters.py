"""Filters: zero reward on non-stop, overlong filter, zero-variance filter.

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
    rewards of all its rows become 0, per row and per token.

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
    # Both forms, as estimators read rewards of tokens or of rows.
    filtered = batch.with_(
        rewards=batch.rewards.masked_fill(_response_tokens(batch, rows), 0.0),
        row_rewards=batch.row_rewards.masked_fill(rows, 0.0),
    )
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
