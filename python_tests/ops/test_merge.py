"""Merging the steps of a trajectory: lists and flat arrays.

Section 10 of docs/spec.md.
"""

import gc
from typing import Any

import numpy as np
import pytest
import torch
from _merging import drifted, worked_output
from _rows import assert_same

from skyrl_fast import merge_steps, merge_stepwise_output
from skyrl_fast.batch import StepBatch
from skyrl_fast.ops.merge.steps import merge_flat_steps
from skyrl_fast.train.algorithm.advantages import compute_advantages

ROW_FIELDS = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")


def token_level(output: dict[str, Any]) -> dict[str, Any]:
    """Return the output with each row's reward on its last response token."""
    rows = zip(output["rewards"], output["response_ids"], strict=True)
    rewards = [[0.0] * (len(r) - 1) + [float(reward)] if r else [] for reward, r in rows]
    return {**output, "rewards": rewards}


# --- cases by hand -------------------------------------------------------------------------------


@pytest.mark.spec("merge.prompt")
def test_steps_with_growing_context_become_one_row() -> None:
    merged = merge_stepwise_output(worked_output())
    assert merged["prompt_token_ids"] == [[1, 2], [1, 2], [1, 7]]
    assert merged["response_ids"] == [[3, 9, 4, 5, 8, 6], [3], [6]]
    assert merged["loss_masks"] == [[1, 0, 1, 0, 0, 1], [1], [1]]
    assert merged["rollout_logprobs"] == [[-0.5, 0.0, -1.0, 0.0, 0.0, -2.0], [-0.25], [-4.0]]


@pytest.mark.spec(
    "merge.last-step-fields",
    "merge.times",
    "merge.row-rewards",
    "merge.policy-versions",
    "merge.rollout-metrics",
)
def test_row_values_come_from_the_last_step() -> None:
    merged = merge_stepwise_output(worked_output())
    assert merged["stop_reasons"] == ["length", "stop", "done"]
    assert merged["is_last_step"] == [True, False, True]
    assert merged["trajectory_ids"] == [("a", 0), ("a", 1), ("a", 1)]
    assert merged["rewards"] == [1.0, 0.0, 2.0]
    assert merged["env_metrics"] == [{"n": 2}, {"n": 3}, {"n": 5}]
    # Each row has the trajectory's times: a sum would count them once per turn.
    assert merged["trajectory_generation_times"] == [3.0, 2.0, 2.0]
    assert merged["trajectory_time_splits"] == {"llm": [2.5, 1.5, 1.5]}
    assert merged["policy_versions"] == [4, 5, 4]  # the oldest
    assert merged["rollout_metrics"] == {"generate/avg_num_turns": 3.0}
    assert [t.instance_id for t in merged["trajectory_ids"]] == ["a", "a", "a"]


@pytest.mark.spec("merge.token-rewards")
def test_token_rewards_keep_their_tokens_and_sum() -> None:
    merged = merge_stepwise_output(token_level(worked_output()))
    assert merged["rewards"] == [[0.25, 0, 0, 0.5, 0, 1.0], [0.0], [0.0]]


@pytest.mark.spec("merge.last-step-fields")
def test_overlaps_are_also_those_of_prompts_that_are_too_short(backend: str) -> None:
    prompts, responses = [list(range(50)), list(range(40))], [[7] * 10, [8]]
    plan = merge_steps(prompts, responses, [0, 0], backend=backend)
    assert plan.overlaps.tolist() == [0, 40] and plan.joins.tolist() == [False, False]
    flat = torch.tensor([*prompts[0], *responses[0], *prompts[1], *responses[1]], dtype=torch.int32)
    offsets = [torch.tensor(ends, dtype=torch.int64) for ends in ([0, 60, 101], [0, 10, 11])]
    plan = merge_flat_steps(flat, *offsets, torch.zeros(2, dtype=torch.int32))
    assert plan.overlaps.tolist() == [0, 40]
    assert plan.joins.tolist() == [False, False]


def test_batch_merges_like_its_lists() -> None:
    for output in (worked_output(), token_level(worked_output())):
        wanted = StepBatch.from_generator_output(merge_stepwise_output(output))
        assert_same(StepBatch.from_generator_output(output).merged(), wanted)
        assert_same(StepBatch.from_generator_output(output, merge="fork"), wanted)
    assert wanted.num_groups == 1
    assert wanted.num_trajectories == 2
    assert wanted.policy_version.tolist() == [4, 5, 4]


