"""SkyRL's functions and their replacements give the same results and errors on random inputs."""

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from _skyrl_cases import FLOATS, assert_same_outcome, generator_outputs, outcome, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_fast.integrations import skyrl as ours
from skyrl_fast.integrations.skyrl.names import NEWEST
from skyrl_fast.integrations.skyrl.replacement import ORIGINALS

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True, scope="module")
def there_is_skyrl() -> None:
    pytest.importorskip("skyrl.train.generators.utils", reason="SkyRL is not installed")


EXAMPLES = int(os.environ.get("SKYRL_FAST_FUZZ_EXAMPLES", "1000"))
fuzz = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


def original(name: str) -> Any:
    function = ORIGINALS.function(name)
    if function is None:
        pytest.skip(f"this SkyRL has no {name}")
    return function


@fuzz
@given(generator_outputs(), st.booleans(), st.integers(0, 1), st.booleans(), st.data())
@pytest.mark.spec("dropin.compat")
def test_validate(
    output: dict, step_wise: bool, more: int, expected: bool, data: st.DataObject
) -> None:
    args = (len(output.get("response_ids") or []) + more, output, step_wise, *routed(expected))
    if data.draw(st.booleans()):
        output["rollout_expert_indices"] = data.draw(routes(output))
    assert_same_outcome(
        outcome(original("validate_generator_output"), *args),
        outcome(ours.validate_generator_output, *args),
    )


def routed(expected: bool) -> tuple[bool, ...]:
    """Return the argument routes_expected, where SkyRL's functions have it."""
    newest = ORIGINALS.label("validate_generator_output") == NEWEST
    return (expected,) if newest else ()


@fuzz
@given(
    st.lists(generator_outputs(), min_size=0, max_size=3), st.booleans(), st.booleans(), st.data()
)
def test_concatenate(
    outputs: list[dict], step_wise: bool, expected: bool, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):
        for output in outputs[: data.draw(st.integers(0, 3))]:
            output["rollout_expert_indices"] = data.draw(routes(output))
    assert_same_outcome(
        outcome(original("concatenate_generator_outputs"), outputs, step_wise, *routed(expected)),
        outcome(ours.concatenate_generator_outputs, outputs, step_wise, *routed(expected)),
    )


@fuzz
@given(generator_outputs(odd=False), st.sampled_from([0, 1]))
def test_merge(output: dict, keep_times: int) -> None:
    if not keep_times:
        output.pop("trajectory_time_splits", None)
    assert_same_outcome(
        outcome(original("merge_stepwise_output"), output),
        outcome(ours.merge_stepwise_output, output),
    )


@fuzz
@given(generator_outputs())
def test_merge_of_odd_outputs(output: dict) -> None:
    assert_same_outcome(
        outcome(original("merge_stepwise_output"), output),
        outcome(ours.merge_stepwise_output, output),
    )


