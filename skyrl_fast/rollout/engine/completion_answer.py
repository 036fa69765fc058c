"""Values of a server's answer, none of them trusted: numbers, log-probabilities, routes."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import numpy as np

from skyrl_fast.rollout.engine.protocol import EngineError, kept_tokens
from skyrl_fast.system.printable import shorten

# What hostile JSON and arrays can raise: missing and odd values, cut payloads, huge sizes, nesting.
_UNREADABLE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    EOFError,
    MemoryError,
    RecursionError,
    ArithmeticError,
)
ROUTE_DIMENSIONS = 3  # tokens, layers, experts per token
QUOTED_CHARACTERS = 500  # quoted from an answer in an error


class _SampledLogprobs(TypedDict, total=False):
    token_logprobs: Any


class _SampledChoice(TypedDict, total=False):
    token_ids: Any
    logprobs: _SampledLogprobs | None
    finish_reason: Any
    stop_reason: Any
    routed_experts: Any


class SampledAnswer(TypedDict, total=False):
    """What is read of an answer to a request for tokens, unless it has the kept ones."""

    choices: list[_SampledChoice]


def read_sampled(body: bytes) -> Any:
    """Return an answer to a request for tokens, without the fields that `SampledAnswer` lacks.

    vLLM repeats the prompt, and has an offset, a word and a table of one entry for each token: to
    make Python's objects of them takes most of a request's time. An answer of other types is
    returned as it is, for errors that name them.

    Raises:
        ValueError, RecursionError, MemoryError: it is no JSON.
    """
    try:
        import msgspec
    except ImportError:  # it comes with vLLM, which servers elsewhere may have alone
        return json.loads(body)
    try:
        return msgspec.json.decode(body, type=SampledAnswer)
    except (msgspec.MsgspecError, *_UNREADABLE):
        return json.loads(body)


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Raise EngineError for an answer that cannot be read."""
    try:
        yield
    except _UNREADABLE as error:
        reason = shorten(f"{type(error).__name__}: {error}", QUOTED_CHARACTERS)
        raise EngineError(f"{what} in another format than vLLM: {reason}") from error


def number(value: Any) -> float:
    """Return a number; raise TypeError for text, booleans and null, which float() would accept."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value)


def numbers(value: Any) -> list[float]:
    """Return a list of numbers as floats; raise TypeError for anything else."""
    values = entries(value)
    if set(map(type, values)) == {float}:
        return values
    return list(map(number, values))


def entries(value: Any) -> list[Any]:
    """Return a list; raise TypeError for anything else, such as text."""
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return value


def kept_ids(
    token_ids: Sequence[int], top_logprobs: Sequence[Mapping[str, float]]
) -> list[np.ndarray]:
    """Return the tokens that each token was sampled from; keys are such as "token_id:42"."""
    kept = []
    for token, row in zip(token_ids, top_logprobs, strict=True):
        candidates = np.array([int(key.removeprefix("token_id:")) for key in row], np.int64)
        kept.append(kept_tokens(token, candidates, np.array(list(map(number, row.values())))))
    return kept


def prompt_logprobs(choice: Mapping[str, Any], token_ids: Sequence[int]) -> list[float]:
    rows = entries(choice["prompt_logprobs"])[1:]
    result: list[float] = []
    for token, row in zip(token_ids[1:], rows, strict=True):
        result.append(number(row[str(token)]["logprob"]))
    return result


def prompt_entries(choice: Mapping[str, Any]) -> list[dict[int, float]]:
    """Return the log-probabilities by id, of each token of the prompt but the first."""
    if choice.get("prompt_logprobs") is None:
        raise ValueError("expected prompt_logprobs, got none: only vLLM's servers return them")
    result = []
    for row in entries(choice["prompt_logprobs"])[1:]:
        result.append({int(token): number(one["logprob"]) for token, one in row.items()})
    return result


def routes(choice: Mapping[str, Any]) -> np.ndarray | None:
    """Return the routes, integers [tokens, layers, experts per token]; None: there are none.

    Nothing is allocated before the payload is known to have the size that its header states.
    """
    encoded = choice.get("routed_experts")
    if encoded is None:
        return None
    if not isinstance(encoded, str):
        raise TypeError(f"routed_experts: expected text, got {type(encoded).__name__}")
    payload = io.BytesIO(base64.b64decode(encoded, validate=True))
    version = np.lib.format.read_magic(payload)
    if version != (1, 0):  # of every array without field names
        raise ValueError(f"routed_experts: expected format 1.0, got {version}")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(payload)
    if dtype.kind not in "iu" or len(shape) != ROUTE_DIMENSIONS or is_fortran:
        raise ValueError(
            f"routed_experts: expected integers [tokens, layers, K], got {dtype} {shape}"
        )
    data = payload.read()
    if min(shape) < 0 or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"routed_experts: {shape} of {dtype} do not fit {len(data)} bytes")
    indices = np.frombuffer(data, dtype).reshape(shape)
    if indices.size and indices.min() < 0:
        raise ValueError("routed_experts: negative expert")
    return indices
