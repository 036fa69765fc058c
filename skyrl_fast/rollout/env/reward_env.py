"""A reward function as an environment of one turn."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from skyrl_fast.rollout.env.protocol import Env, EnvStep, Message

Reward = Callable[[str, dict[str, Any]], Any]  # a number, a mapping with reward, or an awaitable


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

    def step(self, action: str) -> EnvStep | Awaitable[EnvStep]:
        reward = self._reward(action, self._row)
        if inspect.isawaitable(reward):
            return _await_reward(reward)
        return EnvStep(reward, done=True)


async def _await_reward(reward: Awaitable[Any]) -> EnvStep:
    return EnvStep(await reward, done=True)
