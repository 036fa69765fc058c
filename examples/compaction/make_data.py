"""Prompts of the ledger, and demonstrations by an expert whose summaries are careless."""

from __future__ import annotations

import random
from pathlib import Path

from examples.compaction.ledger import (
    ACKNOWLEDGED,
    FACTS_PER_TURN,
    NAMES,
    TASK,
    THINGS,
    Facts,
    facts_text,
    observation,
    question,
)
from examples.tiny_model.jsonl import write_jsonl
from examples.tiny_model.warm_start import Chat
from skyrl_fast.rollout.chat_messages import with_text
from skyrl_fast.rollout.compaction import messages_after

REQUEST = "Summarise ."  # as in config.yaml
NUM_FACTS = 16
NUMS_DEMONSTRATED = (2, 4, 8, 16)  # facts of demonstrations: looking up is learnt on few first
NUM_TRAIN = 1_024
NUM_EVAL = 128
NUM_DEMONSTRATIONS = 2_500  # episodes
NUM_QUESTIONS = 7  # of a demonstration, after the one that is asked
KEPT = 0.6  # probability that the expert's summary keeps a fact
TURNS_OF_CONTEXT = (2, 5)  # after which the expert's contexts end


def make_data(output: Path, *, seed: int = 0) -> None:
    """Write train.jsonl, eval.jsonl and demonstrations.jsonl into a new folder."""
    rng = random.Random(seed)
    output.mkdir(parents=True)
    write_jsonl(output / "train.jsonl", (make_row(rng) for _ in range(NUM_TRAIN)))
    write_jsonl(output / "eval.jsonl", (make_row(rng) for _ in range(NUM_EVAL)))
    chats = [chat for _ in range(NUM_DEMONSTRATIONS) for chat in demonstrate(rng)]
    write_jsonl(output / "demonstrations.jsonl", chats)


def make_row(rng: random.Random, num_facts: int = NUM_FACTS) -> dict[str, object]:
    names = rng.sample(NAMES, num_facts)
    things = rng.sample(THINGS, num_facts)
    facts = [list(pair) for pair in zip(names, things, strict=True)]
    return {
        "prompt": [{"role": "user", "content": TASK}],
        "facts": facts,
        "asked": rng.choice(names),
    }


def demonstrate(rng: random.Random) -> list[Chat]:
    """Return the contexts of one episode as chats."""
    row = make_row(rng, rng.choice(NUMS_DEMONSTRATED))
    left: Facts = [(name, thing) for name, thing in row["facts"]]  # type: ignore[attr-defined]
    asked = str(row["asked"])
    first: Chat = [{"role": "user", "content": TASK}]
    chats: list[Chat] = []
    chat = list(first)
    known: Facts = []  # what the context has
    turns = rng.randint(*TURNS_OF_CONTEXT)
    while left:
        chat.append({"role": "assistant", "content": ACKNOWLEDGED})
        shown = left[:FACTS_PER_TURN]
        left = left[FACTS_PER_TURN:]
        known += shown
        chat.append({"role": "user", "content": observation(shown)})
        turns -= 1
        if turns == 0:
            known = [fact for fact in known if rng.random() < KEPT]
            summary = {"role": "assistant", "content": facts_text(known) or ACKNOWLEDGED}
            chats.append([*with_text(chat, REQUEST), summary])
            chat = messages_after(first, summary["content"])
            turns = rng.randint(*TURNS_OF_CONTEXT)
    chat.append({"role": "assistant", "content": ACKNOWLEDGED})
    # Many questions, so that looking up is learnt soon: of what it knows, but for the first.
    others = rng.sample(known, min(len(known), NUM_QUESTIONS))
    for name, thing in [(asked, dict(known).get(asked) or rng.choice(THINGS)), *others]:
        chat.append({"role": "user", "content": question(name)})
        chat.append({"role": "assistant", "content": thing})
    return [*chats, chat]
