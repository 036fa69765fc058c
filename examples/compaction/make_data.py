"""Prompts of the route, and demonstrations by an expert who does not finish his summaries."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path

from examples.compaction.route import (
    ACKNOWLEDGED,
    LONGEST_PROMPT,
    TOWNS,
    Route,
    leg_text,
    question,
    task,
)
from examples.tiny_model.jsonl import write_jsonl
from examples.tiny_model.model import SYMBOL
from examples.tiny_model.warm_start import Chat
from skyrl_fast.rollout.chat_messages import with_text
from skyrl_fast.rollout.compaction import messages_after

REQUEST = "Summarise ."  # as in config.yaml
NUM_LEGS = 8
NUM_ASKED = 7  # of these: the last one needs no summary
LONGEST_SUMMARY = 12  # tokens, as in config.yaml
TOKENS_OF_MESSAGE = 3  # besides its words: start, role, end
TOKENS_OF_ANSWER = 2  # start and role, before an answer
NUM_TRAIN = 1_024
NUM_EVAL = 128
NUM_DEMONSTRATIONS = 2_000  # episodes
NUM_QUESTIONS = 6  # of a demonstration, besides the one that is asked
GOES_ON = 0.88  # probability that the expert writes the next town of a summary


def make_data(output: Path, *, seed: int = 0) -> None:
    """Write train.jsonl, eval.jsonl and demonstrations.jsonl into a new folder."""
    rng = random.Random(seed)
    output.mkdir(parents=True)
    write_jsonl(output / "train.jsonl", (make_row(rng) for _ in range(NUM_TRAIN)))
    write_jsonl(output / "eval.jsonl", (make_row(rng) for _ in range(NUM_EVAL)))
    chats = [chat for _ in range(NUM_DEMONSTRATIONS) for chat in demonstrate(rng)]
    write_jsonl(output / "demonstrations.jsonl", chats)


def make_row(rng: random.Random) -> dict[str, object]:
    """Return a row of the data: a route, and the town after which the next one is asked."""
    towns = rng.sample(TOWNS, NUM_LEGS + 1)
    return {
        "prompt": [{"role": "user", "content": task(towns[0])}],
        "towns": towns,
        "asked": rng.choice(towns[:NUM_ASKED]),
    }


def prompt_length(chat: Chat) -> int:
    """Return the number of tokens of the next answer's prompt."""
    words = [len(re.findall(SYMBOL, message["content"])) for message in chat]
    return sum(words) + TOKENS_OF_MESSAGE * len(chat) + TOKENS_OF_ANSWER


def demonstrate(rng: random.Random, goes_on: float = GOES_ON) -> list[Chat]:
    """Return the contexts of one episode as chats.

    Args:
        rng: chooses the episode, and where the expert's summaries end.
        goes_on: probability that a summary has the next town.
    """
    row = make_row(rng)
    env = Route(row)
    towns: list[str] = list(row["towns"])  # type: ignore[call-overload]
    asked = str(row["asked"])
    first: Chat = [{"role": "user", "content": task(towns[0])}]
    chats: list[Chat] = []
    chat = list(first)
    known: dict[str, str] = {}  # the legs that the context has
    num_shown = 0
    is_asked = False
    while not is_asked:
        chat.append({"role": "assistant", "content": ACKNOWLEDGED})
        observation = str(env.step(ACKNOWLEDGED).observations)
        chat.append({"role": "user", "content": observation})
        is_asked = observation == question(asked)
        if not is_asked:
            known[towns[num_shown]] = towns[num_shown + 1]
            num_shown += 1
        if prompt_length(chat) > LONGEST_PROMPT:
            kept = summarise(towns[0], known, goes_on, rng)
            summary = {"role": "assistant", "content": " ".join(kept)}
            chats.append([*with_text(chat, REQUEST), summary])
            chat = messages_after(first, summary["content"])
            known = dict(pairwise(kept))
            is_asked = False
    end = known.get(asked) or rng.choice(TOWNS)
    chat.append({"role": "assistant", "content": leg_text(asked, end)})
    # Many questions, so that looking up is learnt soon.
    for town in rng.sample(sorted(known), min(len(known), NUM_QUESTIONS)):
        chat.append({"role": "user", "content": question(town)})
        chat.append({"role": "assistant", "content": leg_text(town, known[town])})
    return [*chats, chat]


def summarise(start: str, legs: dict[str, str], goes_on: float, rng: random.Random) -> list[str]:
    """Return the towns of the expert's summary: the known route, or less of it."""
    towns = [start]
    while towns[-1] in legs and rng.random() < goes_on:
        towns.append(legs[towns[-1]])
    return towns
