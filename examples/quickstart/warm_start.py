"""Create the quickstart's tokenizer and model, and warm-start the model on the demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.tiny_model import warm_start as tiny
from examples.tiny_model.jsonl import read_jsonl
from examples.tiny_model.model import CHAT_TEMPLATE, make_tokenizer

# Observations that do not occur in the demonstrations.
ENVIRONMENT_TEXTS = (
    "Your previous action is invalid. Follow the format of outputting thinking process and sql "
    "tool, and try again.",
    "Error executing SQL: no such table: no such column: near syntax error, db file: sqlite",
    "Empty DataFrame Columns: [] Index: [] None NaN . _ / -",
)


def warm_start(
    data: Path,
    output: Path,
    *,
    seed: int = 0,
    chat_template: str = CHAT_TEMPLATE,
    keeps_history: bool = True,
    **settings: Any,
) -> float:
    """Create, train and save tokenizer and model as a Hugging Face folder.

    Args:
        data: folder written by ``make_data.py``.
        output: folder to write.
        seed: of the initial weights and of the order of the demonstrations.
        chat_template: of the tokenizer.
        keeps_history: whether the template only appends; otherwise every turn is a separate row.
        settings: options of `examples.tiny_model.warm_start.train`.

    Returns:
        The last mean loss.
    """
    chats = read_jsonl(data / "demonstrations.jsonl")
    texts = [message["content"] for chat in chats for message in chat]
    tokenizer = make_tokenizer([*texts, *ENVIRONMENT_TEXTS], chat_template=chat_template)
    encode = tiny.encode_chats if keeps_history else tiny.encode_turns
    return tiny.warm_start(tokenizer, encode(tokenizer, chats), output, seed=seed, **settings)
