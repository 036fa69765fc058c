"""Create the route's tokenizer and model, and warm-start the model on the demonstrations."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

from examples.compaction.route import TOWNS
from examples.tiny_model import warm_start as tiny
from examples.tiny_model.jsonl import read_jsonl
from examples.tiny_model.model import VOCABULARY_MULTIPLE, make_tokenizer

MAX_LENGTH = 256
HEAD_SIZE = 32  # the smallest of vLLM on a CPU
NUM_STEPS = 450
BATCH_SIZE = 32
LEARNING_RATE = 5e-3

# A head that looks up what follows a word must know what came before each word. Where the first
# layer sees nothing else, such a head forms within 300 steps.
WINDOW = 2  # tokens that the first layer sees

# Rows that are nothing but looking up, between the demonstrations.
LOOKUP_SHARE = 0.5  # of the number of demonstrated contexts
NUM_PAIRS = (2, 10)  # of a row
LOOKUPS_PER_ROW = 24


def warm_start(data: Path, output: Path, *, seed: int = 0, **settings: Any) -> float:
    """Create, train and save tokenizer and model as a Hugging Face folder; return the last loss.

    Args:
        data: folder written by `make_data.py`.
        output: folder to write.
        seed: of the initial weights and of the order of the demonstrations.
        settings: options of `examples.tiny_model.warm_start.train`.
    """
    chats = read_jsonl(data / "demonstrations.jsonl")
    texts = [message["content"] for chat in chats for message in chat]
    tokenizer = make_tokenizer([*texts, *TOWNS], max_length=MAX_LENGTH)
    rows = tiny.encode_chats(tokenizer, chats)
    rows += lookup_rows(tokenizer, int(LOOKUP_SHARE * len(rows)), seed=seed)
    options = {
        "num_steps": NUM_STEPS,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
    }
    return tiny.warm_start(
        tokenizer, rows, output, seed=seed, make=make_model, **options | settings
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> Gemma3ForCausalLM:
    """Return a small random Gemma 3, whose first layer sees two tokens."""
    torch.manual_seed(seed)
    hidden_size = 64
    num_heads = 4
    config = Gemma3TextConfig(
        vocab_size=math.ceil(len(tokenizer) / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=HEAD_SIZE,
        query_pre_attn_scalar=HEAD_SIZE,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=0.05,  # the usual 0.02 is too small at this width
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Gemma3ForCausalLM(config)


def lookup_rows(tokenizer: PreTrainedTokenizerFast, count: int, *, seed: int) -> Iterator[tiny.Row]:
    """Yield rows of pairs of towns, repeated in other orders; second ones are trained then."""
    rng = random.Random(seed)
    ids_of_words = tokenizer.convert_tokens_to_ids(list(TOWNS))
    for _ in range(count):
        num_pairs = rng.randint(*NUM_PAIRS)
        sampled = rng.sample(ids_of_words, 2 * num_pairs)
        pairs = list(zip(sampled[::2], sampled[1::2], strict=True))
        ids = list(sampled)
        labels = [tiny.IGNORED] * len(ids)
        for _ in range(LOOKUPS_PER_ROW // num_pairs):
            rng.shuffle(pairs)
            for first, second in pairs:
                ids += [first, second]
                labels += [tiny.IGNORED, second]
        yield ids, labels
