"""TRL's reward functions: environments of one turn, whose rewards a group gets when it is complete.

A function is called as by TRL's `GRPOTrainer`, with the lists of a group: `prompts`, `completions`,
`completion_ids` and the columns of the data, by keyword.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_fast.rollout.env.answers import read_reward, read_reward_parts
from skyrl_fast.rollout.env.errors import EnvError
from skyrl_fast.rollout.env.protocol import Env, EnvStep, Message
from skyrl_fast.rollout.env.signatures import check_reward_function
from skyrl_fast.rollout.rows import copy_row
from skyrl_fast.rollout.stop_reason import ENV_ERROR
from skyrl_fast.rollout.workers.loop_thread import loop_thread

if TYPE_CHECKING:  # they import torch, which the processes of reward functions need not
    from skyrl_fast.rollout.env.factory import EnvFactory
    from skyrl_fast.rollout.loop_settings import RolloutPrompt
    from skyrl_fast.rollout.trajectory import Trajectory

log = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
TEXT_PROMPT = "prompt_is_text"  # in a row's extras: its prompt was a string, not a chat
ANSWERS = "group_answers"  # in the extras of the environment that rewards a group: texts and ids
_NOT_COLUMNS = ("prompt", "completion", "completion_ids", "max_turns", TEXT_PROMPT, ANSWERS)


_ARGUMENTS = frozenset(("prompts", "completions", "completion_ids", "log_metric"))  # but columns


@dataclass(frozen=True, slots=True)
class RewardFunctions:
    """Reward functions with their weights: a factory of environments.

    Args:
        functions: each `function(prompts, completions, **columns) -> list of rewards`, or a
            coroutine function. A reward may be a mapping with the key reward and further numbers,
            which are metrics; or None: the function does not apply to this row.

    Example:
        def exact(completions, answer, **columns):
            return [float(a in c[0]["content"]) for c, a in zip(completions, answer)]

        RewardFunctions([exact], [1.0])({"answer": "4"})
    """

    functions: Sequence[RewardFunction]
    weights: Sequence[float]

    def check_arguments(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if a function requires an argument that a row does not give it."""
        columns = [frozenset(row) - frozenset(_NOT_COLUMNS) for row in rows]
        for names in dict.fromkeys(columns):
            for function in self.functions:
                check_reward_function(_name(function), function, names | _ARGUMENTS)

    def __call__(self, row: dict[str, Any]) -> Env:
        if ANSWERS in row:
            return _GroupEnv(self, row)
        return _AnswerEnv(row)


class _AnswerEnv(Env):
    """Ends the episode after the first answer."""

    def step(self, action: str) -> EnvStep:
        return EnvStep(0.0, done=True)


class _GroupEnv(Env):
    """Rewards all answers of a group in its step; `metrics` returns what came of it."""

    def __init__(self, parent: RewardFunctions, row: dict[str, Any]) -> None:
        self._parent = parent
        self._row = row
        self._prompt: Any = None
        self._logged: dict[str, float] = {}
        self._found: dict[str, Any] = {}

    def init(self, messages: list[Message]) -> list[Message]:
        if self._row.get(TEXT_PROMPT):
            self._prompt = messages[0]["content"]
        else:
            self._prompt = messages
        return messages

    def step(self, action: str) -> EnvStep:
        texts, ids = self._row[ANSWERS]
        count = len(texts)
        chats = [[{"role": "assistant", "content": text}] for text in texts]
        columns = {name: [v] * count for name, v in self._row.items() if name not in _NOT_COLUMNS}
        arguments = {
            **columns,
            "prompts": [self._prompt] * count,
            "completions": list(texts) if self._row.get(TEXT_PROMPT) else chats,
            "completion_ids": ids,
            "log_metric": self._log_metric,
        }
        rewards = [0.0] * count
        metrics: list[dict[str, float]] = []
        for _ in texts:
            metrics.append({})
        parent = self._parent
        names = _metric_names(parent.functions)
        for function, name, weight in zip(parent.functions, names, parent.weights, strict=True):
            # A function may change its arguments, which others get, too.
            accepted = {
                key: [copy_row({key: item})[key] for item in value]
                if isinstance(value, list)
                else value
                for key, value in _select_arguments(function, arguments).items()
            }
            for number, found in enumerate(call_reward_function(function, accepted, count)):
                if found is not None:
                    reward, parts = found
                    metrics[number][name] = reward
                    metrics[number] |= {f"{name}/{part}": value for part, value in parts.items()}
                    rewards[number] += weight * reward
        if not all(metrics):
            log.warning("no reward function applies to an answer: its reward is 0")
        for reward in rewards:
            # Finite rewards may have a sum that float32 cannot hold.
            read_reward(reward, "reward_funcs: the sum of weighted rewards")
        taken = sorted(self._logged.keys() & set(names))
        if taken:
            raise ValueError(f"log_metric: expected another name than a reward's, got {taken[0]!r}")
        self._found = {"rewards": rewards, "metrics": [{**m, **self._logged} for m in metrics]}
        return EnvStep(0.0, done=True)

    def metrics(self) -> Mapping[str, Any]:
        return self._found

    def _log_metric(self, name: str, value: float) -> None:
        self._logged[name] = float(value)


