"""convert_prompts_responses_to_batch_tensors and router_padding_mask."""

import inspect
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast import convert_prompts_responses_to_batch_tensors, pad_batch, router_padding_mask

NAMES = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask", "logprobs")
PAD = 99
# Prompts of 2 and 1 tokens, responses of 1 and 3.
TWO_ROWS = {
    "prompts": [[1, 2], [3]],
    "responses": [[4], [5, 6, 7]],
    "rewards": [[1.0], [0.0, 0.0, 2.0]],
    "loss_masks": [[1], [1, 0, 1]],
}


def routes_of(*values: int, top_k: int = 2, dtype: type = np.int64) -> np.ndarray:
    """One layer; token t goes to the experts values[t], values[t] + 1, ..."""
    return np.array(values, dtype)[:, None, None] + np.arange(top_k, dtype=dtype)


@pytest.mark.spec("batch.seven-tensors", "batch.worked-example")
def test_table(backend: str) -> None:
    out = convert_prompts_responses_to_batch_tensors(
        PAD, **TWO_ROWS, logprobs=[[-1.0], [-2.0, -3.0, -4.0]], backend=backend
    )
    assert out[0].tolist() == [[PAD, 1, 2, 4], [3, 5, 6, 7]]
    assert out[1].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert out[2].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert out[3].tolist() == [[0, 0, 1], [0, 0, 2]]
    assert out[4].tolist() == [[0, 0, 1], [1, 0, 1]]
    assert out[5].tolist() == [[0, 0, -1], [-2, -3, -4]]
    assert out[6] is None
    assert [t.dtype for t in out[:3]] == [torch.int64] * 3
    assert [t.dtype for t in out[3:6]] == [torch.float32] * 3


@pytest.mark.spec("batch.left-padding")
def test_width_is_the_length_of_the_longest_row(backend: str) -> None:
    rows = {"rewards": [[0.0], [0.0] * 5], "loss_masks": [[1], [1] * 5]}
    out = convert_prompts_responses_to_batch_tensors(
        0, [[1] * 5, [1]], [[2], [2] * 5], **rows, backend=backend
    )
    assert out[0].shape == (2, 6)


def test_pad_token_of_the_tokenizer_is_used() -> None:
    tokenizer = SimpleNamespace(pad_token_id=PAD)
    out = convert_prompts_responses_to_batch_tensors(tokenizer, *TWO_ROWS.values())
    assert out[0][0, 0] == PAD


@pytest.mark.parametrize("logprobs", [None, []])
def test_no_logprobs_stay_none(logprobs: list | None) -> None:
    assert convert_prompts_responses_to_batch_tensors(0, *TWO_ROWS.values(), logprobs)[5] is None


def test_row_reward_is_on_the_last_token(backend: str) -> None:
    rows = {**TWO_ROWS, "rewards": [1.5, -2]}
    out = convert_prompts_responses_to_batch_tensors(PAD, **rows, backend=backend)
    assert out[3].tolist() == [[0, 0, 1.5], [0, 0, -2]]


def test_empty_responses_and_prompts_are_rows(backend: str) -> None:
    out = convert_prompts_responses_to_batch_tensors(
        PAD, [[1], []], [[], []], [[], []], [[], []], [[], []], backend=backend
    )
    assert out[0].tolist() == [[1], [PAD]]
    assert [t.shape for t in out[2:6]] == [(2, 0)] * 4


@pytest.mark.spec("batch.no-truncation")
def test_row_longer_than_max_seq_len_is_kept_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        out = convert_prompts_responses_to_batch_tensors(0, *TWO_ROWS.values(), max_seq_len=3)
    assert out[0].shape == (2, 4)
    assert "over max_seq_len 3" in caplog.text


# --- router replay ---------------------------------------------------------------------------


@pytest.mark.spec("batch.expert-indices", "batch.dummy-route")
@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(255, torch.uint8), (256, torch.int16), (32767, torch.int16), (32768, torch.int32)],
)
def test_routes_cover_the_first_tokens(largest: int, dtype: torch.dtype) -> None:
    routes = [routes_of(7, 8), routes_of(5, 6, largest - 1)]
    out = convert_prompts_responses_to_batch_tensors(0, **TWO_ROWS, rollout_expert_indices=routes)
    dummy = [0, 1]
    assert out[6].dtype == dtype
    assert out[6][:, :, 0].tolist() == [
        [dummy, [7, 8], [8, 9], dummy],
        [[5, 6], [6, 7], [largest - 1, largest], dummy],
    ]
    assert router_padding_mask(routes, out[1]).tolist() == [
        [True, False, False, True],
        [False, False, False, True],
    ]


