"""What an environment is: the `Env` protocol, and the answer to one step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


class Action(str):
    """A model's response: its text, and the tool calls in it.

    Args:
        tool_calls: those that `generator.tool_parser` found, in order:
            `{"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}`.
            An answer with a call whose arguments are no JSON object has none.
        unparsed_tool_calls: whether a call in it cannot be parsed, or is of a function that the
            prompt's tools do not have.
    """

    tool_calls: list[dict[str, Any]]
    unparsed_tool_calls: bool

    def __new__(
        cls,
        text: str,
        tool_calls: Sequence[dict[str, Any]] = (),
        unparsed_tool_calls: bool = False,
    ) -> Action:
        action = super().__new__(cls, text)
        action.tool_calls = list(tool_calls)
        action.unparsed_tool_calls = unparsed_tool_calls
        return action

    def __reduce__(self) -> tuple[type[Action], tuple[Any, ...]]:
        return Action, (str(self), self.tool_calls, self.unparsed_tool_calls)


@dataclass(frozen=True, slots=True)
class EnvStep:
    """An environment's answer to one action.

    Args:
        reward: reward of this step, a finite number; or a mapping with the key reward and further
            numbers by name, which are metrics of the episode, each summed over its steps.
        done: whether the episode is over.
        observations: what the model reads next: chat messages, one of them, or plain text (a user
            message); empty for none.
        postprocessed_action: text that replaces the action in the history; or an assistant message
            that holds the same action with its tool calls; or None.
        policy: name of the policy that answers next, in a run of several, or of its role, in a run
            of `trainer.policy.roles`; None: as before.
        policy_rewards: outcomes by that name, in place of `reward`, with the last step.

    Example:
        >>> EnvStep(0.0, done=False, observations="higher").observations
        'higher'
    """

    reward: float | Mapping[str, float]
    done: bool
    observations: Sequence[Mapping[str, Any]] | Mapping[str, Any] | str | None = ()
    postprocessed_action: str | Mapping[str, Any] | None = None
    policy: str | None = None
    policy_rewards: Mapping[str, float] = field(default_factory=dict)


class Env(Protocol):
    """The environment of one trajectory.

    Its methods may block: they run in threads or in a process (`environment.workers`), one call at
    a time, each with the deadline `environment.timeout_seconds`. They may also be coroutine
    functions, which run in one event loop per process, without a limit of calls at a time. A
    subclass has to define only `step`.

    Example:
        class Guess(Env):
            def __init__(self, row):
                self.number = row["number"]

            def step(self, action):
                right = action.strip() == str(self.number)
                return EnvStep(float(right), done=right, observations="" if right else "no")
    """

    def __init__(self, row: dict[str, Any] | None = None) -> None:
        """Create the environment of one trajectory.

        Args:
            row: a copy of the data's row, without its `prompt`.
        """
        return

    def init(
        self, messages: list[Message]
    ) -> Sequence[Mapping[str, Any]] | Awaitable[Sequence[Mapping[str, Any]]]:
        """Begin the episode; return the first prompt.

        Args:
            messages: the chat messages of the row's `prompt`.
        """
        return messages

    @abstractmethod
    def step(
        self, action: Action
    ) -> EnvStep | Mapping[str, Any] | Awaitable[EnvStep | Mapping[str, Any]]:
        """Return the answer to the model's response.

        Args:
            action: the text of the response, a `str` with the attribute `tool_calls`; without
                special tokens, unless `generator.tool_parser` is set.

        Returns:
            An `EnvStep`, or a mapping with the keys observations, reward and done.
        """

    def metrics(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """Return metrics of the episode, by name; called once, at its end."""
        return {}

    def close(self) -> Awaitable[None] | None:
        """Free the resources of the episode."""
        return None
