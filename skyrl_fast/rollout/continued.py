"""One response across weight updates: tokens sampled before an update stay, the rest follows.

An update interrupts the requests in the engine. Each returns the tokens that it has; they become
part of the next request's prompt, whose keys and values the new policy computes. So the policy
version of every token is known, and its log-probability is exactly that policy's.

Design: docs/design/018-asynchronous.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.protocol import EngineError, Generation, Sampler
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.stop_reason import INTERRUPTED
from skyrl_fast.rollout.tokenization import decode

REPLACEMENT_CHARACTER = "\ufffd"  # the text of a character whose bytes are incomplete


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
    policy: str | None = None,
) -> Generation:
    """Return one response with its versions, in as many parts as interruptions plus one.

    Args:
        tokenizer: detects parts that end in the middle of a stop string or bad word.

    Raises:
        EngineError: the engine failed, or returned lists of different lengths.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    routes: np.ndarray | None = None
    kept_ids: list[np.ndarray] = []
    number_cached: int | None = None  # tokens of the first part: later ones find what it computed
    number = 0
    while True:
        left = sampling.max_generate_length - len(ids)
        if left < 1:
            raise EngineError(f"session {session_id}: interrupted, but there is no room for more")
        async with gate.request() as version:
            part = await engine.generate(
                [*prompt_token_ids, *ids] if ids else prompt_token_ids,
                _rest(sampling, len(ids)),
                session_id=session_id,
                policy_version=version,
                seed=part_seed(number),
                expert_indices_start=expert_indices_start,
                policy=policy,
            )
        _check_lengths(part)
        kept = len(part.token_ids)
        if part.stop_reason == INTERRUPTED:
            # Interrupted at the last moment, it may already have all of its tokens.
            if sampling.begins_again:
                kept = 0
            else:
                kept = min(kept, left - 1)
            kept = _uncut_length(tokenizer, [*ids, *part.token_ids[:kept]], sampling) - len(ids)
        ids += part.token_ids[:kept]
        logprobs += part.logprobs[:kept]
        versions += [version] * kept
        kept_ids += (part.kept_ids or [])[:kept]
        if number == 0:
            number_cached = part.num_cached_tokens
        routes = _join_routes(routes, part, len(prompt_token_ids) + len(ids))
        if part.stop_reason != INTERRUPTED:
            return replace(
                part,
                token_ids=ids,
                logprobs=logprobs,
                expert_indices=routes,
                kept_ids=kept_ids or None,
                num_cached_tokens=number_cached,
                versions=versions,
            )
        number += 1


def _check_lengths(part: Generation) -> None:
    for name, values in (("logprobs", part.logprobs), ("sets of kept tokens", part.kept_ids)):
        if values is not None and len(values) != len(part.token_ids):
            raise EngineError(
                f"the engine returned {len(part.token_ids)} tokens but {len(values)} {name}"
            )


def _rest(sampling: SamplingParams, num_sampled: int) -> SamplingParams:
    """Return how to sample the rest of an answer: the engine counts from each request's start."""
    least = sampling.additional_kwargs.get("min_tokens")
    if not least and not num_sampled:
        return sampling
    rest = replace(sampling, max_generate_length=sampling.max_generate_length - num_sampled)
    if not least:
        return rest
    least = max(0, min(least, sampling.max_generate_length) - num_sampled)
    # Without the minimum, too, each token is sampled from the same number of tokens, and recorded.
    if sampling.top_k < 1:
        top_k = sampling.num_kept_tokens
    else:
        top_k = None
    return replace(
        rest,
        top_k=top_k or sampling.top_k,
        additional_kwargs={**sampling.additional_kwargs, "min_tokens": least},
    )


def _uncut_length(tokenizer: Any, token_ids: Sequence[int], sampling: SamplingParams) -> int:
    """Return the number of tokens before what may be the beginning of a stop string or bad word."""
    # The engine looks for these within one request. What follows is sampled again, so that none is
    # split between two requests, nor is a character.
    more = sampling.additional_kwargs
    strings = [
        (list(sampling.stop or ()), bool(more.get("skip_special_tokens", True))),
        (list(more.get("bad_words") or ()), False),
    ]
    length = len(token_ids)
    while length and any(
        _ends_within(tokenizer, token_ids[:length], texts, skip_special_tokens=skip)
        for texts, skip in strings
        if texts
    ):
        length -= 1
    return length


def _ends_within(
    tokenizer: Any, token_ids: Sequence[int], strings: Sequence[str], *, skip_special_tokens: bool
) -> bool:
    longest = max(map(len, strings))
    size = longest + 1
    while True:  # special tokens may have no text
        tail = decode(tokenizer, token_ids[-size:], skip_special_tokens=skip_special_tokens)
        if len(tail) > longest or size >= len(token_ids):
            break
        size *= 2
    beginnings = tuple(text[:n] for text in strings for n in range(1, len(text)))
    return tail.endswith((*beginnings, REPLACEMENT_CHARACTER))


def _join_routes(routes: np.ndarray | None, part: Generation, num_tokens: int) -> np.ndarray | None:
    if part.expert_indices is None:
        return routes
    rows = part.expert_indices
    if routes is not None:
        # Earlier tokens keep the routes by which they were sampled: the new part has routed them
        # again.
        rows = np.concatenate([routes, rows[len(routes) :]])
    # A token is routed when the next one is sampled: the last one has no route.
    return rows[: max(0, num_tokens - 1 - part.expert_indices_start)]
