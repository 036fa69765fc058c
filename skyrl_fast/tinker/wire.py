"""The Tinker SDK's messages: requests to arrays, arrays to answers.

The protobuf messages are those of the installed SDK. N positions of a datum, K targets per
position, D datums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

INSTALL_HINT = "skyrl-fast tinker needs the Tinker SDK: pip install 'skyrl-fast[tinker]'"
PROTOBUF = "application/x-protobuf"
OUTPUT_TYPE = "ArrayRecord"
EMPTY_TOPK = -99999.0  # logprob of a cell that has no token


class RefusedCallError(ValueError):
    """A call that the client must change before it can succeed: category `user`."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence and what a loss reads of it.

    Args:
        tokens: (N,) int32 input tokens.
        inputs: arrays by name, such as `target_tokens`; float32 or int64.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A call of `forward_backward`, or of `forward`."""

    model_id: str
    seq_id: int
    loss: str
    options: Mapping[str, float | str]
    datums: Sequence[Datum]
    forward_only: bool


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One answer of a sampler.

    Args:
        tokens, logprobs: n of them.
        stopped: whether it ended by itself; else by the limit of tokens.
        topk: (n, k) int32 ids and (n, k) float32 logprobs, or None.
    """

    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    topk: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """The answer to a call of `sample`.

    Args:
        prompt_logprobs: (P,) float32, NaN where none was computed; None: not asked for.
        topk_prompt: (P, k) int32 ids and (P, k) float32 logprobs, or None.
        num_cached: leading tokens of the prompt that were in the engine's cache.
    """

    sequences: list[SampledTokens]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt: tuple[np.ndarray, np.ndarray] | None = None
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """What `forward_backward` answers.

    Args:
        logprobs: of each datum, (N,) or (N, K) float32.
        metrics: named `name:reduction`, as the client combines those of several calls.
    """

    logprobs: list[np.ndarray]
    metrics: dict[str, float] = field(default_factory=dict)


def messages() -> Any:
    """Return the SDK's module of protobuf messages; ImportError without an SDK."""
    try:
        from tinker.proto import tinker_public_pb2
    except ImportError as error:
        raise ImportError(f"{INSTALL_HINT} ({error})") from error
    return tinker_public_pb2


def parse_forward_backward(body: bytes) -> Any:
    """Return the message in the body of a request; RefusedCallError if it is none."""
    from google.protobuf.message import DecodeError

    message = messages().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RefusedCallError(f"forward_backward: the body is no protobuf message: {error}") from (
            error
        )
    return message


def read_forward_backward(message: Any) -> ForwardBackward:
    """Return the call of a message.

    Raises:
        RefusedCallError: it has images, sounds or broken tensors.
    """
    options: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in getattr(message, "loss_fn_config_v2", {}).items():
        options[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss=message.loss_fn,
        options=options,
        datums=[_read_datum(datum, f"data[{n}]") for n, datum in enumerate(message.data)],
        forward_only=message.forward_only,
    )


def _read_datum(message: Any, where: str) -> Datum:
    chunks = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise RefusedCallError(
                f"{where}.model_input: expected text, got a chunk of {kind}: images and sounds are "
                "not served"
            )
        chunks.append(_array(chunk.encoded_text.tokens, np.int32, where))
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
    tensors = message.loss_fn_inputs
    inputs = {name: _read_tensor(tensors[name], f"{where}.{name}") for name in sorted(tensors)}
    return Datum(tokens, inputs)


def _read_tensor(message: Any, where: str) -> np.ndarray:
    kinds = messages()
    dtypes: dict[int, Any] = {
        kinds.DTYPE_FLOAT32: np.float32,
        kinds.DTYPE_INT64: np.int64,
        kinds.DTYPE_INT32: np.int32,
    }
    dtype = dtypes.get(message.dtype)
    if dtype is None:
        name = kinds.DType.Name(message.dtype)
        raise RefusedCallError(f"{where}: expected float32 or int64, got {name}")
    shape = tuple(message.shape)
    if message.HasField("sparse_csr"):
        return _dense(message.sparse_csr, dtype, shape, where)
    values = _array(message.dense, dtype, where)
    if not shape:
        return values
    if min(shape) < 0 or np.prod(shape, dtype=object) != values.size:
        raise RefusedCallError(f"{where}: expected values of shape {shape}, got {values.size}")
    return values.reshape(shape)


