"""Sequences of a batch: rows or trajectories. N rows, U sequences, G groups.

Design: docs/design/012-filters-and-scope.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.config import SCOPES


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a batch. Filters return them updated along with the batch.

    Args:
        sequence_ids: (N,) int64, the sequence of each row.
        last_rows: (U,) int64, the row that ends each sequence.
        group_ids: (U,) int64.
        scores: (U,) float64, the outcome: the reward of the last row, or of all rows.
        live: (U,) bool, whether any token of the sequence is trained.
        num_groups: G.
    """

    sequence_ids: np.ndarray
    last_rows: np.ndarray
    group_ids: np.ndarray
    scores: np.ndarray
    live: np.ndarray
    num_groups: int


def sequences(batch: StepBatch, scope: str, *, sums_rewards: bool = False) -> Sequences:
    """Return the sequences of the rows, which are adjacent per trajectory, in one of `SCOPES`.

    With `sums_rewards` the outcome of a trajectory is the sum of its rows' rewards.
    """
    if scope not in SCOPES:
        raise ValueError(f"sequences: scope: expected one of {SCOPES}, got {scope!r}")
    if scope == "row":
        sequence_ids = last_rows = np.arange(batch.num_rows)
    else:
        # Dense from 0 in a batch, so that they index arrays.
        sequence_ids = batch.trajectory_ids.numpy().astype(np.int64)
        last_rows = np.flatnonzero(batch.is_last_step.numpy())
    rewards = batch.row_rewards.numpy().astype(np.float64)
    if sums_rewards:
        scores = np.bincount(sequence_ids, weights=rewards)
    else:
        scores = rewards[last_rows]
    trained = segment_sums(batch.loss_mask.numpy(), batch.cu_responses.numpy(), np.int64)
    return Sequences(
        sequence_ids=sequence_ids,
        last_rows=last_rows,
        group_ids=batch.group_ids.numpy()[last_rows].astype(np.int64),
        scores=scores,
        live=np.bincount(sequence_ids, weights=trained, minlength=len(last_rows)) > 0,
        num_groups=batch.num_groups,
    )


@dataclass(frozen=True, slots=True)
class GroupSpread:
    """Spread of the outcomes of each group's live sequences.

    Args:
        sizes: (G,) int64, sequences of each group.
        num_live: (G,) int64, those with a trained token.
        spread: (G,) float64, largest minus smallest score of the live ones; 0 without any.
    """

    sizes: np.ndarray
    num_live: np.ndarray
    spread: np.ndarray


def group_spread(units: Sequences) -> GroupSpread:
    # Sequences without a trained token (placeholders of failed trajectories, or masked by a filter)
    # are not compared: they are not outcomes of the policy.
    most = np.full(units.num_groups, -np.inf)
    least = np.full(units.num_groups, np.inf)
    group = units.group_ids[units.live]
    scores = units.scores[units.live]
    np.maximum.at(most, group, scores)
    np.minimum.at(least, group, scores)
    num_live = np.bincount(group, minlength=units.num_groups)
    return GroupSpread(
        sizes=np.bincount(units.group_ids, minlength=units.num_groups),
        num_live=num_live,
        spread=np.where(num_live > 0, most - least, 0.0),
    )
