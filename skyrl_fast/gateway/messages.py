"""Calls and answers as all dialects see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_fast.rollout.chat_template import Message


class ApiError(Exception):
    """A call is answered with this HTTP status; `code` is for programs, where a dialect has any."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model.

    Args:
        model: name that the client asks for.
        messages: messages of a chat; None: `prompt`.
        prompt: text or tokens to continue.
        tools: JSON schemas of functions, as chat templates take them.
        parse_tools: whether to look for tool calls in the answer.
        forced_tool: "required" or the name of a function that the answer must call.
        structured: what the answer must be, as vLLM's structured outputs, such as {"json": schema}.
        max_tokens: most tokens of the answer; None: the run's limit.
        stop: strings that end the answer, which does not contain them; None: the run's.
        include_stop: whether the answer contains the stop string that ended it.
        stop_token_ids: tokens that end the answer; None: the run's.
        ignored: parameters of the request that change nothing here, each with the reason.
    """

    model: str
    messages: list[Message] | None = None
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    parse_tools: bool = True
    forced_tool: str | None = None
    structured: dict[str, Any] | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    include_stop: bool = False
    num_choices: int = 1
    stream: bool = False
    stop_token_ids: list[int] | None = None
    parallel_tool_calls: bool = True
    ignored: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a function: its id, name, and arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled answer.

    Args:
        text: without tool calls and thoughts.
        finish: "stop", "length" or "tool_calls".
        stop_string: that ended it, or None.
    """

    text: str
    thoughts: str
    tool_calls: list[ToolCall]
    finish: str
    stop_string: str | None
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of a call; unique `id` without a dialect's prefix, `model` as the client said."""

    id: str
    created: int
    model: str
    num_prompt_tokens: int
    choices: list[Choice]

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent returned for its trajectory.

    Args:
        reward: reward of the trajectory, on its last step; None: what was posted.
        call_rewards: rewards of single calls, by completion id.
        unless_posted: whether a reward that was posted for the trajectory replaces it.
        policy_rewards: rewards of the trajectory by policy, in place of `reward`.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    call_rewards: Mapping[str, float] = field(default_factory=dict)
    unless_posted: bool = False
    policy_rewards: Mapping[str, float] = field(default_factory=dict)
