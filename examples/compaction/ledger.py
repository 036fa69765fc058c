"""An environment whose facts do not fit into the context: who has which thing, asked at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_fast.train import Env, EnvStep

TASK = "Remember who has what ."
ACKNOWLEDGED = "ok"
FACTS_PER_TURN = 2
LONGEST_PROMPT = 64  # tokens, of `drop_history`
ASKS = 2  # an agent whose context was replaced after the question is asked again

NAMES = (
    "Ada", "Bela", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jana", "Kim", "Leo",
    "Mia", "Nils", "Ola", "Pia", "Rosa", "Sven", "Tara", "Udo", "Vera", "Wim", "Xenia", "Yara",
)  # fmt: skip
THINGS = (
    "drum", "lamp", "book", "coin", "rope", "harp", "kite", "ring", "vase", "boot", "comb", "fork",
    "bell", "seed", "mask", "nail", "oar", "pear", "quilt", "rake", "shell", "torch", "wheel",
    "yarn",
)  # fmt: skip

Facts = list[tuple[str, str]]


def facts_text(facts: Facts) -> str:
    return " ".join(f"{name} {thing}" for name, thing in facts)


def observation(facts: Facts) -> str:
    return f"Seen today : {facts_text(facts)} ."


def question(name: str) -> str:
    return f"What has {name} ?"


class Ledger(Env):
    """Shows two facts per turn, then asks for one; the reward is 1 for the right thing.

    Args:
        row: `facts`, pairs of a name and a thing, and `asked`, a name.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        facts: Facts = [(name, thing) for name, thing in row["facts"]]
        starts = range(0, len(facts), FACTS_PER_TURN)
        shown = [observation(facts[start : start + FACTS_PER_TURN]) for start in starts]
        self._observations = [*shown, *[question(row["asked"])] * ASKS]
        self._answer = dict(facts)[row["asked"]]
        self._turns = 0
        self._num_shown = len(shown)

    def step(self, action: str) -> EnvStep:
        said = action.split()
        is_asked = self._turns > self._num_shown
        if is_asked and said != [ACKNOWLEDGED]:
            return EnvStep(float(said == [self._answer]), done=True)
        if self._turns == len(self._observations):
            return EnvStep(0.0, done=True)
        shown = self._observations[self._turns]
        self._turns += 1
        return EnvStep(0.0, done=False, observations=shown)


def drop_history(messages: Sequence[Mapping[str, Any]], num_tokens: int) -> list[Any] | None:
    """Begin again without a summary, as a control: a policy of `generator.compaction`."""
    if num_tokens <= LONGEST_PROMPT:
        return None
    return [messages[0]]
