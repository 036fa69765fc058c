"""Batches and metrics from trajectories equal those from SkyRL's generator output."""

import logging
from typing import Any

import numpy as np
import pytest
from _rows import assert_same, step_wise_metrics
from _stored import make_step, make_trajectory, some_trajectories
from hypothesis import given

from skyrl_fast.adapters.generator_output import generator_output_from_trajectories
from skyrl_fast.batch import StepBatch, batch_from_trajectories
from skyrl_fast.rollout.token_ids import TokenIds
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.metrics.rollouts import trajectory_metrics


def one_step(uid: str, repetition: int, **values: Any) -> Trajectory:
    return make_trajectory(uid, repetition, [make_step([1, 2], [3, 4], **values)])


def test_rows_by_hand() -> None:
    """Two steps, a failed trajectory that has one step, and one without steps."""
    first = make_step([7], [8, 9], loss_mask=[1, 0], policy_version=3)
    last = make_step([7, 8, 9, 5], [6], reward=0.5, policy_version=4)
    failed = make_step([7], [1], reward=9.0, policy_version=2)
    batch = batch_from_trajectories(
        [
            make_trajectory("a", 0, [first, last], stop_reason="max_turns"),
            make_trajectory("a", 1, [failed], failure="the engine went away", stop_reason="error"),
            make_trajectory("b", 0, [], stop_reason="length"),
        ]
    )
    assert batch.tokens.tolist() == [7, 8, 9, 7, 8, 9, 5, 6, 7, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 9, 10]
    assert batch.cu_responses.tolist() == [0, 2, 3, 3, 3]
    assert batch.loss_mask.tolist() == [1, 0, 1]
    assert batch.rewards.tolist() == [0.0, 0.0, 0.5]
    assert batch.row_rewards.tolist() == [0.0, 0.5, 0.0, 0.0]
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs.tolist() == [-0.25, -0.5, -0.25]
    assert batch.group_ids.tolist() == [0, 0, 0, 1]
    assert batch.trajectory_ids.tolist() == [0, 0, 1, 2]
    assert batch.is_last_step.tolist() == [False, True, True, True]
    assert batch.policy_version.tolist() == [3, 4, 2, 0]
    assert batch.uids == ("a", "b")
    assert batch.stop_reasons == ("stop", "max_turns", "error", "length")
    assert batch.reward_per_row


def test_prompts_in_parts_are_those_of_lists() -> None:
    a, b, c = (np.array(ids, np.int32) for ids in ([1, 2], [3], [4, 5]))
    prompts = [[a], [a, b], [a, b], [a, b, c, a], [a, c, a], [a.copy(), c], [], [a]]
    steps = [make_step(TokenIds(parts), [9]) for parts in [*prompts, [c], [c, b]]]
    steps.insert(4, make_step([1, 2, 3], [9]))
    plain = [make_step(list(step.prompt_token_ids), [9]) for step in steps]
    one, two = (batch_from_trajectories([make_trajectory("a", 0, s)]) for s in (steps, plain))
    assert one.tokens.tolist() == two.tokens.tolist()
    assert one.cu_seqlens.tolist() == two.cu_seqlens.tolist()


@given(some_trajectories())
def test_batch_and_metrics_equal_those_of_the_generator_output(
    trajectories: list[Trajectory],
) -> None:
    try:
        output = generator_output_from_trajectories(trajectories)
    except ValueError as error:
        with pytest.raises(ValueError, match="rollout_logprobs: expected them in every step"):
            batch_from_trajectories(trajectories)
        assert "rollout_logprobs" in str(error)  # from placeholders only, next to steps without any
        return
    batch = batch_from_trajectories(trajectories)
    assert_same(batch, StepBatch.from_generator_output(output, step_wise=True))
    assert trajectory_metrics(trajectories, batch) == step_wise_metrics(output)


@pytest.mark.spec("metrics.several-groups")
def test_metrics_of_several_groups_are_over_all_trajectories() -> None:
    quick = [one_step("x", i) for i in range(3)]
    for trajectory in quick:
        trajectory.seconds = 1.0
    slow = make_trajectory("y", 0, [make_step([1], [2]), make_step([1], [2])], seconds=9.0)
    trajectories = [*quick, slow]
    metrics = trajectory_metrics(trajectories, batch_from_trajectories(trajectories))
    assert metrics["generate/num_trajectories"] == 4
    assert metrics["generate/trajectory_completion_time_mean"] == 3.0  # not (1 + 9) / 2
    # Between the third and the fourth of [1, 1, 1, 9], at 0.9 * 3 = 2.7.
    assert metrics["generate/trajectory_completion_time_p90"] == pytest.approx(1 + 0.7 * 8)
    assert metrics["generate/avg_num_turns"] == 5 / 4


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ([], "trajectories: expected at least one"),
        (
            [one_step("a", 0), one_step("a", 1), one_step("a", 0)],
            r"another uid or repetition_id for each, got \('a', 0\) again in trajectory 2",
        ),
        (
            [one_step("a", 0), one_step("b", 0), one_step("a", 1)],
            "a group next to each other, got uid 'a' again in trajectory 2",
        ),
        (
            [one_step("a", 0), one_step("a", 1, rollout_logprobs=None)],
            "rollout_logprobs: expected them in every step or in none, got none in row 1",
        ),
        (
            [one_step("a", 0), one_step("a", 1, rollout_logprobs=[-1.0])],
            "rollout_logprobs: expected as many entries as response_ids in every row, got 1 and "
            "2 in row 1",
        ),
        (
            [one_step("a", 0, loss_mask=[1, 1, 1])],
            "loss_masks: expected as many entries as response_ids in every row, got 3 and 2 in "
            "row 0",
        ),
        ([one_step("a", 0, loss_mask=[1, 2])], "loss_masks"),
        ([make_trajectory("a", 0, [make_step([-1], [2])])], "prompt_token_ids"),
        ([make_trajectory("a", 0, [make_step([1], [2**31])])], "response_ids"),
        (
            [one_step("a", 0, expert_indices=np.zeros((5, 1, 1), np.uint8))],
            r"expert_indices: expected at most one entry per token \(4\) in row 0, got 5",
        ),
    ],
)
def test_invalid_trajectories_are_refused(trajectories: list[Trajectory], message: str) -> None:
    with pytest.raises(ValueError, match=f"batch_from_trajectories: .*{message}"):
        batch_from_trajectories(trajectories)


def test_batch_without_trained_tokens_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        batch_from_trajectories([one_step("a", 0, loss_mask=[0, 0])])
    assert "all 1 loss masks are 0" in caplog.text
