"""StepBatch. Sections are those of docs/spec.md."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.split import mini_batch_boundaries
from skyrl_fast.ops.passes.plan import balance_parts
from skyrl_fast.train.algorithm.advantages import compute_advantages, normalize_advantages


def worked_output():
    """Section 5: rows 0-1 are trajectory 1 (reward 1), rows 2-4 trajectory 2 (reward 0)."""
    return {
        "prompt_token_ids": [[1, 2], [1, 2, 3, 9], [1, 2], [1, 2, 4, 9], [1, 2, 4, 9, 5, 9]],
        "response_ids": [[3], [7, 8], [4], [5, 5], [6]],
        "loss_masks": [[1], [1, 0], [1], [1, 1], [1]],
        "rewards": [0.5, 1.0, 0.25, 0.0, 0.0],
        "rollout_logprobs": [[-0.5], [-1.0, 0.0], [-2.0], [-0.25, -0.125], [-3.0]],
        "stop_reasons": ["stop", "done", "stop", "stop", "length"],
        "trajectory_ids": [("a", 0), ("a", 0), ("a", 1), ("a", 1), ("a", 1)],
        "is_last_step": [False, True, False, False, True],
        "policy_versions": [0, 0, 0, 1, 1],
    }


def default_output():
    return {
        "prompt_token_ids": [[1, 2], [1, 2], [3], [3]],
        "response_ids": [[5], [6, 7, 8], [9], [9, 9]],
        "loss_masks": [[1], [1, 1, 1], [1], [0, 1]],
        "rewards": [1.0, 0.0, 2.0, 4.0],
    }


DEFAULT_UIDS = ["p", "p", "q", "q"]


def tensors(batch: StepBatch) -> dict:
    return {f: getattr(batch, f) for f in StepBatch.__slots__}


def assert_same(a: StepBatch, b: StepBatch) -> None:
    for name, value in tensors(a).items():
        other = getattr(b, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype
            assert torch.equal(value, other), name
        else:
            assert value == other, name


# --- section 1: every step is a row ------------------------------------------------------------


@pytest.mark.spec("output.row-per-step", "output.any-context")
def test_each_step_is_a_row_of_prompt_and_response():
    batch = StepBatch.from_generator_output(worked_output())
    assert batch.num_rows == 5
    assert batch.num_trajectories == 2
    assert batch.cu_seqlens.tolist() == [0, 3, 9, 12, 18, 25]
    assert [row.tolist() for row in batch.tokens.split(batch.lengths.tolist())] == [
        [1, 2, 3],
        [1, 2, 3, 9, 7, 8],
        [1, 2, 4],
        [1, 2, 4, 9, 5, 5],
        [1, 2, 4, 9, 5, 9, 6],
    ]
    assert batch.cu_responses.tolist() == [0, 1, 3, 4, 6, 7]
    assert batch.loss_mask.tolist() == [1, 1, 0, 1, 1, 1, 1]
    assert batch.trajectory_ids.tolist() == [0, 0, 1, 1, 1]
    assert batch.group_ids.tolist() == [0] * 5
    assert batch.uids == ("a",)
    assert batch.is_last_step.tolist() == [False, True, False, False, True]
    assert batch.policy_version.tolist() == [0, 0, 0, 1, 1]
    assert batch.stop_reasons == ("stop", "done", "stop", "stop", "length")
    assert batch.rollout_logprobs.tolist() == [-0.5, -1.0, 0.0, -2.0, -0.25, -0.125, -3.0]


def test_row_reward_is_on_the_last_token():
    batch = StepBatch.from_generator_output(worked_output())
    assert batch.rewards.tolist() == [0.5, 0.0, 1.0, 0.25, 0.0, 0.0, 0.0]
    assert batch.row_rewards.tolist() == [0.5, 1.0, 0.25, 0.0, 0.0]


def test_token_rewards_sum_to_the_row_reward():
    output = worked_output()
    output["rewards"] = [[0.5], [0.25, 0.5], [0.0], [1.0, 2.0], [3.0]]
    batch = StepBatch.from_generator_output(output)
    assert batch.rewards.tolist() == [0.5, 0.25, 0.5, 0.0, 1.0, 2.0, 3.0]
    assert batch.row_rewards.tolist() == [0.5, 0.75, 0.0, 3.0, 3.0]


@pytest.mark.parametrize("per_token", [False, True])
def test_empty_response_is_a_row_without_response_tokens(per_token):
    output = worked_output()
    output["response_ids"][4], output["loss_masks"][4], output["rollout_logprobs"][4] = [], [], []
    if per_token:
        output["rewards"] = [[0.5], [0.0, 1.0], [0.0], [0.0, 0.0], []]
    batch = StepBatch.from_generator_output(output)
    assert batch.cu_responses.tolist() == [0, 1, 3, 4, 6, 6]
    assert batch.row_rewards.tolist()[-1] == 0.0


@pytest.mark.spec("output.reward-of-empty-response")
def test_reward_of_an_empty_response_is_kept_and_refused_by_padded_tensors():
    output = worked_output()
    output["response_ids"][4], output["loss_masks"][4], output["rollout_logprobs"][4] = [], [], []
    output["rewards"][4] = 3.0
    batch = StepBatch.from_generator_output(output)
    assert compute_advantages(batch, estimator="rloo").advantages.tolist() == [-2.0] * 3 + [2.0] * 3
    with pytest.raises(
        ValueError, match=r"rewards: expected 0 for an empty response.*3.0 in row 4"
    ):
        batch.padded(0)


def test_rows_may_be_numpy_or_torch_arrays():
    arrays = worked_output()
    for field in ("prompt_token_ids", "response_ids", "loss_masks"):
        arrays[field] = [np.array(row, dtype=np.int64) for row in arrays[field]]
    arrays["rollout_logprobs"] = [torch.tensor(row) for row in arrays["rollout_logprobs"]]
    assert_same(
        StepBatch.from_generator_output(arrays), StepBatch.from_generator_output(worked_output())
    )


@pytest.mark.parametrize("bad", [-1, 2**31])
def test_token_id_out_of_range_error_names_the_row(bad):
    output = worked_output()
    output["response_ids"][3][1] = bad
    with pytest.raises(ValueError, match=r"response_ids.*row 3"):
        StepBatch.from_generator_output(output)


def test_loss_mask_other_than_0_or_1_error_names_the_row():
    output = worked_output()
    output["loss_masks"][3][1] = 2
    with pytest.raises(ValueError, match=r"loss_masks.*row 3.*2"):
        StepBatch.from_generator_output(output)


# --- section 2: the default path ---------------------------------------------------------------


@pytest.mark.spec("output.default-path")
def test_without_step_wise_keys_every_row_is_a_trajectory():
    batch = StepBatch.from_generator_output(default_output(), uids=DEFAULT_UIDS)
    assert batch.trajectory_ids.tolist() == [0, 1, 2, 3]
    assert batch.is_last_step.tolist() == [True] * 4
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.uids == ("p", "q")


@pytest.mark.spec("output.default-path-unchanged")
def test_default_path_equals_one_row_trajectories():
    step_wise = {
        **default_output(),
        "trajectory_ids": [("p", 0), ("p", 1), ("q", 0), ("q", 1)],
        "is_last_step": [True] * 4,
    }
    plain = StepBatch.from_generator_output(default_output(), uids=DEFAULT_UIDS)
    assert_same(StepBatch.from_generator_output(step_wise), plain)


def test_default_path_requires_prompt_uids():
    with pytest.raises(ValueError, match="uids: expected a name for each row's prompt"):
        StepBatch.from_generator_output(default_output())


def test_integer_uids():
    batch = StepBatch.from_generator_output(default_output(), uids=[7, 7, 3, 3])
    assert batch.uids == ("7", "3")
    assert batch.group_ids.tolist() == [0, 0, 1, 1]


# --- section 4: the padded view ----------------------------------------------------------------


@pytest.mark.spec("batch.right-alignment")
def test_padded_example():
    output = {
        "prompt_token_ids": [[11, 12], [21]],
        "response_ids": [[13], [22, 23, 24]],
        "loss_masks": [[1], [1, 0, 1]],
        "rewards": [2.0, 3.0],
        "rollout_logprobs": [[-1.0], [-2.0, -3.0, -4.0]],
    }
    padded = StepBatch.from_generator_output(output, uids=["a", "b"]).padded(99)
    assert padded.sequences.tolist() == [[99, 11, 12, 13], [21, 22, 23, 24]]
    assert padded.sequences.dtype == torch.int64
    assert padded.attention_mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert padded.response_mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert padded.rewards.tolist() == [[0, 0, 2], [0, 0, 3]]
    assert padded.loss_mask.tolist() == [[0, 0, 1], [1, 0, 1]]
    assert padded.loss_mask.dtype == torch.float32
    assert padded.rollout_logprobs.tolist() == [[0, 0, -1], [-2, -3, -4]]


@pytest.mark.spec(
    "batch.padding-loss-mask",
    "batch.padding-copies-row-0",
    "batch.padding-uids",
    "batch.padding-last-step",
)
def test_padding_rows_copy_row_0_with_loss_mask_0_and_are_separate_trajectories():
    batch = StepBatch.from_generator_output(worked_output())
    padded, plain = batch.padded(0, pad_size=7), batch.padded(0)
    for name in ("sequences", "attention_mask", "response_mask", "rewards", "rollout_logprobs"):
        rows = getattr(padded, name)
        assert torch.equal(rows[:5], getattr(plain, name)), name
        assert all(torch.equal(row, rows[0]) for row in rows[5:]), name
    assert padded.loss_mask[5:].count_nonzero() == 0
    assert padded.uids == ["a"] * 5 + [f"pad{i}" for i in range(7)]
    assert padded.is_last_step == [False, True, False, False, True] + [True] * 7
    assert padded.pad_size == 7


@pytest.mark.spec("batch.expert-indices", "batch.dummy-route", "batch.row-without-routes")
def test_routes_cover_the_first_tokens_and_the_rest_are_distinct_dummies():
    output = default_output()
    routes = np.arange(2 * 1 * 2, dtype=np.int64).reshape(2, 1, 2) + 5
    output["rollout_expert_indices"] = [routes, None, routes[:0], routes[:1]]
    batch = StepBatch.from_generator_output(output, uids=DEFAULT_UIDS)
    assert batch.expert_indices.dtype == torch.uint8
    assert batch.cu_experts.tolist() == [0, 2, 2, 2, 3]
    padded = batch.padded(0)
    dummy = [[0, 1]]
    assert padded.rollout_expert_indices.tolist() == [
        [dummy, dummy, [[5, 6]], [[7, 8]], dummy],
        [dummy] * 5,
        [dummy] * 5,
        [dummy, dummy, [[5, 6]], dummy, dummy],
    ]
    assert padded.router_padding_mask.tolist() == [
        [True, True, False, False, True],
        [True] * 5,
        [True] * 5,
        [True, True, False, True, True],
    ]
    with_rows = batch.padded(0, pad_size=1)
    assert with_rows.rollout_expert_indices[4].tolist() == [dummy] * 5
    assert with_rows.router_padding_mask[4].tolist() == [True] * 5
    output["rollout_expert_indices"] = None
    without = StepBatch.from_generator_output(output, uids=DEFAULT_UIDS).padded(0)
    assert without.rollout_expert_indices is None
    assert without.router_padding_mask is None


# --- section 5: advantages ---------------------------------------------------------------------


def test_row_rewards_are_recognized_with_as_many_tokens_as_rows():
    output = worked_output()
    output["response_ids"] = [[3], [7, 8], [4], [5], []]
    output["loss_masks"] = [[1] * len(row) for row in output["response_ids"]]
    output["rollout_logprobs"] = None
    batch = StepBatch.from_generator_output(output)
    assert batch.loss_mask.shape[0] == batch.num_rows
    assert compute_advantages(batch, estimator="rloo").advantages.tolist() == [1, 1, 1, -1, -1]


@pytest.mark.spec("advantage.worked-example")
@pytest.mark.parametrize(("estimator", "value"), [("grpo", 0.70710), ("rloo", 1.0)])
def test_worked_advantages(estimator, value):
    batch = StepBatch.from_generator_output(worked_output())
    got = compute_advantages(batch, estimator=estimator).advantages
    assert got.dtype == torch.float32
    # 1e-5: the spec gives five digits.
    torch.testing.assert_close(got, torch.tensor([value] * 3 + [-value] * 4), atol=1e-5, rtol=0)


@pytest.mark.spec("advantage.token-level-refused")
def test_temporal_estimators_are_refused():
    batch = StepBatch.from_generator_output(worked_output())
    with pytest.raises(ValueError, match="temporal"):
        compute_advantages(batch, estimator="gae")


@pytest.mark.spec("advantage.batch-normalize")
def test_batch_normalization_uses_masked_mean_and_variance():
    values = torch.tensor([1.0, 3.0, float("nan"), 1e6])
    mask = torch.tensor([1, 1, 0, 0], dtype=torch.uint8)
    assert normalize_advantages(values, mask).tolist() == [-1.0, 1.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.floats(-5, 5, width=32), st.booleans()), max_size=40))
def test_batch_normalization_ignores_padded_cells_and_padding_rows(cells):
    values = torch.tensor([v for v, _ in cells], dtype=torch.float32)
    mask = torch.tensor([m for _, m in cells], dtype=torch.uint8)
    got = normalize_advantages(values, mask)
    alone = normalize_advantages(values[mask != 0], torch.ones(int(mask.sum()), dtype=torch.uint8))
    torch.testing.assert_close(got[mask != 0], alone)
    assert got[mask == 0].count_nonzero() == 0


def test_batch_normalization_without_trained_tokens_is_zero():
    values, mask = torch.tensor([2.0, 3.0]), torch.zeros(2, dtype=torch.uint8)
    assert normalize_advantages(values, mask).tolist() == [0.0, 0.0]


# --- section 7: mini-batches and micro-batches --------------------------------------------------


@pytest.mark.spec("update.worked-example")
def test_mini_batch_example():
    uids = ["p0"] * 4 + ["p1"] * 2 + ["p2"] * 3 + ["p3"] * 2
    assert mini_batch_boundaries(uids, 2) == [(0, 6), (6, 11)]


@pytest.mark.spec("update.mini-batch-size", "update.bad-sizes")
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 12))
def test_mini_batch_has_exactly_the_given_number_of_prompts(sizes, mini_batch_size):
    uids = [f"p{i}" for i, size in enumerate(sizes) for _ in range(size)]
    if len(sizes) % mini_batch_size:
        with pytest.raises(ValueError, match="must divide the number of prompts"):
            mini_batch_boundaries(uids, mini_batch_size)
        return
    boundaries = mini_batch_boundaries(uids, mini_batch_size)
    assert len(boundaries) == len(sizes) // mini_batch_size
    assert [len(set(uids[a:b])) for a, b in boundaries] == [mini_batch_size] * len(boundaries)
    assert [a for a, _ in boundaries] == [0, *(b for _, b in boundaries[:-1])]
    assert boundaries[-1][1] == len(uids)


@pytest.mark.spec("update.bad-sizes")
def test_non_contiguous_prompts_are_refused():
    with pytest.raises(ValueError, match=r"next to each other, got prompt 'p' again in row 2"):
        mini_batch_boundaries(["p", "q", "p"], 1)


def test_mini_batches_are_numbered_from_0():
    batch = StepBatch.from_generator_output(default_output(), uids=DEFAULT_UIDS)
    parts = batch.mini_batches(1)
    assert [p.num_rows for p in parts] == [2, 2]
    assert [p.uids for p in parts] == [("p",), ("q",)]
    assert parts[1].tokens.tolist() == [3, 9, 3, 9, 9]
    assert parts[1].group_ids.tolist() == [0, 0]
    assert parts[1].trajectory_ids.tolist() == [0, 1]
    assert parts[1].cu_responses.tolist() == [0, 1, 3]


@pytest.mark.spec("update.micro-batches")
@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 120), st.integers(1, 4))
def test_parts_are_within_the_budget_and_as_many_as_ranks_can_share(loads, budget, num_ranks):
    parts, number = balance_parts(np.array(loads, np.int64), budget, multiple=num_ranks)
    assert number % num_ranks == 0 and number >= num_ranks
    assert parts.shape == (len(loads),) and set(parts.tolist()) <= set(range(number))
    sums = np.bincount(parts, loads, minlength=number)
    counts = np.bincount(parts, minlength=number)
    assert all(load <= budget or count == 1 for load, count in zip(sums, counts, strict=True))
    assert sums.tolist() == sorted(sums.tolist(), reverse=True)


def test_parts_are_balanced():
    parts, number = balance_parts(np.array([9, 8, 7, 6, 5, 5]), 100, multiple=2)
    assert np.bincount(parts, [9, 8, 7, 6, 5, 5]).tolist() == [20, 20] and number == 2


# --- selecting rows, saving ----------------------------------------------------------------------


def with_everything() -> StepBatch:
    output = worked_output()
    output["rollout_expert_indices"] = [
        np.full((k, 2, 3), 100 * k, dtype=np.int16) for k in (2, 0, 1, 3, 4)
    ]
    batch = StepBatch.from_generator_output(output)
    some = torch.arange(7, dtype=torch.float32)
    return batch.with_(advantages=some, old_logprobs=-some, ref_logprobs=some / 2)


def test_rows_by_index_equal_rows_by_slice():
    batch = with_everything()
    assert_same(batch.rows(slice(1, 4)), batch.rows([1, 2, 3]))
    assert_same(batch.rows(slice(1, 4)), batch.rows(torch.tensor([False, True, True, True, False])))
    assert_same(batch.rows(slice(0, 0)), batch.rows([]))


def test_rows_in_another_order():
    part = with_everything().rows([3, 0])
    assert part.tokens.tolist() == [1, 2, 4, 9, 5, 5, 1, 2, 3]
    assert part.cu_seqlens.tolist() == [0, 6, 9]
    assert part.advantages.tolist() == [4.0, 5.0, 0.0]
    assert part.expert_indices[:, 0, 0].tolist() == [300, 300, 300, 200, 200]
    assert part.cu_experts.tolist() == [0, 3, 5]
    assert part.stop_reasons == ("stop", "stop")


@pytest.mark.parametrize("index", [[5], [-1], [True, False]])
def test_row_index_out_of_range_is_refused(index):
    with pytest.raises(ValueError, match="rows"):
        with_everything().rows(index)


def test_trajectories_are_counted_in_any_order():
    batch = with_everything()
    backwards = batch.rows(range(batch.num_rows - 1, -1, -1))
    assert backwards.num_trajectories == batch.num_trajectories == 2


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_responses", "cu_experts"])
def test_offsets_that_do_not_end_at_the_last_element_are_refused(name, tmp_path):
    batch = with_everything()
    wrong = getattr(batch, name).clone()
    wrong[-1] -= 1
    batch.with_(**{name: wrong}).save(tmp_path / "batch")
    with pytest.raises(
        ValueError, match=f"StepBatch.load: {name}: expected non-decreasing offsets"
    ):
        StepBatch.load(tmp_path / "batch")
    if name != "cu_experts":
        with pytest.raises(ValueError, match=f"{name}: expected non-decreasing offsets"):
            batch.with_(**{name: wrong}, advantages=None).merged()


def test_save_and_load_round_trip(tmp_path):
    batch = with_everything()
    batch.save(tmp_path / "batch.safetensors")
    assert_same(StepBatch.load(tmp_path / "batch.safetensors"), batch)
    assert [p.name for p in tmp_path.iterdir()] == ["batch.safetensors"]


def test_load_refuses_other_files(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not a safetensors file"):
        StepBatch.load(path)


def test_inconsistent_batch_is_refused():
    batch = with_everything()
    with pytest.raises(ValueError, match=r"advantages: expected shape \(7,\), got \(6,\)"):
        batch.with_(advantages=torch.zeros(6))
    with pytest.raises(ValueError, match=r"rewards: expected torch.float32, got torch.float64"):
        batch.with_(rewards=torch.zeros(7, dtype=torch.float64))