def _dense(message: Any, dtype: Any, shape: tuple[int, ...], where: str) -> np.ndarray:
    """Return the (N, K) array of a tensor in compressed rows; entries that it lacks are 0."""
    values = _array(message.values, dtype, where)
    ends = _array(message.crow_indices, np.int64, where)
    columns = _array(message.col_indices, np.int64, where)
    is_matrix = len(shape) == 2 and ends.size == shape[0] + 1
    if not is_matrix or columns.size != values.size:
        raise RefusedCallError(
            f"{where}: expected compressed rows of shape {shape}, got {ends.size} offsets, "
            f"{columns.size} columns, {values.size} values"
        )
    counts = np.diff(ends)
    in_order = ends[0] == 0 and ends[-1] == values.size and (counts >= 0).all()
    if not in_order or ((columns < 0) | (columns >= shape[1])).any():
        raise RefusedCallError(f"{where}: expected ascending offsets, and columns in {shape[1]}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _array(content: bytes, dtype: Any, where: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    if len(content) % size:
        raise RefusedCallError(
            f"{where}: expected values of {size} bytes, got {len(content)} bytes"
        )
    return np.frombuffer(content, dtype)


def write_loss_outputs(outputs: LossOutputs) -> bytes:
    """Return the answer to `forward_backward`: records of datums whose arrays are equally wide."""
    answer = messages().ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    for name, value in outputs.metrics.items():
        answer.metrics[name] = value
    for width, arrays in _by_width(outputs.logprobs):
        record = answer.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(arrays))
        batched = record.fields["logprobs"]
        batched.dtype = messages().DTYPE_FLOAT32
        batched.trailing_shape.extend(width)
        parts = [np.ascontiguousarray(array, np.float32).tobytes() for array in arrays]
        batched.data = b"".join(parts)
        sizes = [0, *(len(part) for part in parts)]
        batched.offsets = np.cumsum(sizes, dtype=np.int64).tobytes()
    return bytes(answer.SerializeToString())


def _by_width(
    arrays: Sequence[np.ndarray],
) -> Iterator[tuple[tuple[int, ...], list[np.ndarray]]]:
    for width, group in groupby(arrays, key=lambda array: array.shape[1:]):
        yield width, list(group)


def write_samples(samples: Samples) -> bytes:
    """Return the answer to `sample`."""
    kinds = messages()
    answer = kinds.SampleResponse()
    for sequence in samples.sequences:
        stop = kinds.STOP_REASON_STOP if sequence.stopped else kinds.STOP_REASON_LENGTH
        one = answer.sequences.add(stop_reason=stop)
        one.tokens = np.asarray(sequence.tokens, np.int32).tobytes()
        one.logprobs = np.asarray(sequence.logprobs, np.float32).tobytes()
        if sequence.topk is not None:
            _write_topk(one.topk_sampled_logprobs, *sequence.topk)
    if samples.prompt_logprobs is not None:
        answer.prompt_logprobs = samples.prompt_logprobs.astype(np.float32).tobytes()
    if samples.topk_prompt is not None:
        _write_topk(answer.topk_prompt_logprobs, *samples.topk_prompt)
    if "prompt_cache_hit_tokens" in answer.DESCRIPTOR.fields_by_name:
        answer.prompt_cache_hit_tokens = samples.num_cached
    return bytes(answer.SerializeToString())


def _write_topk(message: Any, ids: np.ndarray, logprobs: np.ndarray) -> None:
    message.length, message.k = ids.shape
    message.token_ids = np.ascontiguousarray(ids, np.int32).tobytes()
    message.logprobs = np.ascontiguousarray(logprobs, np.float32).tobytes()
