"""The check of an engine's answer before it becomes part of a trajectory."""

from __future__ import annotations

import math
from typing import Any

from skyrl_fast.rollout.engine.protocol import EngineError, Generation
from skyrl_fast.rollout.stop_reason import INTERRUPTED

STOP_REASONS = ("stop", "length", INTERRUPTED)
MAX_TOKEN_ID = 2**31 - 1  # that tensors of ids can hold
# Logprobs are at most 0, up to the rounding of a log-softmax in 16 bits.
LOGPROB_ROUNDING = 1e-2


def checked_generation(
    generation: Generation, *, max_tokens: int, vocab_size: int | None, source: str
) -> Generation:
    """Return the generation if it can be trained on.

    Args:
        generation: as the engine gave it; its values may be of any type.
        max_tokens: that were asked for.
        vocab_size: of the model; None: unknown.
        source: engine and session, for the error.

    Raises:
        EngineError: a value is of another type, not finite or out of range.
    """
    problem = _problem(generation, max_tokens, vocab_size)
    if problem:
        raise EngineError(f"{source}: {problem}")
    return generation


def _problem(generation: Generation, max_tokens: int, vocab_size: int | None) -> str:
    """Return what is wrong, or ""."""
    ids, logprobs = generation.token_ids, generation.logprobs
    reason = generation.stop_reason
    if reason not in STOP_REASONS or len(ids) != len(logprobs):
        return f"ended with {reason!r:.80}, {len(ids)} tokens and {len(logprobs)} logprobs"
    if len(ids) > max_tokens:
        return f"wanted at most {max_tokens} tokens, got {len(ids)}"
    limit = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    for position, token in enumerate(ids):
        if not _is_number(token, int) or not 0 <= token < limit:
            return f"token {position}: wanted an id from 0 to {limit - 1}, got {token!r:.80}"
    for position, logprob in enumerate(logprobs):
        if not _is_number(logprob, int | float) or not _is_logprob(logprob):
            return f"logprob {position}: wanted a finite number of at most 0, got {logprob!r:.80}"
    return ""


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_logprob(value: float) -> bool:
    return -math.inf < value <= LOGPROB_ROUNDING  # false for NaN
