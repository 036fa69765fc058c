"""Filters over sequences: tables by hand, then any batch against loops over rows."""

import logging
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from _rows import Row, batch_of, masks_of
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import Config
from skyrl_fast.train.algorithm import filters
from skyrl_fast.train.algorithm.advantages import compute_advantages
from skyrl_fast.train.algorithm.sequence_scope import group_spread, sequences

Result = tuple[StepBatch, dict[str, float]]


def applied(name: str, batch: StepBatch, *options: Any, scope: str = "trajectory") -> Result:
    """Apply a filter; the sequences it returns must be those of the batch it returns."""
    function = getattr(filters, name)
    filtered, units, metrics = function(batch, sequences(batch, scope), *options)
    for field, value in asdict(sequences(filtered, scope)).items():
        assert np.array_equal(getattr(units, field), value), field
    return filtered, metrics


def overlong_filter(batch: StepBatch, scope: str = "trajectory") -> Result:
    return applied("overlong_filter", batch, scope=scope)


def zero_reward_on_non_stop(batch: StepBatch, scope: str = "trajectory") -> Result:
    return applied("zero_reward_on_non_stop", batch, scope=scope)


def zero_variance_filter(
    batch: StepBatch, tolerance: float = 0.0, scope: str = "trajectory"
) -> Result:
    units = sequences(batch, scope)
    filtered, after, metrics = filters.zero_variance_filter(batch, units, tolerance=tolerance)
    assert np.array_equal(after.live, sequences(filtered, scope).live)
    return filtered, metrics


def filter_rollouts(batch: StepBatch, config: Config) -> Result:
    filtered, units, metrics = filters.filter_rollouts(batch, config)
    assert np.array_equal(units.scores, sequences(filtered, "trajectory").scores)
    return filtered, metrics


def filter_groups(batch: StepBatch, config: Config) -> Result:
    return applied("filter_groups", batch, config)


def two_turns_cut() -> StepBatch:
    """Trajectory 0 is truncated in its second turn; trajectory 1 in its first, but it finished."""
    return batch_of(
        Row("a", 0, 0.0, "stop"),
        Row("a", 0, 1.0, "length", "110"),
        Row("a", 1, 0.0, "length"),
        Row("a", 1, 1.0, "stop"),
        Row("b", 0, 1.0, "stop", "1"),
    )


# --- overlong ------------------------------------------------------------------------------------


@pytest.mark.spec("filter.order", "filter.overlong")
def test_overlong_masks_the_full_trajectory_by_its_last_row() -> None:
    batch, metrics = overlong_filter(two_turns_cut())
    assert masks_of(batch) == ["00", "000", "11", "11", "1"]
    assert metrics == {"generate/num_overlong_filtered": 1.0}
    assert batch.row_rewards.tolist() == [0, 1, 0, 1, 1]  # its outcome still counts in the group


@pytest.mark.spec("loss.sequence-scope")
def test_overlong_by_row_uses_each_row_separately() -> None:
    batch, metrics = overlong_filter(two_turns_cut(), scope="row")
    assert masks_of(batch) == ["11", "000", "00", "11", "1"]
    assert metrics == {"generate/num_overlong_filtered": 2.0}


# --- zero reward on non-stop ---------------------------------------------------------------------


@pytest.mark.spec("filter.zero-reward-on-non-stop")
def test_reward_of_an_unfinished_trajectory_is_zero_on_all_its_rows() -> None:
    batch = batch_of(
        Row("a", 0, [0.5, 0.5], "stop"),
        Row("a", 0, [0.25, 1.0], "length"),
        Row("a", 1, [0.0, 1.0], "stop"),
    )
    filtered, metrics = zero_reward_on_non_stop(batch)
    assert filtered.rewards.tolist() == [0, 0, 0, 0, 0, 1]
    assert filtered.row_rewards.tolist() == [0, 0, 1]
    assert metrics == {"generate/num_zeroed_rewards": 1.0}
    assert batch.rewards.tolist() == [0.5, 0.5, 0.25, 1, 0, 1]  # the given batch is unchanged


