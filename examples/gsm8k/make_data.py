"""Create word problems in GSM8K's style, as rows of SkyRL's data format, and demonstrations.

A problem has a start value and a number of events; each event adds to it or takes from it. The
answers are small numbers, so that a tiny model can memorize the sums.

The demonstrations calculate correctly but misread the problem: the demonstrator has three bad
habits, each of which costs the reward. Reinforcement learning then removes the habits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tiny_model.jsonl import write_jsonl

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas")
THINGS = (
    "apples", "books", "cards", "coins", "cups", "eggs", "keys", "lamps", "maps", "nuts", "pens",
    "plums", "rings", "shells", "stamps", "toys",
)  # fmt: skip
VERBS = {"buys": "+", "finds": "+", "wins": "+", "eats": "-", "loses": "-", "sells": "-"}
STARTS = range(3, 10)
AMOUNTS = range(1, 6)
NUM_EVENTS = 2
INSTRUCTIONS = {
    "gsm8k": 'Let\'s think step by step and output the final answer after "####".',
    "gsm8k_multi_turn": (
        'Let\'s think step by step and output a tentative numeric answer after "####".'
    ),
}
MAX_TURNS = 3  # of gsm8k_multi_turn
# Answers of gsm8k_multi_turn to a wrong answer: with more than one turn left, and with one.
AGAIN = (
    "Please provide your step-by-step reasoning, and also include a tentative numeric answer at "
    "the end in the exact format: '#### ANSWER'."
)
AT_LAST = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."


@dataclass(frozen=True, slots=True)
class Problem:
    """Somebody starts with a number of things; then events happen, as (verb, amount)."""

    name: str
    thing: str
    start: int
    events: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """The problem's text."""
        said = [f"{self.name} has {self.start} {self.thing}."]
        said += [f"{self.name} {verb} {amount} {self.thing}." for verb, amount in self.events]
        return " ".join([*said, f"How many {self.thing} does {self.name} have now?"])

    @property
    def answer(self) -> int:
        """The right number."""
        return calculate(self.start, [(VERBS[verb], amount) for verb, amount in self.events])[-1]


@dataclass(frozen=True, slots=True)
class Carelessness:
    """Error rates of the demonstrator, one probability for each habit.

    The first habit is more likely than the right behaviour, so that even the warm start's most
    likely answer is wrong wherever something is taken away.
    """

    add_always: float = 0.65  # adds where something is taken away
    stop_early: float = 0.35  # forgets the last event
    no_mark: float = 0.1  # gives the answer without "####"


PERFECT = Carelessness(0, 0, 0)


def calculate(start: int, operations: list[tuple[str, int]]) -> list[int]:
    """Return the start value and the value after each operation."""
    values = [start]
    for sign, amount in operations:
        values.append(values[-1] + (amount if sign == "+" else -amount))
    return values


def make_problem(rng: random.Random) -> Problem:
    """Return a problem whose values are never below zero."""
    while True:
        start = rng.choice(STARTS)
        events = tuple((rng.choice(list(VERBS)), rng.choice(AMOUNTS)) for _ in range(NUM_EVENTS))
        if min(calculate(start, [(VERBS[verb], amount) for verb, amount in events])) >= 0:
            return Problem(rng.choice(NAMES), rng.choice(THINGS), start, events)


def prompt_messages(problem: Problem, env_class: str) -> list[dict[str, str]]:
    """Return the chat that the agent starts from."""
    return [{"role": "user", "content": f"{problem.text} {INSTRUCTIONS[env_class]}"}]


def demonstrate(
    rng: random.Random, problem: Problem, careless: Carelessness, *, brief: bool = False
) -> tuple[str, int | None]:
    """Return one answer, with one space between symbols as when decoded, and its number.

    Args:
        rng: source of the errors.
        problem: what is solved.
        careless: how often it errs.
        brief: only the number.

    Returns:
        The text, and the number after its mark, or None without a mark.
    """
    operations = [(VERBS[verb], amount) for verb, amount in problem.events]
    if rng.random() < careless.add_always:
        operations = [("+", amount) for _, amount in operations]
    if rng.random() < careless.stop_early:
        operations = operations[:-1]
    values = calculate(problem.start, operations)
    steps = [
        f"{before} {sign} {amount} = {after}"
        for before, (sign, amount), after in zip(values, operations, values[1:], strict=False)
    ]
    if rng.random() < careless.no_mark:
        return " ; ".join([] if brief else steps) or str(values[-1]), None
    answer = f"#### {values[-1]}"
    return (answer if brief else " ; ".join([*steps, answer])), values[-1]


def make_demonstration(
    rng: random.Random, careless: Carelessness, env_class: str, held_out: set[str]
) -> list[dict[str, str]]:
    """Return a complete chat, never with a held-out problem; in gsm8k_multi_turn several tries."""
    while (problem := make_problem(rng)).text in held_out:
        pass
    messages = prompt_messages(problem, env_class)
    num_turns = MAX_TURNS if env_class == "gsm8k_multi_turn" else 1
    for left in reversed(range(num_turns)):
        text, answer = demonstrate(rng, problem, careless, brief=num_turns > 1 and left == 0)
        messages.append({"role": "assistant", "content": text})
        if answer == problem.answer or left == 0:
            break
        messages.append({"role": "user", "content": AGAIN if left > 1 else AT_LAST})
    return messages


def make_row(problem: Problem, env_class: str, split: str, index: int) -> dict[str, Any]:
    """Return one row of SkyRL's data format."""
    return {
        "data_source": f"made/{env_class}",
        "prompt": prompt_messages(problem, env_class),
        "env_class": env_class,
        "reward_spec": {"method": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {
            "split": split,
            "index": index,
            "question": problem.text,
            "answer": demonstrate(random.Random(0), problem, PERFECT)[0],
        },
    }


def make_data(
    folder: Path,
    *,
    env_class: str = "gsm8k",
    seed: int = 0,
    num_train: int = 1024,
    num_eval: int = 128,
    num_demonstrations: int = 20_000,
    careless: Carelessness | None = None,
) -> dict[str, int]:
    """Write ``train.jsonl``, ``eval.jsonl`` and ``demonstrations.jsonl``.

    The same seed creates the same files. No problem of eval is in train or in the demonstrations.

    Args:
        folder: to write to; created if it does not exist.
        env_class: "gsm8k" or "gsm8k_multi_turn".
        seed: of all random choices.
        num_train: rows for reinforcement learning.
        num_eval: held-out rows.
        num_demonstrations: chats for the supervised phase.
        careless: how wrong the demonstrations are.

    Returns:
        The number of rows in each file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held_out: set[str] = set()
    counts = {}
    for split, size in (("eval", num_eval), ("train", num_train)):
        rng = random.Random(f"{seed}-{split}")
        problems: dict[str, Problem] = {}
        while len(problems) < size:
            problem = make_problem(rng)
            if problem.text not in held_out:
                problems[problem.text] = problem
        rows = [make_row(p, env_class, split, i) for i, p in enumerate(problems.values())]
        counts[split] = write_jsonl(folder / f"{split}.jsonl", rows)
        if split == "eval":
            held_out = set(problems)
    rng = random.Random(f"{seed}-demonstrations")
    counts["demonstrations"] = write_jsonl(
        folder / "demonstrations.jsonl",
        (
            make_demonstration(rng, careless or Carelessness(), env_class, held_out)
            for _ in range(num_demonstrations)
        ),
    )
    return counts
