"""One response through weight updates: what was sampled before one stays, the rest comes after it.

An update interrupts the requests in the engine. Each gives the tokens that it has; they become
part of the next request's prompt, whose keys and values are computed by the new policy. So the
policy version of every token is known, and its log-probability is exactly that policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.protocol import EngineError, Generation, Sampler
from skyrl_fast.rollout.engine.weight_gate import WeightGate
from skyrl_fast.rollout.stop_reason import INTERRUPTED


@dataclass(frozen=True, slots=True)
class VersionedGeneration:
    """A whole response, and the policy version of each of its tokens."""

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
    seed_of_part: Callable[[int], int],
    expert_indices_start: int = 0,
) -> VersionedGeneration:
    """Return one response, sampled in as many parts as there were interruptions plus one.

    Args:
        tokenizer: tells whether a part ends in the middle of a stop string.
        sampling: of the whole response.
        seed_of_part: the seed of part 0, 1, ...
        expert_indices_start: as for `Engine.generate`.

    Raises:
        EngineError: the engine failed the request, or gave an interrupted part more tokens than
            were asked for.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    routes: np.ndarray | None = None
    number = 0
    while True:
        left = sampling.max_generate_length - len(ids)
        if left < 1:
            raise EngineError(f"session {session_id}: interrupted, but there is no room for more")
        async with gate.request() as version:
            part = await engine.generate(
                [*prompt_token_ids, *ids],
                replace(sampling, max_generate_length=left),
                session_id=session_id,
                policy_version=version,
                seed=seed_of_part(number),
                expert_indices_start=expert_indices_start,
            )
        kept = len(part.token_ids)
        if part.stop_reason == INTERRUPTED:
            # All of it may be there already, when it is interrupted in that moment.
            kept = min(kept, left - 1)
            kept -= _half_a_stop_string(
                tokenizer, [*ids, *part.token_ids[:kept]], sampling.stop or ()
            )
            kept = max(kept, 0)
        ids += part.token_ids[:kept]
        logprobs += part.logprobs[:kept]
        versions += [version] * kept
        routes = _joined(routes, part, len(prompt_token_ids) + len(ids))
        if part.stop_reason != INTERRUPTED:
            whole = replace(part, token_ids=ids, logprobs=logprobs, expert_indices=routes)
            return VersionedGeneration(whole, versions)
        number += 1


def _half_a_stop_string(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str]) -> int:
    """How many tokens at the end may belong to a stop string that has only begun.

    The engine looks for stop strings in what one request samples. These tokens are sampled again,
    so that a stop string lies within one request.
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
    """Recorded routes stay; of the new part's only the rows beyond them are added."""
    if part.expert_indices is None:
        return routes
    rows = part.expert_indices
    if routes is not None:
        rows = np.concatenate([routes, rows[len(routes) :]])
    return rows[: max(0, num_tokens - 1 - part.expert_indices_start)]