@pytest.mark.spec("merge.row-rewards", "merge.token-rewards")
def test_batch_rewards_are_those_of_the_last_step_or_the_sum() -> None:
    steps = StepBatch.from_generator_output(worked_output())
    assert steps.merged().row_rewards.tolist() == [1.0, 0.0, 2.0]
    assert steps.merged(rewards="last").rewards.tolist() == [0, 0, 0, 0, 0, 1.0, 0, 2.0]
    every = steps.merged(rewards="token")
    assert every.row_rewards.tolist() == [1.75, 0.0, 2.0]
    # The last step's response is empty: its reward is on the previous token.
    assert every.rewards.tolist() == [0.25, 0, 0, 0.5, 0, 1.0, 0, 2.0]


@pytest.mark.spec("merge.outcome")
def test_merging_does_not_change_outcomes() -> None:
    steps = StepBatch.from_generator_output(worked_output())
    merged = steps.merged()
    at_steps, at_rows = compute_advantages(steps).advantages, compute_advantages(merged).advantages
    assert at_steps[0] == at_rows[0] != 0
    assert at_steps[-1] == at_rows[-1]


def test_equal_rows_merge_and_shorter_prompts_do_not() -> None:
    plan = merge_steps([[1], [1, 2], [1, 2]], [[2], [], [3]], [0, 0, 0])
    assert plan.joins.tolist() == [False, True, True]  # no tokens were added in between
    plan = merge_steps([[1, 2], [1]], [[3], [2]], [0, 0])
    assert plan.joins.tolist() == [False, False]


@pytest.mark.spec("merge.greedy")
def test_rows_of_two_trajectories_never_merge() -> None:
    assert not merge_steps([[1], [1, 2]], [[2], [3]], [0, 1]).joins.any()


# --- drift ----------------------------------------------------------------------------------------


@pytest.mark.spec("merge.drift-fork", "merge.drift-dropped-tokens", "merge.drift-rewards")
def test_drift_forks_unless_realigned() -> None:
    output = drifted([1, 2, 3, 4, 50, 9])  # 5 6 came back as 50, then an observation
    assert merge_stepwise_output(output)["response_ids"] == [[3, 4, 5, 6], [7]]
    merged = merge_stepwise_output(output, drift="realign")
    assert merged["response_ids"] == [[3, 4, 50, 9, 7]]
    assert merged["loss_masks"] == [[1, 1, 0, 0, 1]]
    assert merged["rollout_logprobs"] == [[-1.0, -2.0, 0.0, 0.0, -5.0]]
    assert merged["rewards"] == [[0.0, 1.0, 0.0, 0.0, 2.0]]  # the reward of 6 went to 4


@pytest.mark.parametrize(
    ("prompt", "most", "joins"),
    [
        ([1, 2, 3, 4, 5, 60, 9], 1, True),
        ([1, 2, 3, 4, 50, 9], 1, False),  # two tokens changed
        ([1, 2, 3, 40, 50, 60], 3, True),
        ([1, 2, 30, 9], 8, False),  # no response token remains
        ([1, 20, 3, 4, 5, 6], 8, False),  # the prompt changed
        ([1, 2, 3, 4], 2, True),  # the last tokens are missing
        ([1, 2, 3, 4], 0, False),
        ([1, 2, 3, 4, 5, 6], 0, True),
    ],
)
@pytest.mark.spec("merge.drift-realign", "merge.drift-short-prompt")
def test_maximum_drift_distance(prompt: list[int], most: int, joins: bool) -> None:
    merged = merge_stepwise_output(drifted(prompt), drift="realign", max_drift_tokens=most)
    assert len(merged["response_ids"]) == 2 - joins
    if joins:
        assert merged["prompt_token_ids"][0] + merged["response_ids"][0] == [*prompt, 7]


@pytest.mark.spec("merge.drift-realign")
def test_untrained_end_token_may_drift_and_untrained_tokens_inside_limit_it() -> None:
    end = drifted([1, 2, 3, 4, 5, 60], mask=[1, 1, 1, 0])
    assert merge_stepwise_output(end, drift="realign")["loss_masks"] == [[1, 1, 1, 0, 1]]
    # The last run of trained tokens starts at 5, which must not change.
    middle = drifted([1, 2, 3, 4, 50], mask=[1, 0, 1, 1])
    assert len(merge_stepwise_output(middle, drift="realign")["loss_masks"]) == 2
    nothing = drifted([1, 2, 3, 4, 50], mask=[0, 0, 0, 0])
    assert len(merge_stepwise_output(nothing, drift="realign")["loss_masks"]) == 2


# --- expert indices -------------------------------------------------------------------------------


def routes(*firsts: int) -> np.ndarray:
    """Return routes [tokens, 1 layer, 2 experts] that start with these numbers."""
    return np.array([[[first, first + 1]] for first in firsts], dtype=np.uint8).reshape(-1, 1, 2)


