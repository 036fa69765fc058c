"""Create the recipe's tokenizer and model, and warm-start the model on the demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.gsm8k.make_data import AGAIN, AT_LAST
from examples.tiny_model import warm_start as tiny
from examples.tiny_model.jsonl import read_jsonl
from examples.tiny_model.model import make_tokenizer

BATCH_SIZE = 64


def warm_start(data: Path, output: Path, *, seed: int = 0, **settings: Any) -> float:
    """Create, train and save tokenizer and model as a Hugging Face folder.

    Args:
        data: folder written by ``make_data.py``.
        output: folder to write.
        seed: of the initial weights and of the order of the demonstrations.
        settings: options of `examples.tiny_model.warm_start.train`.

    Returns:
        The last mean loss.
    """
    chats = read_jsonl(data / "demonstrations.jsonl")
    texts = [message["content"] for chat in chats for message in chat]
    tokenizer = make_tokenizer([*texts, AGAIN, AT_LAST])
    settings = {"batch_size": BATCH_SIZE, **settings}
    rows = tiny.encode_chats(tokenizer, chats)
    return tiny.warm_start(tokenizer, rows, output, seed=seed, **settings)
