"""An environment's answers: checked, and made of plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from skyrl_fast.rollout.chat_messages import normalize_message, normalize_messages
from skyrl_fast.rollout.env.protocol import EnvStep, Message
from skyrl_fast.rollout.workers.plain import PlainData, plain_repr, type_name

LARGEST_REWARD = 3.4028234663852886e38  # the largest float32, in which rewards are trained


REWARD = "reward"  # the key of a mapping that is trained


class AnswerError(ValueError):
    """An environment's answer is invalid."""


@dataclass(frozen=True, slots=True)
class EnvAnswer:
    """A checked `EnvStep`, but for its policies' names, and the time that it took."""

    messages: list[Message]
    reward: float
    done: bool
    postprocessed_action: str | Message | None
    seconds: float = 0.0
    policy: str | None = None
    policy_rewards: dict[str, float] = field(default_factory=dict)
    reward_parts: dict[str, float] = field(default_factory=dict)


def messages_of(value: Any, data: PlainData) -> list[Message]:
    """Return observations as chat messages; they may be a list, one message, plain text or None.

    Raises:
        AnswerError: they are something else.
    """
    if value is None:
        return []
    if isinstance(value, str):
        text = data.text(value)
        if text:
            return [{"role": "user", "content": text}]
        return []
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise AnswerError(f"expected messages with role and content, got {plain_repr(value)}")
    try:
        messages = data.of(value)
    except (TypeError, ValueError) as error:
        raise AnswerError(f"messages: {error}") from error
    if not all(map(_is_message, messages)):
        raise AnswerError(f"expected messages with role and content, got {plain_repr(messages)}")
    try:
        return normalize_messages(messages)
    except ValueError as error:
        raise AnswerError(str(error)) from error


def answer_of(answer: Any, data: PlainData) -> EnvAnswer:
    """Return the checked answer to a step, an `EnvStep` or a mapping; AnswerError if invalid."""
    if isinstance(answer, EnvStep):
        answer = {item.name: getattr(answer, item.name) for item in fields(EnvStep)}
    if not isinstance(answer, Mapping):
        raise AnswerError(
            "expected an EnvStep, or a mapping with observations, reward, done; got "
            f"{type_name(answer)}"
        )
    absent = [key for key in ("observations", "reward", "done") if key not in answer]
    if absent:
        has = plain_repr(sorted(map(str, answer)))
        raise AnswerError(f"the answer lacks {', '.join(absent)}; it has {has}")
    reward, parts = read_reward_parts(answer["reward"], "reward")
    return EnvAnswer(
        messages_of(answer["observations"], data),
        reward,
        _done(answer["done"]),
        _action(answer.get("postprocessed_action"), data),
        policy=_policy(answer.get("policy"), data),
        policy_rewards=_policy_rewards(answer.get("policy_rewards"), data),
        reward_parts={data.text(name): part for name, part in parts.items()},
    )


def _policy(value: Any, data: PlainData) -> str | None:
    if not isinstance(value, str | None):
        raise AnswerError(f"policy: expected a name, got {plain_repr(value)}")
    if value is None:
        return None
    return data.text(value)


def _policy_rewards(value: Any, data: PlainData) -> dict[str, float]:
    if not isinstance(value, Mapping | None):
        raise AnswerError(f"policy_rewards: expected a mapping, got {plain_repr(value)}")
    rewards = dict(value or {})
    if not all(isinstance(name, str) for name in rewards):
        raise AnswerError(f"policy_rewards: expected names, got {plain_repr(list(rewards))}")
    result: dict[str, float] = {}
    for n, r in rewards.items():
        result[data.text(n)] = read_reward(r, "policy_rewards")
    return result


def read_reward(value: Any, name: str) -> float:
    """Return a number; an AnswerError begins with `name` if it is none or not finite in float32."""
    try:
        if isinstance(value, str | bytes):  # which float reads
            reward = math.nan
        else:
            reward = float.__float__(float(value))
    except Exception:  # a value of any type: an array, a tensor, a huge integer
        reward = math.nan
    if not abs(reward) <= LARGEST_REWARD:
        got = plain_repr(value, 100)
        raise AnswerError(f"{name}: expected a finite float32 number, got {got}")
    return reward


def read_reward_parts(value: Any, name: str) -> tuple[float, dict[str, float]]:
    """Return a reward and its named parts; as `read_reward` where it is no mapping.

    Args:
        value: a number, or a mapping with the key reward and further numbers by name.
    """
    if not isinstance(value, Mapping):
        return read_reward(value, name), {}
    parts = dict(value)
    if REWARD not in parts or not all(isinstance(key, str) for key in parts):
        got = plain_repr(value, 100)
        raise AnswerError(f"{name}: expected a number, or a mapping with the key reward, got {got}")
    reward = read_reward(parts.pop(REWARD), name)
    return reward, {key: read_reward(part, f"{name}[{key!r}]") for key, part in parts.items()}


def _done(value: Any) -> bool:
    text = f"done: expected true or false, got {plain_repr(value, 100)}"
    if isinstance(value, str | bytes):  # "False" is true
        raise AnswerError(text)
    try:
        return bool(value)
    except Exception as error:  # an array of several elements has no truth value
        raise AnswerError(text) from error


def _action(value: Any, data: PlainData) -> str | Message | None:
    if value is None:
        return None
    if isinstance(value, str):
        return data.text(value)
    if isinstance(value, Mapping):
        try:
            message: Message = data.of(value)
            if _is_message(message) and message["role"] == "assistant":
                return normalize_message(message)
        except (TypeError, ValueError) as error:
            raise AnswerError(f"postprocessed_action: {error}") from error
    raise AnswerError(
        f"postprocessed_action: expected text or an assistant message, got {plain_repr(value)}"
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and ("content" in value or bool(value.get("tool_calls")))
    )
