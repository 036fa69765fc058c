"""TRL's reward functions as an environment of one turn.

A function is called as by TRL's `GRPOTrainer`, with the lists of one answer: `prompts`,
`completions` and the columns of the data, by keyword.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_fast.rollout.env.protocol import Env, EnvStep, Message

log = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
TEXT_PROMPT = "prompt_is_text"  # in a row's extras: its prompt was a string, not a chat
_NOT_COLUMNS = ("prompt", "completion", "completion_ids", "max_turns", TEXT_PROMPT)


@dataclass(frozen=True, slots=True)
class RewardFunctions:
    """Reward functions with their weights: a factory of environments.

    Args:
        functions: each `function(prompts, completions, **columns) -> list of rewards`, or a
            coroutine function. A reward may be None: the function does not apply to this row.
        weights: one per function.

    Example:
        def exact(completions, answer, **columns):
            return [float(a in c[0]["content"]) for c, a in zip(completions, answer)]

        RewardFunctions([exact], [1.0])({"answer": "4"})
    """

    functions: Sequence[RewardFunction]
    weights: Sequence[float]

    def __call__(self, row: dict[str, Any]) -> Env:
        """Return the environment of a row."""
        return _RewardFunctionsEnv(self, row)


class _RewardFunctionsEnv(Env):
    """Rewards the first answer with the weighted sum of the functions, and ends the episode."""

    def __init__(self, parent: RewardFunctions, row: dict[str, Any]) -> None:
        self._parent = parent
        self._row = row
        self._prompt: Any = None
        self._metrics: dict[str, float] = {}

    def init(self, messages: list[Message]) -> list[Message]:
        self._prompt = messages[0]["content"] if self._row.get(TEXT_PROMPT) else messages
        return messages

    def step(self, action: str) -> EnvStep:
        text = str(action)
        chat = [{"role": "assistant", "content": text}]
        columns = {name: [v] for name, v in self._row.items() if name not in _NOT_COLUMNS}
        arguments = {
            **columns,
            "prompts": [self._prompt],
            "completions": [text if self._row.get(TEXT_PROMPT) else chat],
            "log_metric": self._log_metric,
        }
        total, applied = 0.0, False
        parent = self._parent
        for function, weight in zip(parent.functions, parent.weights, strict=True):
            reward = _reward(function, arguments)
            if not math.isnan(reward):
                self._metrics[f"reward_{_name(function)}"] = reward
                total, applied = total + weight * reward, True
        if not applied:
            log.warning("no reward function applies to a row: its reward is 0")
        return EnvStep(total, done=True)

    def metrics(self) -> Mapping[str, Any]:
        return self._metrics

    def _log_metric(self, name: str, value: float) -> None:
        self._metrics[name] = float(value)


def _reward(function: RewardFunction, arguments: Mapping[str, Any]) -> float:
    """Return the reward of one answer; NaN: the function does not apply.

    Raises:
        ValueError: it returned something else than a list of one number or None.
    """
    found = function(**_accepted(function, arguments))
    if inspect.isawaitable(found):
        found = asyncio.run(_awaited(found))
    values = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(values, list | tuple) or len(values) != 1:
        raise ValueError(
            f"reward_funcs: {_name(function)!r}: wanted a list of one reward, got {found!r:.100}"
        )
    return math.nan if values[0] is None else float(values[0])


async def _awaited(value: Any) -> Any:
    return await value


def _accepted(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function has, all of them if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        return dict(arguments)
    return {item.name: arguments[item.name] for item in parameters if item.name in arguments}


def _name(function: RewardFunction) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
