"""The check of an engine's answer before it becomes part of a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from skyrl_fast.rollout.engine.protocol import (
    EXCLUDED_LOGPROB,
    MAX_TOKEN_ID,
    EngineError,
    Generation,
)
from skyrl_fast.rollout.stop_reason import INTERRUPTED

STOP_REASONS = ("stop", "length", INTERRUPTED)
# Logprobs are at most 0, up to the rounding of a log-softmax in 16 bits.
LOGPROB_ROUNDING = 1e-2


def check_generation(
    generation: Generation,
    *,
    max_tokens: int,
    vocab_size: int | None,
    stop: Sequence[str] | str | None,
    source: str,
) -> Generation:
    """Return the generation, whose values may be of any type, if it can be trained on.

    Raises:
        EngineError: a value is of another type, not finite or out of range.
    """
    if vocab_size is None:
        limit = MAX_TOKEN_ID + 1
    else:
        limit = vocab_size
    stops = [stop] if isinstance(stop, str) else stop or ()
    problem = _find_problem(generation, max_tokens, limit, stops)
    if problem:
        raise EngineError(f"{source}: {problem}")
    return generation


def _find_problem(generation: Generation, max_tokens: int, limit: int, stops: Sequence[str]) -> str:
    ids = generation.token_ids
    logprobs = generation.logprobs
    reason = generation.stop_reason
    if reason not in STOP_REASONS or len(ids) != len(logprobs):
        return f"ended with {reason!r:.80}, {len(ids)} tokens and {len(logprobs)} logprobs"
    if len(ids) > max_tokens:
        return f"expected at most {max_tokens} tokens, got {len(ids)}"
    if generation.stop_string is not None and generation.stop_string not in stops:
        return f"stop string: expected one of the request, got {generation.stop_string!r:.80}"
    problem = _find_wrong_id(ids, limit) or _find_wrong_logprob(logprobs)
    if problem:
        return problem
    if generation.kept_ids is None:
        return ""
    return _find_problem_of_kept(generation.kept_ids, ids, limit)


def _find_wrong_id(ids: Sequence[Any], limit: int) -> str:
    # Responses are long: what is nearly always true is asked of all at once.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < limit:
        return ""
    for position, token in enumerate(ids):
        if not _is_number(token, int) or not 0 <= token < limit:
            return f"token {position}: expected an id from 0 to {limit - 1}, got {token!r:.80}"
    return ""


def _find_wrong_logprob(logprobs: Sequence[Any]) -> str:
    if set(map(type, logprobs)) == {float} and all(map(_is_logprob, logprobs)):
        return ""
    for position, logprob in enumerate(logprobs):
        if not _is_number(logprob, int | float) or not _is_logprob(logprob):
            return (
                f"logprob {position}: expected a number from {EXCLUDED_LOGPROB:g} to 0, "
                f"got {logprob!r:.80}"
            )
    return ""


def _find_problem_of_kept(kept_ids: list[np.ndarray], ids: list[int], limit: int) -> str:
    """Return what is wrong with the sets of kept tokens, each ascending and not empty; or ""."""
    if len(kept_ids) != len(ids):
        return f"expected {len(ids)} sets of kept tokens, got {len(kept_ids)}"
    for position, kept in enumerate(kept_ids):
        if kept[-1] >= limit:
            return f"kept tokens {position}: expected ids from 0 to {limit - 1}, got {kept[-1]}"
    return ""


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_logprob(value: float) -> bool:
    """Return whether it is one; servers write a large negative number in place of -inf and NaN."""
    return EXCLUDED_LOGPROB < value <= LOGPROB_ROUNDING  # false for NaN
