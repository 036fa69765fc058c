"""One response across weight updates: tokens sampled before an update stay, the rest follows.

An update interrupts the requests in the engine. Each returns the tokens that it has; they become
part of the next request's prompt, whose keys and values the new policy computes. So the policy
version of every token is known, and its log-probability is exactly that policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.protocol import EngineError, Generation, Sampler
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.stop_reason import INTERRUPTED


@dataclass(frozen=True, slots=True)
class VersionedGeneration:
    """A complete response, and the policy version of each of its tokens."""

    generation: Generation
    versions: list[int]


async def generate_through_updates(
    engine: Sampler,
    gate: WeightGate,
    tokenizer: Any,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    session_id: str,
    part_seed: Callable[[int], int],
    expert_indices_start: int = 0,
) -> VersionedGeneration:
    """Return one response, sampled in as many parts as there were interruptions plus one.

    Args:
        engine, gate: of the policy.
        tokenizer: detects parts that end in the middle of a stop string.
        prompt_token_ids: the full context.
        sampling: of the complete response.
        session_id: of the trajectory.
        part_seed: returns the seed of part 0, 1, ...
        expert_indices_start: as for `Engine.generate`.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    routes: np.ndarray | None = None
    kept_ids: list[np.ndarray] = []
    number_cached: int | None = None  # of the first part: later ones find what it computed
    number = 0
    while True:
        left = sampling.max_generate_length - len(ids)
        if left < 1:
            raise EngineError(f"session {session_id}: interrupted, but there is no room for more")
        async with gate.request() as version:
            part = await engine.generate(
                [*prompt_token_ids, *ids] if ids else prompt_token_ids,
                replace(sampling, max_generate_length=left),
                session_id=session_id,
                policy_version=version,
                seed=part_seed(number),
                expert_indices_start=expert_indices_start,
            )
        kept = len(part.token_ids)
        if part.stop_reason == INTERRUPTED:
            # Interrupted at the last moment, it may already have all of its tokens.
            kept = min(kept, left - 1)
            kept -= _partial_stop_string(
                tokenizer, [*ids, *part.token_ids[:kept]], sampling.stop or ()
            )
            # The next part's grammar begins with it.
            kept = 0 if sampling.is_structured else max(kept, 0)
        ids += part.token_ids[:kept]
        logprobs += part.logprobs[:kept]
        versions += [version] * kept
        kept_ids += (part.kept_ids or [])[:kept]
        if number == 0:
            number_cached = part.num_cached_tokens
        routes = _joined(routes, part, len(prompt_token_ids) + len(ids))
        if part.stop_reason != INTERRUPTED:
            complete = replace(
                part,
                token_ids=ids,
                logprobs=logprobs,
                expert_indices=routes,
                kept_ids=kept_ids or None,
                num_cached_tokens=number_cached,
            )
            return VersionedGeneration(complete, versions)
        number += 1


def _partial_stop_string(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str]) -> int:
    """Return the number of tokens at the end that may be the beginning of a stop string.

    The engine looks for stop strings within one request. These tokens are sampled again, so that a
    stop string is never split between two requests.
    """
    if not stop or not token_ids:
        return 0
    longest = max(map(len, stop))
    for number in range(min(len(token_ids), longest), 0, -1):
        tail = tokenizer.decode(list(token_ids[-number:]), skip_special_tokens=True).lstrip()
        if tail and any(text != tail and text.startswith(tail) for text in stop):
            return number
    return 0


def _joined(routes: np.ndarray | None, part: Generation, num_tokens: int) -> np.ndarray | None:
    """Return the recorded routes, followed by those rows of the new part that are beyond them."""
    if part.expert_indices is None:
        return routes
    rows = part.expert_indices
    if routes is not None:
        rows = np.concatenate([routes, rows[len(routes) :]])
    return rows[: max(0, num_tokens - 1 - part.expert_indices_start)]
