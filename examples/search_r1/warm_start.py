"""Create the recipe's tokenizer and model, and warm-start the model on the demonstrations."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from examples.search_r1.make_data import (
    CITIES,
    FILLER_WORDS,
    PEOPLE,
    PERFECT,
    SYSTEM_PROMPT,
    TOPICS,
    TOPK,
    Question,
    demonstrate,
    make_world,
    render_observation,
)
from examples.tiny_model import warm_start as tiny
from examples.tiny_model.jsonl import read_jsonl
from examples.tiny_model.model import MAX_LENGTH, make_tokenizer

NUM_STEPS = 600
# Observations that do not occur in the demonstrations.
ENVIRONMENT_TEXTS = (
    "<information></information> No search results found . Search request failed or timed out "
    "after retries . error",
)


def search_tokenizer(
    texts: Iterable[str], *, max_length: int = MAX_LENGTH
) -> PreTrainedTokenizerFast:
    """Return the tokenizer of all words of the corpus, the prompts, the server and `texts`."""
    rng = random.Random(0)
    question = Question(next(iter(TOPICS)), PEOPLE[0])
    turns = demonstrate(rng, question, make_world(rng), PERFECT)
    known = [*PEOPLE, *CITIES, *TOPICS, *FILLER_WORDS, SYSTEM_PROMPT, question.text]
    known += [text for fact, values in TOPICS.values() for text in (fact, *values)]
    known += [text for text, _ in turns]
    known += [render_observation([""] * number) for number in range(1, TOPK + 1)]
    return make_tokenizer([*texts, *known, *ENVIRONMENT_TEXTS], max_length=max_length)


def warm_start(
    data: Path, output: Path, *, seed: int = 0, max_length: int = MAX_LENGTH, **settings: Any
) -> float:
    """Create, train and save tokenizer and model as a Hugging Face folder.

    Args:
        data: folder written by ``make_data.py``.
        output: folder to write.
        seed: of the initial weights and of the order of the demonstrations.
        max_length: longest sequence of the model.
        settings: options of `examples.tiny_model.warm_start.train`.

    Returns:
        The last mean loss.
    """
    chats = read_jsonl(data / "demonstrations.jsonl")
    texts = [message["content"] for chat in chats for message in chat]
    tokenizer = search_tokenizer(texts, max_length=max_length)
    settings = {"num_steps": NUM_STEPS, **settings}
    rows = tiny.encode_chats(tokenizer, chats)
    return tiny.warm_start(tokenizer, rows, output, seed=seed, **settings)
