"""What leaves rewards and tokens out of training (section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from reference.rows import Row

RowSequence = list[Row]
FINISHED = ("stop", "max_turns")


def sequences_of(rows: Sequence[Row], scope: str) -> list[RowSequence]:
    """Return the sequences: rows, or trajectories."""
    if scope == "row":
        return [[row] for row in rows]
    return [list(own) for _, own in groupby(rows, key=lambda row: row.trajectory)]


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each prompt."""
    return [list(own) for _, own in groupby(rows, key=lambda row: row.uid)]


def score_of(sequence: RowSequence, *, sums_rewards: bool) -> float:
    if sums_rewards:
        return sum(row.reward for row in sequence)
    return sequence[-1].reward


def apply_rollout_filters(rows: Sequence[Row], config: Any) -> dict[str, float]:
    """Set rewards of unfinished sequences to 0, mask the overlong; return how many, by metric."""
    counts: dict[str, float] = {}
    sequences = sequences_of(rows, config.trainer.algorithm.sequence_scope)
    if config.generator.zero_reward_on_non_stop:
        unfinished = [one for one in sequences if one[-1].stop not in FINISHED]
        counts["generate/num_zeroed_rewards"] = float(len(unfinished))
        for sequence in unfinished:
            for row in sequence:
                row.leading = row.trailing = 0.0
                row.rewards = [0.0] * len(row.rewards)
                row.reported = {}
    if config.generator.apply_overlong_filtering:
        overlong = [one for one in sequences if one[-1].stop == "length"]
        counts["generate/num_overlong_filtered"] = float(len(overlong))
        for sequence in overlong:
            _mask(sequence)
    if config.trainer.algorithm.mask_overflowed_summaries:
        overflowed = 0
        for own in sequences_of(rows, "trajectory"):
            if own[-1].stop != "stop" and any(any(row.is_summary) for row in own):
                overflowed += 1
                _mask(own)
            for row in own:
                if row.stop == "length" and any(row.is_summary):
                    row.mask = [
                        trained * (not summary)
                        for trained, summary in zip(row.mask, row.is_summary, strict=True)
                    ]
        counts["generate/num_overflowed_filtered"] = float(overflowed)
    return counts


def is_informative(group: Sequence[Row], config: Any, *, sums_rewards: bool) -> bool:
    """Return whether the live sequences' scores differ, or one sequence was sampled only."""
    if len(sequences_of(group, config.trainer.algorithm.sequence_scope)) == 1:
        return True
    scores = _live_scores(group, config, sums_rewards=sums_rewards)
    return bool(scores) and not _are_equal(scores, config)


def apply_zero_variance_filter(
    rows: Sequence[Row], config: Any, *, sums_rewards: bool
) -> dict[str, float]:
    """Mask groups whose scores are equal; return how many."""
    if not config.trainer.algorithm.zero_variance_filter:
        return {}
    masked = 0
    for group in groups_of(rows):
        scores = _live_scores(group, config, sums_rewards=sums_rewards)
        if len(scores) > 1 and _are_equal(scores, config):
            _mask(group)
            masked += 1
    return {"reward/num_zero_variance_filtered": float(masked)}


def _live_scores(group: Sequence[Row], config: Any, *, sums_rewards: bool) -> list[float]:
    sequences = sequences_of(group, config.trainer.algorithm.sequence_scope)
    return [
        score_of(sequence, sums_rewards=sums_rewards)
        for sequence in sequences
        if any(row.is_live for row in sequence)
    ]


def _are_equal(scores: Sequence[float], config: Any) -> bool:
    return max(scores) - min(scores) <= config.trainer.algorithm.zero_variance_filter_tol


def _mask(rows: Sequence[Row]) -> None:
    for row in rows:
        row.mask = [0] * len(row.mask)