@fuzz
@given(generator_outputs(), st.booleans())
def test_metrics(output: dict, times: bool) -> None:
    args = [output.get(key) for key in ("response_ids", "rewards")]
    extras = {"loss_masks": output.get("loss_masks")}
    if times:
        extras["trajectory_completion_times"] = output.get("trajectory_generation_times")
    assert_same_outcome(
        outcome(original("get_rollout_metrics"), *args, **extras),
        outcome(ours.get_rollout_metrics, *args, **extras),
    )
    uids = [str(i // 2) for i in range(40)]
    assert_same_outcome(
        outcome(original("get_metrics_from_generator_output"), output, uids),
        outcome(ours.get_metrics_from_generator_output, output, uids),
    )


class Tokenizer:
    pad_token_id = 7


@fuzz
@given(generator_outputs(), st.sampled_from([7, 0, "tokenizer"]), st.data())
def test_convert(output: dict, pad: Any, data: st.DataObject) -> None:
    name = "convert_prompts_responses_to_batch_tensors"
    function = original(name)
    if data.draw(st.booleans()) or ORIGINALS.label(name) == "0.2.0":
        pad = Tokenizer()
    fields = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
    args = [output.get(field) for field in fields]
    if data.draw(st.booleans()):
        args.append(data.draw(routes(output)))
        if ORIGINALS.label(name) == NEWEST:
            args.append(output.get("rollout_sample_support"))
    assert_same_outcome(
        outcome(function, pad, *args),
        outcome(ours.convert_prompts_responses_to_batch_tensors, pad, *args),
    )


@st.composite
def routes(draw: st.DrawFn, output: dict) -> Any:
    """Draw an array (tokens, 2, 3) per row, sometimes too long, empty, or of another type."""
    arrays: list[Any] = []
    for prompt, response in zip(
        output.get("prompt_token_ids") or [], output.get("response_ids") or [], strict=False
    ):
        total = 0 if prompt is None or response is None else len(prompt) + len(response)
        rows = draw(st.integers(1 if draw(st.booleans()) else 0, max(1, total)))
        high = draw(st.sampled_from([4, 300, 40000]))
        dtype = draw(st.sampled_from([np.uint8, np.int32, np.int64]))
        arrays.append((np.arange(rows * 6) % high).astype(dtype).reshape(rows, 2, 3))
    if arrays and draw(st.integers(0, 4)) == 0:
        row = draw(st.integers(0, len(arrays) - 1))
        odd = [None, [], arrays[row].tolist(), arrays[row][:, :1], -arrays[row].astype(np.int64)]
        arrays[row] = odd[draw(st.integers(0, len(odd) - 1))]
    return draw(st.sampled_from([arrays, arrays[1:], tuple(arrays)]))


@fuzz
@given(st.data())
def test_router_padding_mask(data: st.DataObject) -> None:
    function = original("make_router_padding_mask")
    width = data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=4))
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    captured = [data.draw(st.integers(-1, n + 1)) for n in lengths]
    captured = data.draw(st.sampled_from([captured, [max(c, 0) for c in captured], captured[1:]]))
    mask = data.draw(st.sampled_from([mask, mask.bool(), mask.float(), mask[0]]))
    assert_same_outcome(
        outcome(function, mask, captured), outcome(ours.make_router_padding_mask, mask, captured)
    )