def test_reward_by_row() -> None:
    filtered, metrics = zero_reward_on_non_stop(
        batch_of(Row("a", 0, 1.0, "length"), Row("a", 0, 1.0, "stop")), scope="row"
    )
    assert filtered.row_rewards.tolist() == [0, 1]
    assert metrics == {"generate/num_zeroed_rewards": 1.0}


# --- zero variance -------------------------------------------------------------------------------


@pytest.mark.spec("filter.zero-variance")
def test_equal_outcomes_mask_the_group() -> None:
    batch, metrics = zero_variance_filter(
        batch_of(
            Row("a", 0, 0.0),  # a: two successes; the rewards of earlier rows are not outcomes
            Row("a", 0, 1.0),
            Row("a", 1, 1.0),
            Row("b", 0, 0.0),  # b: one of two
            Row("b", 0, 1.0),
            Row("b", 1, 0.0),
            Row("c", 0, 1.0),  # c: a single trajectory, nothing to compare
        )
    )
    assert masks_of(batch) == ["00", "00", "00", "11", "11", "11", "11"]
    assert metrics == {"reward/num_zero_variance_filtered": 1.0}


def test_rows_of_one_trajectory_have_variance_only_by_row() -> None:
    rows = [Row("a", 0, 0.0), Row("a", 0, 1.0), Row("a", 1, 0.0), Row("a", 1, 1.0)]
    assert masks_of(zero_variance_filter(batch_of(*rows))[0]) == ["00"] * 4
    assert masks_of(zero_variance_filter(batch_of(*rows), scope="row")[0]) == ["11"] * 4


@pytest.mark.spec("filter.zero-variance")
def test_rewards_on_tokens_are_filtered_by_their_sum() -> None:
    batch, _ = zero_variance_filter(
        batch_of(
            Row("a", 0, [0.5, 0.5]),
            Row("a", 1, [0.0, 1.0]),
            Row("b", 0, [0.5, 0.5]),
            Row("b", 1, [0.5, 0.0]),
        )
    )
    assert masks_of(batch) == ["00", "00", "11", "11"]


def test_tolerance() -> None:
    rows = [Row("a", 0, 0.5), Row("a", 1, 0.5000004)]
    assert masks_of(zero_variance_filter(batch_of(*rows))[0]) == ["11"] * 2
    assert masks_of(zero_variance_filter(batch_of(*rows), tolerance=1e-6)[0]) == ["00"] * 2


# --- together ------------------------------------------------------------------------------------


def config(**changes: bool) -> Config:
    made = Config()
    for name, value in changes.items():
        section = made.generator if hasattr(made.generator, name) else made.trainer.algorithm
        setattr(section, name, value)
    return made


def test_batch_is_unchanged_without_filters() -> None:
    batch = two_turns_cut()
    assert filter_rollouts(batch, config()) == (batch, {})
    assert filter_groups(batch, config()) == (batch, {})


@pytest.mark.spec("filter.order")
def test_filters_run_in_order_on_zeroed_rewards() -> None:
    # Cut and zeroed, trajectory 0 is masked, so that only 1 and 2 are compared: equal.
    rows = [Row("a", 0, 1.0, "length"), Row("a", 1, 0.0), Row("a", 2, 0.0)]
    settings = config(
        zero_reward_on_non_stop=True, apply_overlong_filtering=True, zero_variance_filter=True
    )
    batch, counts = filter_rollouts(batch_of(*rows), settings)
    assert masks_of(batch) == ["00", "11", "11"]
    assert counts == {"generate/num_zeroed_rewards": 1, "generate/num_overlong_filtered": 1}
    batch, counts = filter_groups(batch, settings)
    assert masks_of(batch) == ["00"] * 3
    assert counts == {"reward/num_zero_variance_filtered": 1}


@pytest.mark.spec("loss.all-masked-step")
def test_batch_without_trained_tokens_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        filter_groups(batch_of(Row("a", 0, 1.0), Row("a", 1, 1.0)), config())
        assert caplog.text == ""
        filter_groups(
            batch_of(Row("a", 0, 1.0), Row("a", 1, 1.0)), config(zero_variance_filter=True)
        )
    assert "no token of the batch's 2 rows is trained" in caplog.text


