"""An environment whose route does not fit into the context: legs are shown, then one is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from skyrl_fast.train import Env, EnvStep

ACKNOWLEDGED = "ok"
LONGEST_PROMPT = 45  # tokens, of `drop_history`
ASKS = 2  # an agent whose context was replaced after the question is asked again

TOWNS = (
    "Basel", "Bath", "Bonn", "Cork", "Delft", "Essen", "Graz", "Kiel", "Lyon", "Metz", "Nice",
    "Oslo", "Pisa", "Porto", "Riga", "Rome", "Split", "Turku", "Vienna", "York",
)  # fmt: skip


def task(start: str) -> str:
    return f"Remember the route from {start}"


def leg_text(start: str, end: str) -> str:
    return f"{start} {end}"


def question(town: str) -> str:
    return f"After {town} ?"


class Route(Env):
    """Shows one leg per turn, then asks for one; the reward is 1 for the right leg.

    Args:
        row: `towns`, in the order of the route, and `asked`, a town that is not the last.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        towns: Sequence[str] = row["towns"]
        asked = towns.index(row["asked"])
        legs = [leg_text(*leg) for leg in pairwise(towns)]
        self._observations = [*legs, *[question(towns[asked])] * ASKS]
        self._answer = legs[asked]
        self._num_legs = len(legs)
        self._turns = 0

    def step(self, action: str) -> EnvStep:
        said = " ".join(action.split())
        is_asked = self._turns > self._num_legs
        if is_asked and said != ACKNOWLEDGED:
            return EnvStep(float(said == self._answer), done=True)
        if self._turns == len(self._observations):
            return EnvStep(0.0, done=True)
        observation = self._observations[self._turns]
        self._turns += 1
        return EnvStep(0.0, done=False, observations=observation)


def drop_history(messages: Sequence[Mapping[str, Any]], num_tokens: int) -> list[Any] | None:
    """Begin again without a summary, as a control: a policy of `generator.compaction`."""
    if num_tokens <= LONGEST_PROMPT:
        return None
    return [messages[0]]