def routed_output(*rows: np.ndarray | None) -> dict[str, Any]:
    """Prompt A (2), response B (3), observation O (2), response C (2)."""
    return {
        "prompt_token_ids": [[1, 2], [1, 2, 3, 4, 5, 6, 7]],
        "response_ids": [[3, 4, 5], [8, 9]],
        "loss_masks": [[1, 1, 1], [1, 1]],
        "rewards": [0.0, 1.0],
        "rollout_expert_indices": list(rows),
        "trajectory_ids": [("a", 0)] * 2,
        "is_last_step": [False, True],
    }


@pytest.mark.spec("merge.routes")
def test_recorded_routes_are_kept_and_later_steps_append() -> None:
    output = routed_output(routes(0, 1, 2, 3), routes(10, 11, 12, 13, 14, 15, 16, 17))
    wanted = routes(0, 1, 2, 3, 14, 15, 16, 17)
    (merged,) = merge_stepwise_output(output)["rollout_expert_indices"]
    assert np.array_equal(merged, wanted)
    for batch in (
        StepBatch.from_generator_output(output).merged(),
        StepBatch.from_generator_output(output, merge="fork"),
    ):
        assert np.array_equal(batch.expert_indices.numpy(), wanted)
        assert batch.cu_experts.tolist() == [0, 8]
        assert batch.num_tokens == 9


def test_steps_without_routes_add_none() -> None:
    for first in (None, routes()):
        merged = merge_stepwise_output(routed_output(first, routes(0, 1)))
        assert np.array_equal(merged["rollout_expert_indices"][0], routes(0, 1))
    merged = merge_stepwise_output(routed_output(routes(0, 1), None))
    assert np.array_equal(merged["rollout_expert_indices"][0], routes(0, 1))
    assert merge_stepwise_output(routed_output(None, None))["rollout_expert_indices"] == [None]


def test_fork_keeps_its_own_routes() -> None:
    output = routed_output(routes(0, 1, 2, 3), routes(*range(10, 18)))
    output["prompt_token_ids"][1][0] = 99
    rows = merge_stepwise_output(output)["rollout_expert_indices"]
    assert [len(row) for row in rows] == [4, 8]
    assert rows[1][0, 0, 0] == 10


def test_fewer_routes_than_recorded_is_an_error() -> None:
    output = routed_output(routes(0, 1, 2, 3), routes(10, 11))
    with pytest.raises(ValueError, match="row 1 has 2 routes after more were recorded"):
        merge_stepwise_output(output)
    with pytest.raises(ValueError, match="row 1 has 2 routes"):
        StepBatch.from_generator_output(output).merged()


# --- forms of rows --------------------------------------------------------------------------------


def test_array_input_gives_array_output() -> None:
    output = token_level(worked_output())
    arrays = {
        **output,
        **{f: [np.array(r, np.int64) for r in output[f]] for f in ROW_FIELDS[:3]},
        "rollout_logprobs": [np.array(r, np.float32) for r in output["rollout_logprobs"]],
        "rewards": [np.array(r, np.float32) for r in output["rewards"]],
    }
    merged, wanted = merge_stepwise_output(arrays), merge_stepwise_output(output)
    for field in (*ROW_FIELDS, "rewards"):
        assert all(isinstance(row, np.ndarray) for row in merged[field]), field
        assert [row.tolist() for row in merged[field]] == wanted[field]
    drift = drifted([1, 2, 3, 4])
    wanted = merge_stepwise_output(drift, drift="realign")
    for field in (*ROW_FIELDS, "rewards"):
        drift[field] = [np.array(r) for r in drift[field]]
    merged = merge_stepwise_output(drift, drift="realign")
    for field in (*ROW_FIELDS, "rewards"):
        assert [row.tolist() for row in merged[field]] == wanted[field], field


def test_without_logprobs_stop_reasons_and_times() -> None:
    output = worked_output()
    for field in ("rollout_logprobs", "stop_reasons", "trajectory_time_splits"):
        output[field] = None
    del output["trajectory_generation_times"]
    merged = merge_stepwise_output(output)
    assert merged["rollout_logprobs"] is merged["stop_reasons"] is None
    assert merged["trajectory_time_splits"] is None
    assert "trajectory_generation_times" not in merged
    batch = StepBatch.from_generator_output(output, merge="fork")
    assert batch.rollout_logprobs is batch.stop_reasons is None


