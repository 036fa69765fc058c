"""What the calls of a session said, as chat messages: for fine-tuning data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_fast.gateway.messages import Answer, Call, Choice
from skyrl_fast.rollout.chat_messages import Message, parse_arguments


class Transcript:
    """The trained answers of a session's chats, in order of delivery.

    A conversation is kept once, however many calls repeat it.

    Attributes:
        records: JSON values of each answer, which `sft_rows` reads: number of leading messages that
            the answer before it has, too, itself included; the others before it; the answer; and
            what else the request says of the prompt.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
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
            record = {"shared": shared, "messages": call.messages[shared:], "answer": message}
            self.records.append({**record, **template})
            self._last = [*call.messages, message]


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
