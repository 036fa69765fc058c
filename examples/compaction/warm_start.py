"""Create the ledger's tokenizer and model, and warm-start the model on the demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.compaction.ledger import NAMES, THINGS
from examples.tiny_model import warm_start as tiny
from examples.tiny_model.jsonl import read_jsonl
from examples.tiny_model.model import make_tokenizer

MAX_LENGTH = 256
NUM_STEPS = 900


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
    tokenizer = make_tokenizer([*texts, *NAMES, *THINGS], max_length=MAX_LENGTH)
    rows = tiny.encode_chats(tokenizer, chats)
    options = {"num_steps": NUM_STEPS} | settings
    return tiny.warm_start(tokenizer, rows, output, seed=seed, **options)