@pytest.mark.spec("batch.row-without-routes")
@pytest.mark.parametrize("empty", [None, [], np.zeros((0, 1, 2), np.uint8)])
def test_row_without_routes(empty: object) -> None:
    routes = [empty, routes_of(5, 6, 7).tolist()]
    out = convert_prompts_responses_to_batch_tensors(0, **TWO_ROWS, rollout_expert_indices=routes)
    assert out[6][0, :, 0].tolist() == [[0, 1]] * 4
    assert router_padding_mask(routes, out[1])[0].all()


def test_routes_without_any_shape_are_none() -> None:
    out = convert_prompts_responses_to_batch_tensors(
        0, **TWO_ROWS, rollout_expert_indices=[None, None]
    )
    assert out[6] is None


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([routes_of(1)], "one entry per row .2., got 1"),
        ([routes_of(1, 2, 3, 4), None], "at most one route per token, got 4 for 3 tokens in row 0"),
        ([routes_of(1), routes_of(1, top_k=3)], "agree in layers .* in row 1"),
        ([routes_of(-1), None], "rollout_expert_indices, row 0, position 0"),
        ([np.zeros((1, 2)), None], "integers of shape .tokens, L, K."),
        ([routes_of(2**31), None], "rollout_expert_indices, row 0"),
    ],
)
def test_invalid_routes_error_names_the_row(routes: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert_prompts_responses_to_batch_tensors(0, **TWO_ROWS, rollout_expert_indices=routes)


# --- padding rows without a copy -------------------------------------------------------------


@pytest.mark.parametrize("mode", ["repeat", "cheap"])
@pytest.mark.parametrize("pad_size", [1, 5])
def test_padding_rows_equal_those_of_pad_batch(mode: str, pad_size: int, backend: str) -> None:
    rows = {**TWO_ROWS, "logprobs": [[-1.0], [-2.0, -3.0, -4.0]]}
    routes = [routes_of(3, 4), None]
    plain = convert_prompts_responses_to_batch_tensors(
        PAD, **rows, rollout_expert_indices=routes, backend=backend
    )
    out = convert_prompts_responses_to_batch_tensors(
        PAD,
        **rows,
        rollout_expert_indices=routes,
        pad_size=pad_size,
        pad_mode=mode,
        backend=backend,
    )
    names = (*NAMES, "rollout_expert_indices")
    wanted = pad_batch(dict(zip(names, plain, strict=True)), pad_size, mode=mode)
    for name, tensor in zip(names, out, strict=True):
        assert torch.equal(tensor, wanted[name]), name


# --- every backend and input type ----------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(0, 2**32),
    st.sampled_from(["list", "numpy", "torch", "flat"]),
)
def test_every_input_type_equals_the_reference(
    sizes: list[tuple[int, int]], seed: int, source: str
) -> None:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 2**31, size).tolist() for size, _ in sizes]
    responses = [rng.integers(0, 2**31, size).tolist() for _, size in sizes]
    floats = [rng.normal(size=size).tolist() for _, size in sizes]
    masks = [rng.integers(0, 2, size).tolist() for _, size in sizes]
    wanted = convert_prompts_responses_to_batch_tensors(
        PAD, prompts, responses, floats, masks, floats, backend="torch"
    )

    def given_as(rows: list[list], dtype: type) -> object:
        arrays = [np.array(row, dtype) for row in rows]
        cu = np.cumsum([0, *map(len, rows)])
        return {
            "list": rows,
            "numpy": arrays,
            "torch": [torch.from_numpy(array) for array in arrays],
            "flat": (np.concatenate(arrays), cu),
        }[source]

    out = convert_prompts_responses_to_batch_tensors(
        PAD,
        given_as(prompts, np.int64),
        given_as(responses, np.int32),
        given_as(floats, np.float64),
        given_as(masks, np.uint8),
        given_as(floats, np.float32),
    )
    for name, tensor, reference in zip(NAMES, out[:6], wanted[:6], strict=True):
        assert torch.equal(tensor, reference), name


