"""Parts of one turn: its response's end token and text, and its sampling seed."""

from __future__ import annotations

from functools import partial

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.chat_template import ChatTemplate
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.tokenization import decode
from skyrl_fast.system.digests import digest_number


def end_to_append(
    template: ChatTemplate, generation: Generation, sampling: SamplingParams
) -> int | None:
    """Return the id of the end token that a response lacks; None: it has one, or no room for it."""
    ids = generation.token_ids
    has_end = template.ends_turn(ids, stopped=generation.stopped_at_token)
    if has_end or len(ids) >= sampling.max_generate_length:
        return None
    return template.end_id


def request_seed(seed: int, name: str, attempt: int, turn: int | str) -> int:
    """Return a request's seed, 63 bits, from the run's seed and the request's place in the run."""
    # A resumed run uses the same seeds as an uninterrupted one, in whatever order requests arrive.
    return digest_number(f"{seed}/{name}/{attempt}/{turn}") >> 1


def decode_response(
    template: ChatTemplate, generation: Generation, *, skip_special_tokens: bool = True
) -> str:
    """Return the response as text, cut after its stop string; the end token is always left out."""
    token_ids = generation.token_ids
    if template.ends_turn(token_ids, stopped=generation.stopped_at_token):
        token_ids = token_ids[:-1]
    read = partial(decode, template.tokenizer, skip_special_tokens=skip_special_tokens)
    text = read(token_ids)
    stop = generation.stop_string
    if stop is not None:
        # The last token may reach beyond the stop string that it completes. Of several, it is the
        # first one that this token completes; the text before may end with a part of a character.
        # An engine that samples several tokens at once may have gone on.
        place = last = text.rfind(stop)
        if text.find(stop) < last:
            known = len(read(token_ids[:-1]).rstrip("\ufffd"))
            place = text.find(stop, max(0, known - len(stop) + 1))
        place = last if place < 0 else place
        if place >= 0:
            text = text[: place + len(stop)]
    return text
