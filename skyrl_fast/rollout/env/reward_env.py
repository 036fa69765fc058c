"""A reward function as an environment of one turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_fast.rollout.env.protocol import Env, EnvStep, Message

Reward = Callable[[str, dict[str, Any]], float]


class RewardEnv(Env):
    """Reward the first answer and end the episode.

    Args:
        reward: returns the reward for the answer's text and the row.
        row: a row of the data, without its `prompt`, which `init` adds as chat messages.
    """

    def __init__(self, reward: Reward, row: dict[str, Any]) -> None:
        self._reward = reward
        self._row = row

    def init(self, messages: list[Message]) -> Sequence[Mapping[str, Any]]:
        self._row["prompt"] = messages
        return messages

    def step(self, action: str) -> EnvStep:
        return EnvStep(self._reward(action, self._row), done=True)