def test_large_batch_uses_threads_and_equals_the_reference() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, size).tolist() for size in rng.integers(1, 2000, 300)]
    responses = [rng.integers(0, 1000, size).tolist() for size in rng.integers(0, 200, 300)]
    rows = [[0.5] * len(row) for row in responses]
    wanted = convert_prompts_responses_to_batch_tensors(
        PAD, prompts, responses, rows, rows, backend="torch"
    )
    threads = torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            out = convert_prompts_responses_to_batch_tensors(PAD, prompts, responses, rows, rows)
            for tensor, reference in zip(out[:5], wanted[:5], strict=True):
                assert torch.equal(tensor, reference)
    finally:
        torch.set_num_threads(threads)


# --- hostile input ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"prompts": [], "responses": [], "rewards": [], "loss_masks": []},
            ValueError,
            "at least one",
        ),
        ({"prompts": [[1]]}, ValueError, "equally many rows"),
        ({"rewards": [[1.0]]}, ValueError, "rewards: expected one entry per row .2., got 1"),
        ({"rewards": [1.0]}, ValueError, "rewards: expected one entry per row .2., got 1"),
        (
            {"rewards": [[1.0], [1.0]]},
            ValueError,
            "rewards: expected as many entries as responses .* row 1",
        ),
        ({"rewards": [[1.0], 2.0]}, TypeError, "rewards, row 1"),
        ({"rewards": [1.0, [2.0]]}, TypeError, "rewards, row 0, position 1"),
        ({"rewards": None}, TypeError, "rewards"),
        ({"rewards": [[None], [0, 0, 0]]}, TypeError, "rewards, row 0, position 0"),
        (
            {"loss_masks": [[1, 1], [1, 1, 1]]},
            ValueError,
            "loss_masks: expected as many entries as responses",
        ),
        ({"logprobs": [[0.0], None]}, TypeError, "logprobs, row 1"),
        ({"prompts": [[1, -2], [3]]}, ValueError, "prompts, row 0, position 1.* got int -2"),
        ({"responses": [[4], [5, 2**70, 7]]}, ValueError, "responses, row 1, position 1"),
        ({"responses": [[4], [5, True, 7]]}, TypeError, "responses, row 1, position 1"),
        ({"prompts": [[1, 2], np.array([-1])]}, ValueError, "prompts, row 1, position 0"),
        (
            {"vocab_size": 7},
            ValueError,
            "responses, row 1, position 2: expected an integer from 0 to 6",
        ),
        ({"pad_token_id": None}, TypeError, "pad_token_id"),
        ({"pad_token_id": 2**40}, ValueError, "pad_token_id"),
        ({"pad_size": -1}, ValueError, "pad_size: expected at least 0, got -1"),
        ({"pad_mode": "free"}, ValueError, "'free'"),
    ],
)
def test_invalid_input_error_names_the_argument(
    changes: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        convert_prompts_responses_to_batch_tensors(**{"pad_token_id": 0, **TWO_ROWS, **changes})


@pytest.mark.spec("output.reward-of-empty-response")
def test_reward_of_an_empty_response_is_kept() -> None:
    rows = ([[1], [2]], [[3], []], [0.0, 1.0], [[1], []])
    with pytest.raises(ValueError, match=r"rewards: expected 0 for an empty response .* row 1"):
        convert_prompts_responses_to_batch_tensors(0, *rows)


# --- SkyRL ---------------------------------------------------------------------------------------


@pytest.mark.peers
def test_equals_skyrl() -> None:
    from bench.baselines.pack import skyrl_convert

    convert, source = skyrl_convert()
    if source != "skyrl":
        pytest.skip("SkyRL is not installed")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, size).tolist() for size in rng.integers(1, 90, 40)]
    responses = [rng.integers(0, 1000, size).tolist() for size in rng.integers(1, 60, 40)]
    floats = [rng.normal(size=len(row)).tolist() for row in responses]
    masks = [rng.integers(0, 2, len(row)).tolist() for row in responses]
    rows = (prompts, responses, floats, masks, floats)
    takes_id = "pad_token_id" in inspect.signature(convert).parameters  # up to 0.3.0 a tokenizer
    wanted = convert(PAD if takes_id else SimpleNamespace(pad_token_id=PAD), *rows)
    for pad in (PAD, SimpleNamespace(pad_token_id=PAD)):
        got = convert_prompts_responses_to_batch_tensors(pad, *rows)
        for ours, original in zip(got[:6], wanted[:6], strict=True):
            assert torch.equal(ours, original)
