"""Sums of two numbers as questions."""

from __future__ import annotations

import random
from pathlib import Path

from examples.tiny_model.jsonl import write_jsonl

NUM_EVAL = 64
LARGEST = 20


def make_data(folder: Path, *, seed: int) -> None:
    """Write `train.jsonl` and `eval.jsonl`, which share no question.

    Args:
        folder: to create.
        seed: of their order.
    """
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(seed).shuffle(pairs)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
            "answer": str(a + b),
        }
        for a, b in pairs
    ]
    folder.mkdir(parents=True)
    write_jsonl(folder / "eval.jsonl", rows[:NUM_EVAL])
    write_jsonl(folder / "train.jsonl", rows[NUM_EVAL:])
