"""What is left out of training: rewards of unfinished, masks of overlong, groups that are alike.

Each filter takes a batch and returns a changed copy with what to log. N real rows, U sequences (by
`scope`: rows or trajectories), A response tokens.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import Config
from skyrl_fast.train.sequence_scope import Sequences, group_spread, sequences

logger = logging.getLogger(__name__)

# The model ended its last answer by itself; that the turns were used up is the environment's limit.
FINISHED_REASONS = frozenset({"stop", "max_turns"})
OVERLONG_REASONS = frozenset({"length"})

Filtered = tuple[StepBatch, dict[str, float]]


def filter_rollouts(batch: StepBatch, config: Config) -> Filtered:
    """Apply the generator's filters: zero reward on non-stop, then the overlong filter.

    They look at one sequence alone, so that dynamic sampling can judge what they leave.
    """
    generator, scope = config.generator, config.trainer.algorithm.sequence_scope
    metrics: dict[str, float] = {}
    if generator.zero_reward_on_non_stop:
        batch, counts = zero_reward_on_non_stop(batch, scope=scope)
        metrics |= counts
    if generator.apply_overlong_filtering:
        batch, counts = overlong_filter(batch, scope=scope)
        metrics |= counts
    return batch, metrics


def filter_groups(batch: StepBatch, config: Config) -> Filtered:
    """Apply the zero-variance filter where it is on; warn where nothing is left to train."""
    algorithm = config.trainer.algorithm
    metrics: dict[str, float] = {}
    if algorithm.zero_variance_filter:
        batch, metrics = zero_variance_filter(
            batch, tolerance=algorithm.zero_variance_filter_tol, scope=algorithm.sequence_scope
        )
    if not bool(batch.loss_mask.any()):
        logger.warning(
            "no token of the batch's %d rows is trained: the loss is 0, the weights stay",
            batch.num_real_rows,
        )
    return batch, metrics


def zero_reward_on_non_stop(batch: StepBatch, *, scope: str = "trajectory") -> Filtered:
    """Return the batch with reward 0 for every sequence that did not come to its own end.

    Its last row's stop reason says so: neither "stop" nor "max_turns". All rewards of all its rows
    become 0, also those that lie on single tokens.

    Args:
        batch: with stop reasons.
        scope: "row" or "trajectory".

    Returns:
        The batch, and `generate/num_zeroed_rewards`: sequences that were not finished.

    Raises:
        ValueError: no stop reasons, or an unknown scope.
    """
    units = sequences(batch, scope)
    reasons = _reasons("zero_reward_on_non_stop", batch, units)
    cut = np.array([reason not in FINISHED_REASONS for reason in reasons], dtype=bool)
    metrics = {"generate/num_zeroed_rewards": float(cut.sum())}
    if not cut.any():
        return batch, metrics
    rows = _all_rows(batch, cut[units.of_row])
    return batch.with_(
        rewards=batch.rewards.masked_fill(_cells(batch, rows), 0.0),
        row_rewards=batch.row_rewards.masked_fill(rows, 0.0),
    ), metrics


def overlong_filter(batch: StepBatch, *, scope: str = "trajectory") -> Filtered:
    """Return the batch without trained tokens in sequences that were cut for their length.

    DAPO's overlong filtering (arXiv:2503.14476, section 3.4): a cut-off answer says nothing about
    its quality. A trajectory is cut where its last row's stop reason is "length"; then all its
    rows are masked, the finished turns too. Rewards stay: it still is an outcome of its group.

    Args:
        batch: with stop reasons.
        scope: "row" or "trajectory".

    Returns:
        The batch, and `generate/num_overlong_filtered`: sequences masked.

    Raises:
        ValueError: no stop reasons, or an unknown scope.
    """
    units = sequences(batch, scope)
    reasons = _reasons("overlong_filter", batch, units)
    overlong = np.array([reason in OVERLONG_REASONS for reason in reasons], dtype=bool)
    metrics = {"generate/num_overlong_filtered": float(overlong.sum())}
    return _without(batch, _all_rows(batch, overlong[units.of_row])), metrics


def zero_variance_filter(
    batch: StepBatch, *, tolerance: float = 0.0, scope: str = "trajectory"
) -> Filtered:
    """Return the batch without trained tokens in groups whose sequences all scored the same.

    A sequence's score is the sum of its last row's rewards, whether they lie on tokens or on the
    row. Only sequences with a trained token are compared; a group with fewer than two of them has
    nothing to compare and stays.

    Args:
        batch: whole groups.
        tolerance: scores that differ by no more are equal.
        scope: "row" or "trajectory".

    Returns:
        The batch, and `reward/num_zero_variance_filtered`: groups masked.

    Raises:
        ValueError: an unknown scope.
    """
    groups = group_spread(batch, scope)
    alike = (groups.num_live > 1) & (groups.spread <= tolerance)
    metrics = {"reward/num_zero_variance_filtered": float(alike.sum())}
    rows = alike[batch.group_ids.numpy()]
    return _without(batch, torch.from_numpy(rows)), metrics


def _reasons(op: str, batch: StepBatch, units: Sequences) -> list[str]:
    if batch.stop_reasons is None:
        raise ValueError(f"{op}: batch must have stop_reasons, got None")
    return [batch.stop_reasons[row] for row in units.last_rows.tolist()]


def _all_rows(batch: StepBatch, real: np.ndarray) -> torch.Tensor:
    """Return (N with padding rows,) bool from (N,) of the real rows."""
    padding = np.zeros(batch.num_padding_rows, dtype=bool)
    return torch.from_numpy(np.concatenate([real, padding]))


def _cells(batch: StepBatch, rows: torch.Tensor) -> torch.Tensor:
    """Return (A,) bool, True on the response tokens of these rows."""
    lengths = batch.response_lengths.to(torch.int64)
    return torch.repeat_interleave(rows, lengths, output_size=batch.loss_mask.shape[0])


def _without(batch: StepBatch, rows: torch.Tensor) -> StepBatch:
    if not bool(rows.any()):
        return batch
    return batch.with_(loss_mask=batch.loss_mask.masked_fill(_cells(batch, rows), 0))