def test_ids_larger_than_one_digit_of_an_int_are_compared_by_value() -> None:
    def make(n: int) -> int:
        return int(str(2**40 + n))

    prompts = [[make(1)], [make(1), make(2), make(3)], [make(1), make(2), make(4)]]
    plan = merge_steps(prompts, [[make(2)], [], [make(5)]], [0, 0, 0])
    assert plan.joins.tolist() == [False, True, False]


@pytest.mark.spec("merge.linear-cost")
def test_each_token_is_compared_at_most_twice() -> None:
    looks = 0

    class Id:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            nonlocal looks
            looks += 1
            return self.value

    turns = 12
    prompts = [[Id(n) for n in range(1 + 3 * turn)] for turn in range(turns)]
    responses = [[Id(1 + 3 * turn)] for turn in range(turns)]
    plan = merge_steps(prompts, responses, [0] * turns)
    assert plan.joins.tolist() == [False] + [True] * (turns - 1)
    assert looks <= 2 * sum(len(row) for rows in (prompts, responses) for row in rows)


def test_result_shares_no_list_with_the_input() -> None:
    output = worked_output()
    merged = merge_stepwise_output(output)
    for field in ROW_FIELDS:
        assert not {id(row) for row in merged[field]} & {id(row) for row in output[field]}


def test_additional_token_columns_are_merged() -> None:
    steps = StepBatch.from_generator_output(worked_output())
    steps = steps.with_(old_logprobs=steps.rollout_logprobs, ref_logprobs=steps.rollout_logprobs)
    merged = steps.merged()
    assert torch.equal(merged.old_logprobs, merged.rollout_logprobs)
    assert torch.equal(merged.ref_logprobs, merged.rollout_logprobs)


# --- refusals ------------------------------------------------------------------------------------


def test_step_wise_fields_are_required() -> None:
    for field in ("trajectory_ids", "is_last_step"):
        with pytest.raises(ValueError, match=f"{field}: expected it"):
            merge_stepwise_output({**worked_output(), field: None})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pixel_values": [None] * 6}, ValueError, "pixel_values: expected None"),
        ({"extra": [1, 2]}, ValueError, "extra: expected a list with one entry for each of 6 rows"),
        ({"extra": "text"}, ValueError, "extra: expected a list"),
        ({"response_ids": [["x"], [4, 5], [6], [3], [6], []]}, TypeError, "response_ids|responses"),
    ],
)
@pytest.mark.spec("merge.images")
def test_invalid_outputs_error_names_the_field(
    change: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        merge_stepwise_output({**worked_output(), **change})


def test_non_integer_ids_error_names_the_row() -> None:
    for bad in (1.0, True, "1", None):
        with pytest.raises(TypeError, match=r"merge_steps: prompts, row 1, position 0: .*integer"):
            merge_steps([[1], [bad, 2]], [[2], [3]], [0, 0])


@pytest.mark.spec("merge.before-advantages")
def test_invalid_options_error_names_the_option() -> None:
    output = worked_output()
    with pytest.raises(ValueError, match=r"drift: expected one of .* got 'bend'"):
        merge_stepwise_output(output, drift="bend")
    with pytest.raises(ValueError, match="max_drift_tokens: expected at least 0, got -1"):
        merge_stepwise_output(output, max_drift_tokens=-1)
    with pytest.raises(ValueError, match="drift: expected one of"):
        StepBatch.from_generator_output(output, merge="bend")
    steps = StepBatch.from_generator_output(output)
    with pytest.raises(ValueError, match="rewards: expected 'token', 'last' or None"):
        steps.merged(rewards="mean")
    with pytest.raises(ValueError, match="advantages: expected None"):
        steps.with_(advantages=compute_advantages(steps).advantages).merged()
    with pytest.raises(ValueError, match="loss_masks: expected them"):
        merge_steps([[1]], [[2]], [0], drift="realign")
    with pytest.raises(ValueError, match="trajectory_ids: expected 1 integers"):
        merge_steps([[1]], [[2]], [0, 1])


def test_merged_lists_of_numbers_are_untracked_by_the_garbage_collector() -> None:
    steps = {
        "prompt_token_ids": [[1], [1, 2, 9]], "response_ids": [[2], [3]],
        "loss_masks": [[1], [1]], "rewards": [[0.0], [1.0]],
        "trajectory_ids": [("a", 0), ("a", 0)], "is_last_step": [False, True],
    }  # fmt: skip
    merged = merge_stepwise_output(steps)
    assert not any(gc.is_tracked(merged[name][0]) for name in ("response_ids", "rewards"))
    row = merged["response_ids"][0]
    row.append(row)  # as any list
    assert row[-1] is row and len(row) == 4
    row.clear()
    gc.collect()
