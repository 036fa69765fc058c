"""Metrics of rollouts: section 8 of docs/spec.md."""

from itertools import combinations

import numpy as np
import pytest
from _rows import step_wise_metrics
from _stored import make_step, make_trajectory
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.train.metrics.rewards import eval_metrics, pass_at_k, reward_metrics
from skyrl_fast.train.metrics.rollouts import batch_metrics, environment_metrics


def output():
    """Group a: trajectories of 2 and 1 turns (rewards 1, 0); group b: one of 2 turns (reward 0)."""
    return {
        "prompt_token_ids": [[1] * 2, [1] * 5, [1] * 2, [1] * 3, [1] * 6],
        "response_ids": [[2], [3] * 2, [4] * 4, [5], [6]],
        "loss_masks": [[1], [1, 0], [1] * 4, [1], [0]],
        "rewards": [7.0, 1.0, 0.0, 7.0, 0.0],
        "stop_reasons": ["stop", "done", "length", "stop", "done"],
        "trajectory_ids": [("a", 0), ("a", 0), ("a", 1), ("b", 0), ("b", 0)],
        "is_last_step": [False, True, True, False, True],
        "env_metrics": [{"hits": 9}, {"hits": 2}, {"hits": 4, "ok": True}, {"hits": 9}, {}],
        "trajectory_generation_times": [9.0, 1.0, 2.0, 9.0, 6.0],
        "trajectory_time_splits": {"llm": [9, 1, 1, 9, 4], "env": [9, 0, 1, 9, 1]},
    }


@pytest.fixture
def batch():
    return StepBatch.from_generator_output(output())


@pytest.fixture
def trajectories():
    rewards = {("a", 0): 1.0, ("a", 1): 0.0, ("b", 0): 0.0}
    return [
        make_trajectory(uid, repetition, [make_step([1], [2]), make_step([1], [2], reward=reward)])
        for (uid, repetition), reward in rewards.items()
    ]


# --- per trajectory ----------------------------------------------------------------------------


@pytest.mark.spec("metrics.intermediate-steps")
def test_reward_counts_last_steps_only(batch):
    # Intermediate rows (reward 7) are not samples, nor zero-reward samples.
    assert reward_metrics(batch, samples_per_prompt=2) == {
        "reward/avg_raw_reward": pytest.approx(1 / 3),
        "reward/avg_pass_at_2": 0.5,
        "reward/mean_positive_reward": pytest.approx(1 / 3),
    }


def test_positive_reward_of_rewards_per_token():
    tokens = output()
    tokens["rewards"] = [[9.0], [2.0, -1.0], [-1.0, 0.5, 0.0, 0.0], [9.0], [-3.0]]
    metrics = reward_metrics(StepBatch.from_generator_output(tokens), samples_per_prompt=2)
    assert metrics["reward/avg_raw_reward"] == pytest.approx((1.0 - 0.5 - 3.0) / 3)
    assert metrics["reward/mean_positive_reward"] == pytest.approx((2.0 + 0.5 + 0.0) / 3)