def packed(rows: int, width: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return SkyRL 0.4.0's PackedTensor with 1, 2, ... cells in its rows."""
    from skyrl.backends.skyrl_train.utils.packed_tensor import PackedTensor

    ends = torch.arange(1, rows + 1).cumsum(0)
    values = torch.arange(int(ends[-1]) * math.prod(width)).to(dtype).reshape(-1, *width)
    return PackedTensor(values, torch.cat([torch.zeros(1), ends]).int())


@fuzz
@given(st.data())
def test_pad(data: st.DataObject) -> None:
    from skyrl.backends.skyrl_train.training_batch import TensorList, TrainingInputBatch

    rows = data.draw(st.integers(1, 4))
    batch = TrainingInputBatch(
        {
            "sequences": torch.arange(rows * 3).reshape(rows, 3),
            "loss_mask": torch.ones(rows, 2),
            "rewards": torch.randn(rows, 2) if data.draw(st.booleans()) else None,
            "values": torch.ones(rows, 2, dtype=torch.bfloat16),
        }
    )
    if data.draw(st.booleans()):
        batch["pixel_values"] = TensorList([torch.ones(i + 1, 2) for i in range(rows)])
    if data.draw(st.booleans()):
        batch["rollout_expert_indices"] = torch.zeros(rows, 3, 2, 4, dtype=torch.uint8)
        if ORIGINALS.label("pad_training_input_batch") == NEWEST:
            batch["rollout_expert_indices"] = packed(rows, (2, 4), torch.uint8)
            batch["rollout_sample_support"] = packed(rows, (3,), torch.int32)
        batch["router_padding_mask"] = torch.zeros(rows, 3, dtype=torch.bool)
    metadata = {"uids": ["a"] * rows, "is_last_step": [True] * rows, "own": {"x": [1]}}
    if data.draw(st.booleans()):
        metadata["uids"] = tuple(metadata["uids"])
    batch.metadata = data.draw(st.sampled_from([metadata, None, {}]))
    pad_size = data.draw(st.sampled_from([0, 1, 2, 7, -1, True]))
    want = outcome(original("pad_training_input_batch"), batch, pad_size)
    got = outcome(ours.pad_training_input_batch, batch, pad_size)
    assert want[0] == got[0]
    if want[0] == "raises":
        assert want[1] is got[1]
        return
    assert type(want[1]) is type(got[1]) and want[1].metadata == got[1].metadata
    assert list(want[1]) == list(got[1])
    for name, value in want[1].items():
        value, mine = (getattr(v, "tensors", v) for v in (value, got[1][name]))
        assert same(value, mine), name


@fuzz
@given(
    st.lists(st.sampled_from("abcd"), max_size=9),
    st.integers(0, 3),
    st.integers(0, 4),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
def test_boundaries(
    uids: list[str], mini: int, total: int, step_wise: bool, samples: int, tidy: bool
) -> None:
    uids = sorted(uids) if tidy else uids
    total = len(set(uids)) if tidy else total
    args = (uids, mini, total, step_wise, samples)
    assert_same_outcome(
        outcome(original("compute_prompt_mini_batch_boundaries"), *args),
        outcome(ours.compute_prompt_mini_batch_boundaries, *args),
    )
    assert_same_outcome(
        outcome(original("compute_prompt_boundaries"), uids),
        outcome(ours.compute_prompt_boundaries, uids),
    )


@fuzz
@given(st.data(), st.sampled_from(["grpo", "rloo", "maxrl"]))
def test_estimators(data: st.DataObject, estimator: str) -> None:
    rows, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    kinds = [st.sampled_from([0.0, 1.0]), FLOATS, st.floats(100, 100.0078125, width=32)]
    kind = data.draw(st.sampled_from(kinds))
    rewards = torch.zeros(rows, width)
    rewards[:, -1] = torch.tensor([data.draw(kind) for _ in range(rows)])
    mask = torch.tensor([[int(c >= i % width) for c in range(width)] for i in range(rows)])
    mask = data.draw(st.sampled_from([mask, mask.float(), mask.bool(), mask.double()]))
    index = [data.draw(st.sampled_from("ab")) for _ in range(rows)]
    index = np.array(index) if data.draw(st.booleans()) else index
    extras = {"grpo_norm_by_std": data.draw(st.booleans()), "config": None, "values": None}
    name = {"grpo": "grpo_outcome", "rloo": "rloo_outcome", "maxrl": "maxrl"}[estimator]
    name = f"compute_{name}_advantage"
    assert_same_outcome(
        outcome(original(name), rewards, mask, index=index, **extras),
        outcome(getattr(ours, name), rewards, mask, index=index, **extras),
    )


@fuzz
@given(st.data())
def test_loss_reduction(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    mask = torch.randint(0, 2, (rows, width)).float() * data.draw(st.sampled_from([1.0, 0.5]))
    cut = data.draw(st.integers(0, rows))
    boundaries = data.draw(st.sampled_from([None, [(0, rows)], [(0, cut), (cut, rows)], []]))
    names = ["token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm"]
    reduction = data.draw(st.sampled_from([*names, "prompt_mean", "other"]))
    args = (torch.randn(rows, width), mask, reduction, 1, 17, boundaries)
    name = "apply_loss_reduction_to_advantages_minibatch"
    assert_same_outcome(
        outcome(original(name), *args),
        outcome(ours.apply_loss_reduction_to_advantages_minibatch, *args),
    )
