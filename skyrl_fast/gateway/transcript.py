"""What the calls of a session said, as chat messages: for fine-tuning data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_fast.gateway.messages import Answer, Call, Choice
from skyrl_fast.rollout.chat_messages import Message, parse_arguments


@dataclass(frozen=True, slots=True)
class _Said:
    """One answer.

    Args:
        shared: number of leading messages that the answer before this one has, too, itself
            included.
        messages: the others before the answer.
        template: what else the request says of the prompt: `tools`, `chat_template_kwargs`.
    """

    shared: int
    messages: list[Message]
    answer: Message
    template: dict[str, Any]


class Transcript:
    """The trained answers of a session's chats, in order of delivery.

    A conversation is kept once, however many calls repeat it.
    """

    def __init__(self) -> None:
        self._said: list[_Said] = []
        self._last: list[Message] = []  # the last conversation, with its answer
        self._ids: set[str] = set()

    def add(self, call: Call, answer: Answer) -> None:
        """Add the choices of an answer, unless they are there: a repeated call has the same."""
        if call.messages is None or answer.id in self._ids:
            return
        self._ids.add(answer.id)
        given = {"tools": call.tools, "chat_template_kwargs": call.template_kwargs}
        template = {name: value for name, value in given.items() if value}
        for choice in answer.choices:
            message = _message(choice)
            shared = _count_shared(self._last, call.messages)
            self._said.append(_Said(shared, call.messages[shared:], message, template))
            self._last = [*call.messages, message]

    def records(self) -> list[dict[str, Any]]:
        """Return the answers as JSON values; `sft_rows` reads them."""
        return [
            {
                "shared": said.shared,
                "messages": said.messages,
                "answer": said.answer,
                **said.template,
            }
            for said in self._said
        ]


def _message(choice: Choice) -> Message:
    message: Message = {"role": "assistant", "content": choice.text}
    if choice.thoughts:
        message["reasoning_content"] = choice.thoughts
    if choice.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": parse_arguments(call.arguments)},
            }
            for call in choice.tool_calls
        ]
    return message


def _count_shared(
    before: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> int:
    for number, (one, other) in enumerate(zip(before, messages, strict=False)):
        if one != other:
            return number
    return min(len(before), len(messages))