class GroupRewards:
    """Set a group's rewards in one of its environments; it has failed after `attempts` calls."""

    def __init__(self, environments: EnvFactory, *, attempts: int = 1) -> None:
        self._environments = environments
        self._attempts = attempts

    async def __call__(self, prompt: RolloutPrompt, trajectories: Sequence[Trajectory]) -> None:
        answered = []
        for t in trajectories:
            if t.failure is None and t.steps:
                answered.append(t)
        if not answered:
            return
        for attempt in range(self._attempts):
            try:
                found = await self._found(prompt, answered)
                break
            except EnvError as error:
                if attempt + 1 == self._attempts:
                    for trajectory in answered:
                        trajectory.failure = str(error)
                        trajectory.failure_trace = error.trace
                        trajectory.stop_reason = ENV_ERROR
                    return
        for trajectory, reward, metrics in zip(
            answered, found["rewards"], found["metrics"], strict=True
        ):
            trajectory.steps[-1].reward = reward
            trajectory.env_metrics = metrics

    async def _found(self, prompt: RolloutPrompt, answered: Sequence[Trajectory]) -> dict[str, Any]:
        last = [trajectory.steps[-1] for trajectory in answered]
        answers = [step.text for step in last], [step.response_ids for step in last]
        extras = {**prompt.env_extras, ANSWERS: answers}
        env = await self._environments.make(prompt.env_class, extras)
        try:
            await env.init(prompt.messages)
            await env.step("")
            found: dict[str, Any] = await env.call("metrics", None)
            return found
        finally:
            await env.close()


def call_reward_function(
    function: RewardFunction, arguments: Mapping[str, Any], count: int
) -> list[tuple[float, dict[str, float]] | None]:
    found = function(**arguments)
    if inspect.isawaitable(found):
        # In a worker, whose thread waits. Clients that the function keeps belong to one loop.
        found = loop_thread().run_to_end(_await_value(found))
    if hasattr(found, "tolist"):
        values = found.tolist()
    else:
        values = found
    if not isinstance(values, list | tuple) or len(values) != count:
        raise ValueError(
            f"reward_funcs: {_name(function)!r}: expected a list of {count} rewards, one for each "
            f"answer of the group, got {found!r:.100}"
        )
    where = f"reward_funcs: {_name(function)!r}"
    result: list[tuple[float, dict[str, float]] | None] = []
    for value in values:
        result.append(None if value is None else read_reward_parts(value, where))
    return result


async def _await_value(value: Any) -> Any:
    return await value


def _select_arguments(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        return dict(arguments)
    return {item.name: arguments[item.name] for item in parameters if item.name in arguments}


def _metric_names(functions: Sequence[RewardFunction]) -> list[str]:
    """Return a metric's name for each function; those of equal names are numbered from 1."""
    names = [f"reward_{_name(function)}" for function in functions]
    several = {name for name, count in Counter(names).items() if count > 1}
    taken = set(names) - several
    found = []
    for name in names:
        if name in several:
            name = next(n for i in itertools.count(1) if (n := f"{name}_{i}") not in taken)
            taken.add(name)
        found.append(name)
    return found


def _name(function: RewardFunction) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
