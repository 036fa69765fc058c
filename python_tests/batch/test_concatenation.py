"""Concatenated batches, and rows reused from dynamic sampling, equal those built at once."""

from itertools import groupby

import pytest
import torch
from _rows import Row, assert_same, batch_of
from _stored import make_step, make_trajectory, some_trajectories
from hypothesis import assume, given
from hypothesis import strategies as st

from skyrl_fast.batch import StepBatch, batch_from_trajectories, concatenate
from skyrl_fast.config import Config
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.algorithm.training_rows import GroupRows, join_groups
from skyrl_fast.train.metrics.rollouts import trajectory_metrics
from skyrl_fast.train.prepare_batch import build_rows, training_batch


def by_group(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    return [list(group) for _, group in groupby(trajectories, key=lambda t: t.uid)]


def test_rows_by_hand() -> None:
    joined = concatenate(
        [
            batch_of(Row("a", 0, 0.0), Row("a", 0, 1.0, "length", "10"), Row("a", 1, 0.5)),
            batch_of(Row("b", 0, 0.25, "stop", "1")),
        ]
    )
    assert joined.cu_responses.tolist() == [0, 2, 4, 6, 7]
    assert joined.cu_seqlens.tolist() == [0, 4, 8, 12, 15]
    assert joined.loss_mask.tolist() == [1, 1, 1, 0, 1, 1, 1]
    assert joined.row_rewards.tolist() == [0.0, 1.0, 0.5, 0.25]
    assert joined.group_ids.tolist() == [0, 0, 0, 1]
    assert joined.trajectory_ids.tolist() == [0, 0, 1, 2]
    assert joined.uids == ("a", "b")
    assert joined.stop_reasons == ("stop", "length", "stop", "stop")


@pytest.mark.spec("metrics.several-groups")
@given(some_trajectories())
def test_concatenated_group_batches_equal_the_batch_of_all(trajectories: list[Trajectory]) -> None:
    try:
        batch = batch_from_trajectories(trajectories)
    except ValueError:
        return  # log-probabilities in some steps only
    joined = concatenate([batch_from_trajectories(group) for group in by_group(trajectories)])
    assert_same(joined, batch)
    metrics = trajectory_metrics(trajectories, joined)
    assert metrics == trajectory_metrics(trajectories, batch)


@given(some_trajectories(), st.booleans(), st.data())
def test_rows_of_filtered_batches_equal_those_of_their_trajectories(
    trajectories: list[Trajectory], merge: bool, data: st.DataObject
) -> None:
    """Select groups of several filtered batches, with copies under other uids."""
    config = Config()
    config.trainer.rows = "merged" if merge else "step"
    groups = by_group(trajectories)
    cut = data.draw(st.integers(0, len(groups)))
    try:
        build_rows(trajectories, config)
        parts = [p for p in (groups[:cut], groups[cut:]) if p]
        judged = [build_rows([t for group in part for t in group], config) for part in parts]
    except ValueError:
        return
    places = [GroupRows(rows, i) for rows, part in zip(judged, parts, strict=True)
              for i in range(len(part))]  # fmt: skip
    chosen = data.draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=6))
    names = [f"{place}: {number}" for place, number in enumerate(chosen)]
    kept = []
    for name, number in zip(names, chosen, strict=True):
        kept += [
            make_trajectory(name, t.repetition_id, t.steps, stop_reason=t.stop_reason,
                            failure=t.failure, seconds=t.seconds, env_metrics=t.env_metrics)
            for t in groups[number]
        ]  # fmt: skip
    # Without response tokens it is unknown whether the engine returned log-probabilities.
    assume(any(step.response_ids for t in kept for step in t.steps_or_placeholder()))
    joined = join_groups({n: places[i] for n, i in zip(names, chosen, strict=True)})
    wanted = build_rows(kept, config)
    assert_same(joined.steps, wanted.steps)
    assert (joined.merged is None) == (wanted.merged is None) == (not merge)
    assert_same(joined.trained, wanted.trained)
    one, other = training_batch(kept, config, joined), training_batch(kept, config)
    assert_same(one[0], other[0])
    assert one[2] == other[2]


@pytest.mark.parametrize("known", [False, True])
def test_observations_of_empty_answers_have_the_log_probabilities_of_the_others(
    known: bool,
) -> None:
    config = Config()
    config.trainer.rows = "merged"
    empty = make_trajectory("a", 0, [make_step([0], []), make_step([0, 5], [])])
    answer = make_step([1], [2], rollout_logprobs=[-0.5] if known else None)
    other = make_trajectory("b", 0, [answer])
    parts = [build_rows([one], config).trained for one in (empty, other)]
    joined, wanted = concatenate(parts), build_rows([empty, other], config).trained
    assert_same(joined, wanted)
    assert (joined.rollout_logprobs is not None) == known


def test_untrained_batch_gets_float32_whatever_the_default_dtype() -> None:
    one, other = batch_of(Row("a", 0)), batch_of(Row("b", 0))
    untrained = other.with_(rollout_logprobs=None, loss_mask=other.loss_mask * 0)
    torch.set_default_dtype(torch.float64)
    try:
        joined = concatenate([one, untrained])
    finally:
        torch.set_default_dtype(torch.float32)
    assert one.rollout_logprobs is not None
    wanted = one.rollout_logprobs.tolist() + [0.0] * len(other.loss_mask)
    assert joined.rollout_logprobs.tolist() == wanted


def test_unchanged_batch_is_not_copied() -> None:
    trajectories = [make_trajectory(uid, 0, [make_step([1], [2])]) for uid in "abc"]
    rows = build_rows(trajectories, Config())
    joined = join_groups({uid: GroupRows(rows, i) for i, uid in enumerate("abc")})
    assert joined.steps.tokens.data_ptr() == rows.steps.tokens.data_ptr()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches: expected at least one, got none"),
        ([batch_of(Row("a", 0)), batch_of(Row("a", 1))], "got 'a' in two batches"),
        (
            [batch_of(Row("a", 0)), batch_of(Row("b", 0)).with_(rollout_logprobs=None)],
            "rollout_logprobs: expected it in all batches or in none",
        ),
        (
            [batch_of(Row("a", 0)), batch_of(Row("b", 0)).with_(stop_reasons=None)],
            "stop_reasons: expected them in all batches or in none",
        ),
    ],
)
def test_incompatible_batches_are_refused(batches: list[StepBatch], message: str) -> None:
    with pytest.raises(ValueError, match=f"concatenate: .*{message}"):
        concatenate(batches)