def test_filters_require_stop_reasons() -> None:
    batch = batch_of(Row("a", 0)).with_(stop_reasons=None)
    for function in (overlong_filter, zero_reward_on_non_stop):
        with pytest.raises(ValueError, match=f"{function.__name__}: batch must have stop_reasons"):
            function(batch)
    with pytest.raises(ValueError, match="scope: expected one of"):
        overlong_filter(batch, scope="group")


# --- random batches ------------------------------------------------------------------------------

row_facts = st.tuples(
    st.sampled_from([0.0, 1.0, 2.0]),
    st.sampled_from(["stop", "length", "max_turns", "env_error"]),
    st.sampled_from(["", "0", "1", "101", "000"]),
)
trajectories = st.lists(row_facts, min_size=1, max_size=4)
groups = st.lists(trajectories, min_size=1, max_size=4)
tables = st.lists(groups, min_size=1, max_size=4)


def rows_of(table: list) -> list[Row]:
    return [
        Row(f"g{g}", t, *fields)
        for g, group in enumerate(table)
        for t, trajectory in enumerate(group)
        for fields in trajectory
    ]


@given(tables)
def test_random_batches_by_trajectory(table: list) -> None:
    rows = rows_of(table)
    batch = batch_of(*rows)
    owners = [(row.group, row.repetition) for row in rows]
    last = {
        owner: list(members)[-1] for owner, members in groupby(rows, key=lambda r: (r[0], r[1]))
    }
    live = {owner: any("1" in r.mask for r in rows if (r[0], r[1]) == owner) for owner in last}

    want = [
        "0" * len(row.mask) if last[owner].stop == "length" else row.mask
        for row, owner in zip(rows, owners, strict=True)
    ]
    assert masks_of(overlong_filter(batch)[0]) == want

    finished = ("stop", "max_turns")
    want_rewards = [
        row.reward if last[owner].stop in finished else 0.0
        for row, owner in zip(rows, owners, strict=True)
    ]
    assert zero_reward_on_non_stop(batch)[0].row_rewards.tolist() == want_rewards

    scores: dict[str, list[float]] = {}
    for owner in last:
        if live[owner]:
            scores.setdefault(owner[0], []).append(float(last[owner].reward))
    alike = {g for g, values in scores.items() if len(values) > 1 and len(set(values)) == 1}
    want = ["0" * len(row.mask) if row.group in alike else row.mask for row in rows]
    filtered, metrics = zero_variance_filter(batch)
    assert masks_of(filtered) == want
    assert metrics["reward/num_zero_variance_filtered"] == len(alike)


@given(tables)
def test_scopes_agree_for_one_row_per_trajectory(table: list) -> None:
    rows = rows_of([[[trajectory[0]] for trajectory in group] for group in table])
    for function in (overlong_filter, zero_reward_on_non_stop, zero_variance_filter):
        one, two = (function(batch_of(*rows), scope=scope) for scope in ("row", "trajectory"))
        assert one[1] == two[1]
        assert torch.equal(one[0].loss_mask, two[0].loss_mask)
        assert torch.equal(one[0].row_rewards, two[0].row_rewards)


@given(tables)
def test_masking_does_not_change_other_advantages(table: list) -> None:
    batch = batch_of(*rows_of(table))
    filtered, _ = overlong_filter(batch)
    assert torch.equal(
        compute_advantages(batch).advantages, compute_advantages(filtered).advantages
    )


def test_sequences_of_a_batch() -> None:
    units = sequences(two_turns_cut(), "trajectory")
    assert units.sequence_ids.tolist() == [0, 0, 1, 1, 2]
    assert units.last_rows.tolist() == [1, 3, 4]
    assert units.group_ids.tolist() == [0, 0, 1]
    assert units.scores.tolist() == [1, 1, 1]
    assert units.live.tolist() == [True] * 3
    spread = group_spread(sequences(two_turns_cut(), "row"))
    assert spread.sizes.tolist() == [4, 1]
    assert spread.num_live.tolist() == [4, 1]
    assert spread.spread.tolist() == [1, 0]
