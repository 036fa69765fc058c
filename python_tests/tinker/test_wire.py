"""Protobuf messages to arrays and back, by the SDK's own conversions."""

from typing import Any

import numpy as np
import pytest
import torch

from skyrl_fast.tinker.wire import (
    LossOutputs,
    RefusedCallError,
    SampledTokens,
    Samples,
    messages,
    parse_forward_backward,
    read_forward_backward,
    write_loss_outputs,
    write_samples,
)

tinker = pytest.importorskip("tinker", reason="the Tinker SDK is not installed")


def request_of(datum: Any, **options: Any) -> bytes:
    from tinker.proto.request_conv import forward_backward_request_to_proto
    from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

    given = ForwardBackwardInput(data=[datum], loss_fn="ppo", loss_fn_config=options or None)
    request = ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=7)
    return forward_backward_request_to_proto(request).SerializeToString()


def test_a_request_is_read_as_it_was_written() -> None:
    weights = torch.eye(5, 40) * 0.5
    datum = tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints([3, 1]).append_int(4).append_int(5),
        loss_fn_inputs={
            "target_tokens": np.array([1, 2, 3, 4]),
            "weights": weights,
            "advantages": np.array([[1.5, -2.0]], np.float32),
        },
    )
    assert datum.loss_fn_inputs["weights"].sparse_crow_indices is not None
    call = read_forward_backward(parse_forward_backward(request_of(datum, beta=0.25, kind="a")))
    assert (call.model_id, call.seq_id, call.loss, call.forward_only) == ("m", 7, "ppo", False)
    assert call.options == {"beta": 0.25, "kind": "a"}
    (read,) = call.datums
    assert read.tokens.tolist() == [3, 1, 4, 5]
    assert read.inputs["target_tokens"].tolist() == [1, 2, 3, 4]
    assert read.inputs["target_tokens"].dtype == np.int64
    np.testing.assert_array_equal(read.inputs["weights"], weights.numpy())
    assert read.inputs["advantages"].tolist() == [[1.5, -2.0]]


def test_outputs_of_all_widths_keep_their_order() -> None:
    from tinker.proto.response_conv import deserialize_forward_backward_output

    random = np.random.default_rng(0)
    shapes = [(2,), (3,), (2, 4), (1, 4), (5, 1), (1,)]
    arrays = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    outputs = LossOutputs(arrays, {"loss:sum": 1.5})
    answer = deserialize_forward_backward_output(write_loss_outputs(outputs))
    assert answer.metrics == {"loss:sum": 1.5}
    got = [one["logprobs"].to_numpy() for one in answer.loss_fn_outputs]
    for one, expected in zip(got, arrays, strict=True):
        np.testing.assert_array_equal(one, expected)


def test_samples_are_written_as_the_client_reads_them() -> None:
    from tinker.proto.response_conv import deserialize_sample_response

    topk = (np.array([[4, 2]], np.int32), np.array([[-0.5, -1.5]], np.float32))
    samples = Samples(
        [
            SampledTokens([4], [-0.5], stopped=True, topk=topk),
            SampledTokens([1, 2], [-1.0, -2.0], stopped=False),
        ],
        prompt_logprobs=np.array([np.nan, -3.0]),
        topk_prompt=(np.zeros((2, 1), np.int32), np.array([[-99999.0], [-0.25]])),
        num_cached=3,
    )
    answer = deserialize_sample_response(write_samples(samples))
    assert [one.stop_reason for one in answer.sequences] == ["stop", "length"]
    assert [one.tokens for one in answer.sequences] == [[4], [1, 2]]
    assert [one.logprobs for one in answer.sequences] == [[-0.5], [-1.0, -2.0]]
    assert answer.sequences[0].topk_logprobs == [[(4, -0.5), (2, -1.5)]]
    assert answer.sequences[1].topk_logprobs is None
    assert answer.prompt_logprobs == [None, -3.0]
    assert answer.topk_prompt_logprobs == [None, [(0, -0.25)]]
    assert answer.prompt_cache_hit_tokens == 3


def broken_tensor(**fields: Any) -> bytes:
    message = messages().ForwardBackwardRequest(model_id="m", seq_id=1)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.ones(2, np.int32).tobytes()
    tensor = datum.loss_fn_inputs["weights"]
    tensor.dtype = fields.pop("dtype", messages().DTYPE_FLOAT32)
    tensor.shape.extend(fields.pop("shape", ()))
    for name, value in fields.items():
        if name == "dense":
            tensor.dense = value
        else:
            setattr(tensor.sparse_csr, name, np.array(value).tobytes())
    return bytes(message.SerializeToString())


BROKEN = {
    "bytes": ({"dense": b"abc"}, "expected values of 4 bytes, got 3 bytes"),
    "shape": (
        {"dense": np.ones(3, np.float32).tobytes(), "shape": (2,)},
        r"expected values of shape \(2,\), got 3",
    ),
    "negative shape": ({"dense": b"", "shape": (-1, 0)}, r"shape \(-1, 0\)"),
    "huge shape": ({"dense": b"", "shape": (2**40, 2**40)}, "expected values of shape"),
    "dtype": ({"dense": b"", "dtype": 4}, "expected float32 or int64, got DTYPE_BFLOAT16"),
    "column": (
        {
            "values": np.ones(1, np.float32),
            "crow_indices": [0, 1],
            "col_indices": [5],
            "shape": (1, 2),
        },
        "columns in 2",
    ),
    "offsets": (
        {
            "values": np.ones(1, np.float32),
            "crow_indices": [0, 2],
            "col_indices": [0],
            "shape": (1, 2),
        },
        "ascending offsets",
    ),
    "rows": (
        {
            "values": np.ones(1, np.float32),
            "crow_indices": [0],
            "col_indices": [0],
            "shape": (1, 2),
        },
        "expected compressed rows",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensors_are_refused(case: str) -> None:
    fields, message = BROKEN[case]
    with pytest.raises(RefusedCallError, match=message):
        read_forward_backward(parse_forward_backward(broken_tensor(**fields)))


def test_other_bytes_are_refused() -> None:
    with pytest.raises(RefusedCallError, match="no protobuf message"):
        parse_forward_backward(b"\xff" * 20)
