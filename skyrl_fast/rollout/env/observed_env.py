"""An environment whose steps are recorded."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_fast.rollout.env.protocol import Action, Env, EnvStep, Message


@dataclass(slots=True)
class ObservedStep:
    """A call of an environment's `step`; the answer is None until it has returned."""

    action: str
    answer: EnvStep | Mapping[str, Any] | None = None


class ObservedEnv(Env):
    """Behave like another environment."""

    def __init__(self, env: Env, steps: list[ObservedStep]) -> None:
        self._env = env
        self._steps = steps

    def init(
        self, messages: list[Message]
    ) -> Sequence[Mapping[str, Any]] | Awaitable[Sequence[Mapping[str, Any]]]:
        return self._env.init(messages)

    def step(
        self, action: Action
    ) -> EnvStep | Mapping[str, Any] | Awaitable[EnvStep | Mapping[str, Any]]:
        observed = ObservedStep(action)
        self._steps.append(observed)
        answer = self._env.step(action)
        if inspect.isawaitable(answer):
            return _record_answer(observed, answer)
        observed.answer = answer
        return answer

    def metrics(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        return self._env.metrics()

    def close(self) -> Awaitable[None] | None:
        return self._env.close()


async def _record_answer(observed: ObservedStep, answer: Awaitable[Any]) -> Any:
    observed.answer = await answer
    return observed.answer
