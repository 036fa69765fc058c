"""Create the teacher and the student: one tokenizer, two experts to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.quickstart.make_data import PERFECT, make_data
from examples.quickstart.warm_start import ENVIRONMENT_TEXTS
from examples.tiny_model import warm_start as tiny
from examples.tiny_model.jsonl import read_jsonl
from examples.tiny_model.model import make_tokenizer


def make_demonstrations(folder: Path, *, seed: int = 0, **sizes: Any) -> None:
    """Write the data of the quickstart, and next to it that of an expert without bad habits.

    The prompts of both are the same: only the demonstrations differ.

    Args:
        folder: to write.
        seed: of all random choices.
        sizes: numbers of rows, as of the quickstart's `make_data`.
    """
    make_data(folder / "careless", seed=seed, **sizes)
    make_data(folder / "careful", seed=seed, careless=PERFECT, **sizes)


def make_models(data: Path, folder: Path, *, seed: int = 0, num_steps: int = 300) -> None:
    """Warm-start both models, of one architecture, on the demonstrations of an expert each.

    Args:
        data: folder that `make_demonstrations` has written.
        folder: to write, with a folder for each model.
        seed: of the initial weights and of the order of the demonstrations.
        num_steps: optimizer steps of each.
    """
    chats = {}
    for expert in ("careless", "careful"):
        chats[expert] = read_jsonl(data / expert / "demonstrations.jsonl")
    texts = [message["content"] for own in chats.values() for chat in own for message in chat]
    tokenizer = make_tokenizer([*texts, *ENVIRONMENT_TEXTS])
    for name, expert in (("student", "careless"), ("teacher", "careful")):
        rows = tiny.encode_chats(tokenizer, chats[expert])
        tiny.warm_start(tokenizer, rows, folder / name, seed=seed, num_steps=num_steps)
