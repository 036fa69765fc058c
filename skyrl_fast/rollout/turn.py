"""Parts of one turn: the gen-only response, its text, and its sampling seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from skyrl_fast.rollout.chat_template import ChatTemplate
from skyrl_fast.rollout.engine.protocol import EngineError, Generation
from skyrl_fast.rollout.tokenization import decode


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One turn's gen-only response: all lists have one entry per token.

    Args:
        kept_ids: the tokens that each was sampled from; empty for an appended token, which was not
            sampled. None: the vocabulary.
    """

    response_ids: list[int]
    loss_mask: list[int]
    rollout_logprobs: list[float]
    kept_ids: list[np.ndarray] | None = None


def sampled_tokens(generation: Generation, *, appended_eos: int | None = None) -> SampledTokens:
    """Return the response as it is trained; an appended end token gets mask 0 and logprob 0.0.

    Args:
        generation: of n tokens.
        appended_eos: the end token's id, or None where none is appended.

    Example:
        >>> sampled_tokens(Generation([5, 6], [-0.1, -0.2], "stop", "</a>"), appended_eos=2)
        SampledTokens(response_ids=[5, 6, 2], loss_mask=[1, 1, 0],
                      rollout_logprobs=[-0.1, -0.2, 0.0], kept_ids=None)
    """
    if len(generation.token_ids) != len(generation.logprobs):
        raise EngineError(
            f"the engine returned {len(generation.token_ids)} tokens but "
            f"{len(generation.logprobs)} logprobs"
        )
    ids, logprobs = list(generation.token_ids), list(generation.logprobs)
    kept_ids = None if generation.kept_ids is None else list(generation.kept_ids)
    if kept_ids is not None and len(kept_ids) != len(ids):
        raise EngineError(
            f"the engine returned {len(ids)} tokens but {len(kept_ids)} sets of kept tokens"
        )
    mask = [1] * len(ids)
    if appended_eos is not None:
        ids.append(appended_eos)
        mask.append(0)
        logprobs.append(0.0)
        if kept_ids is not None:
            kept_ids.append(np.zeros(0, np.int32))
    return SampledTokens(ids, mask, logprobs, kept_ids)


def request_seed(seed: int, name: str, attempt: int, turn: int | str) -> int:
    """Return a request's seed, 63 bits, from the run's seed and the request's place in the run.

    A resumed run uses the same seeds as an uninterrupted one, in whatever order requests arrive.
    """
    place = f"{seed}/{name}/{attempt}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> 1


def decode_response(
    template: ChatTemplate, generation: Generation, *, skip_special_tokens: bool = True
) -> str:
    """Return the response as text, cut after its stop string.

    Args:
        template: of the model.
        skip_special_tokens: whether to leave out special tokens; the end token always is.
    """
    token_ids = generation.token_ids
    if template.ends_turn(token_ids, stopped=generation.stopped_at_token):
        token_ids = token_ids[:-1]
    text = decode(template.tokenizer, token_ids, skip_special_tokens=skip_special_tokens)
    return until_stop_string(text, generation)


def until_stop_string(text: str, generation: Generation) -> str:
    """Return a response's text, cut after its stop string."""
    if generation.stop_string is not None:
        # The last token may reach beyond the stop string that it completes.
        head, found, _ = text.rpartition(generation.stop_string)
        text = head + found if found else text
    return text