@pytest.mark.spec("metrics.trajectory")
def test_rollout_metrics_per_trajectory():
    metrics = step_wise_metrics(output())
    expected = {
        "generate/num_trajectories": 3,
        "generate/num_empty_trajectories": 0,
        "generate/avg_num_tokens": 3,  # 1 + 2, 4, 1 + 1
        "generate/min_num_tokens": 2,
        "generate/max_num_tokens": 4,
        "generate/std_num_tokens": np.std([3, 4, 2]),
        "generate/avg_tokens_non_zero_rewards": 3,
        "generate/avg_tokens_zero_rewards": 3,
        "generate/avg_assistant_tokens": (2 + 4 + 1) / 3,
        "generate/avg_num_turns": 5 / 3,
        "generate/max_num_turns": 2,
        "generate/avg_final_context_length": (7 + 6 + 7) / 3,
        "generate/max_final_context_length": 7,
        "generate/stop_reason/done": 2 / 3,
        "generate/stop_reason/length": 1 / 3,
        "generate/trajectory_completion_time_mean": 3,
        "generate/trajectory_completion_time_max": 6,
        "generate/trajectory_completion_time_p90": np.percentile([1, 2, 6], 90),
        "generate/trajectory_time/llm_mean": 2,
        "generate/trajectory_time/llm_share": 0.75,
        "generate/trajectory_time/env_share": 0.25,
        "environment/hits": 3,
        "environment/ok": 1,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "generate/stop_reason/stop" not in metrics  # only intermediate rows have it


@pytest.mark.spec("metrics.environment")
def test_only_finite_numbers_of_environments_have_a_part_in_means(
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd = [float("nan"), float("inf"), 10**400, [1.0], "2", {"a": 1.0}, 1j, None]
    reported = [{"hits": 1}, {"hits": np.float32(3)}, *({"hits": value} for value in odd)]
    got = environment_metrics(reported)
    assert got == {"environment/hits": 2.0}
    assert caplog.messages == ["environment/hits: expected finite numbers, left out nan"]


@pytest.mark.spec("metrics.per-turn")
def test_per_turn_metrics_have_separate_names():
    metrics = step_wise_metrics(output())
    assert metrics["generate/per_turn/avg_response_length"] == 9 / 5
    assert metrics["generate/per_turn/max_response_length"] == 4
    assert metrics["generate/per_turn/avg_prompt_length"] == 18 / 5
    assert metrics["generate/per_turn/avg_num_tokens"] == 27 / 5


def test_metrics_of_empty_responses():
    rows = output()
    rows["response_ids"], rows["loss_masks"] = [[]] * 5, [[]] * 5
    metrics = step_wise_metrics(rows)
    assert metrics["generate/num_empty_trajectories"] == 3
    assert metrics["generate/avg_num_tokens"] == 0


# --- per data source and evaluation ------------------------------------------------------------


@pytest.mark.spec("metrics.pass-at-k")
def test_data_sources_with_the_same_metric_name_share_it(trajectories):
    shared = eval_metrics(trajectories, data_sources=["x/y", "x/y", "x_y"])
    assert shared["eval/x_y/avg_score"] == shared["eval/all/avg_score"]


@pytest.mark.spec("metrics.environment")
def test_an_evaluation_has_the_means_of_named_reward_parts(trajectories):
    for number, trajectory in enumerate(trajectories):
        trajectory.env_metrics = {"format": float(number)}
    trajectories[0].env_metrics["length"] = 4
    metrics = eval_metrics(trajectories, data_sources=["x", "x", "y"])
    parts = {name: value for name, value in metrics.items() if "/environment/" in name}
    assert parts == {
        "eval/all/environment/format": 1.0,
        "eval/all/environment/length": 4.0,
        "eval/x/environment/format": 0.5,
        "eval/x/environment/length": 4.0,
        "eval/y/environment/format": 2.0,
    }


def test_eval_metrics(trajectories):
    named = eval_metrics(trajectories, data_sources=["all", "all", None])
    assert named["eval/all/avg_score"] == eval_metrics(trajectories)["eval/all/avg_score"]
    metrics = eval_metrics(trajectories, data_sources=["x/1", "x/1", ""])
    assert named["eval/all_/avg_score"] == metrics["eval/x_1/avg_score"]
    assert metrics["eval/all/avg_score"] == pytest.approx(1 / 3)
    assert metrics["eval/all/pass_at_1"] == 0.25  # the mean of 1/2 and 0, over groups
    assert metrics["eval/x_1/pass_at_1"] == 0.5
    assert metrics["eval/unknown/pass_at_1"] == 0.0
    with pytest.raises(ValueError, match="k: expected 1 to the smallest group"):
        eval_metrics(trajectories, ks=(2,))


@pytest.mark.spec("metrics.trajectory")
@given(st.integers(1, 7), st.data())
def test_pass_at_k_equals_the_share_of_draws_with_a_success(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations([i < c for i in range(n)], k))
    share = sum(any(draw) for draw in draws) / len(draws)
    assert pass_at_k(np.array([n]), np.array([c]), k)[0] == pytest.approx(share)


# --- the batch ---------------------------------------------------------------------------------


@pytest.mark.spec("metrics.batch")
def test_batch_metrics(batch):
    metrics = batch_metrics(batch, num_rows_before_merge=8)
    assert metrics["generate/batch_num_seq"] == 5
    assert metrics["generate/batch_padded_seq_len"] == 7
    assert metrics["generate/batch_num_tokens"] == 27
    assert metrics["generate/batch_padding_share"] == pytest.approx(1 - 27 / 35)
    assert metrics["generate/batch_trained_share"] == pytest.approx(7 / 35)
    assert metrics["generate/num_seq_before_merge"] == 8
    assert metrics["generate/num_seq_after_merge"] == 5


@pytest.mark.spec("metrics.intermediate-steps")
def test_tokens_of_zero_rewards_are_those_of_full_trajectories():
    metrics = step_wise_metrics(output())
    # Trajectories of 4 and 1 + 1 tokens have reward 0; the rows with reward 7 or 0 are not counted.
    assert metrics["generate/avg_tokens_zero_rewards"] == (4 + 2) / 2
    assert metrics["generate/avg_tokens_non_zero_rewards"] == 1 + 2


@given(st.lists(st.lists(st.integers(0, 255), max_size=4), max_size=12))
def test_segment_sums(segments):
    offsets = np.concatenate([[0], np.cumsum([len(s) for s in segments])]).astype(np.int32)
    values = np.array([v for s in segments for v in s], dtype=np.uint8)
    expected = [sum(s) for s in segments]
    assert segment_sums(values, offsets, np.int64).tolist() == expected
    for offset_type in (np.int32, np.int64):
        floats = values.astype(np.float32), offsets.astype(offset_type)
        assert segment_sums(*floats, np.float64).tolist() == expected
