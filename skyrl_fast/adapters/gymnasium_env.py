"""Gymnasium environments whose observations are text, as an `Env`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_fast.rollout.chat_messages import with_text
from skyrl_fast.rollout.env.protocol import Env, EnvStep, Message


def _strip(text: str) -> str:
    return text.strip()


def _shown(observation: Any, info: Mapping[str, Any]) -> str:
    return str(observation)


@dataclass(frozen=True, slots=True)
class GymnasiumEnvs:
    """A factory of environments for `skyrl_fast.train_agent(env=...)` or `environment.env_class`.

    The first observation is added to the row's prompt, and each later one is a user message. An
    action that `read_action` refuses with a ValueError does not reach the environment: the error's
    text is the observation, and the reward is `invalid_reward`.

    Args:
        make: returns a `gymnasium.Env` for a row. `reset` gets the row's `seed` and `options`.
        read_action: returns the environment's action from the model's text.
        show: returns the text of an observation and its info.
        invalid_reward: reward of an action that `read_action` refuses.

    Example:
        walks = GymnasiumEnvs(lambda row: gymnasium.make("FrozenLake-v1"), read_action=int)
        skyrl_fast.train_agent(config, env=walks, prompts=rows)
    """

    make: Callable[[dict[str, Any]], Any]
    read_action: Callable[[str], Any] = _strip
    show: Callable[[Any, Mapping[str, Any]], str] = _shown
    invalid_reward: float = 0.0

    def __call__(self, row: dict[str, Any]) -> Env:
        return _GymnasiumEnv(self, row)


class _GymnasiumEnv(Env):
    """One episode."""

    def __init__(self, parent: GymnasiumEnvs, row: dict[str, Any]) -> None:
        self._parent = parent
        self._row = row
        self._env = parent.make(row)
        self._reward = 0.0
        self._invalid = 0

    def init(self, messages: list[Message]) -> list[Message]:
        seed = self._row.get("seed")
        if seed is not None:
            seed = int(seed)  # tables have other numbers than Python's
        options = self._row.get("options")
        observation, info = self._env.reset(seed=seed, options=options)
        return with_text(messages, self._parent.show(observation, info))

    def step(self, action: str) -> EnvStep:
        try:
            chosen = self._parent.read_action(str(action))
        except ValueError as error:
            self._invalid += 1
            return EnvStep(self._parent.invalid_reward, done=False, observations=str(error))
        observation, given, terminated, truncated, info = self._env.step(chosen)
        reward = float(given)
        self._reward += reward
        if terminated or truncated:
            return EnvStep(reward, done=True, observations="")
        text = self._parent.show(observation, info)
        return EnvStep(reward, done=False, observations=text)

    def metrics(self) -> Mapping[str, Any]:
        return {"return": self._reward, "invalid_actions": self._invalid}

    def close(self) -> None:
        self._env.close()
