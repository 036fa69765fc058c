"""Demonstrations: chats whose assistant turns are trained, as steps of an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_fast.config import GeneratorConfig
from skyrl_fast.rollout.chat_template import Message
from skyrl_fast.rollout.context import make_context, rendered_answer
from skyrl_fast.rollout.stop_reason import STOP
from skyrl_fast.rollout.trajectory import Step


def chat_of(row: Any, where: str) -> list[Message]:
    """Return the messages of a row.

    Args:
        row: a list of messages, or a mapping with `messages`; or one with `prompt` (text or
            messages) and `completion` (text or messages).
        where: location of the row, for messages.

    Raises:
        ValueError: another row, a message without role or content, or no answer to train.
    """
    found = row
    if isinstance(row, Mapping):
        found = row.get("messages")
        if found is None:
            found = [*_as_messages(row.get("prompt"), "user")]
            found += _as_messages(row.get("completion"), "assistant")
    if not isinstance(found, list | tuple) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in found
    ):
        raise ValueError(
            f"{where}: wanted a list of messages with role and content, `messages`, or `prompt` "
            f"and `completion`, got {row!r:.200}"
        )
    messages = [dict(message) for message in found]
    first = first_answer(messages)
    if first == 0 or all(not is_trained(message) for message in messages):
        raise ValueError(
            f"{where}: wanted a prompt and an assistant message of weight other than 0 after it, "
            f"got the roles {', '.join(message['role'] for message in messages) or 'none'}"
        )
    return messages


def _as_messages(value: Any, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return list(value) if isinstance(value, list | tuple) else [value]


def first_answer(messages: Sequence[Message]) -> int:
    """Return the number of messages before the first answer: those of the prompt."""
    roles = [message["role"] for message in messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def is_trained(message: Message) -> bool:
    """Return whether a message is an answer to train; `weight: 0` excludes it."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


def demonstrated_steps(
    messages: Sequence[Message], tokenizer: Any, generator: GeneratorConfig, where: str
) -> list[Step]:
    """Return a step per answer, with the prompt that the agent loop would make.

    Args:
        messages: of `chat_of`.
        tokenizer: with a chat template and an end token.
        generator: settings with `context`, `chat_template` and `max_input_length` resolved.
        where: location of the row, for messages.

    Raises:
        ValueError: a prompt or an answer is longer than the settings allow.
        ContextError: the chat template refuses the messages.
    """
    assert generator.max_input_length is not None
    plain = [{k: v for k, v in message.items() if k != "weight"} for message in messages]
    place = first_answer(plain)
    options: dict[str, Any] = {
        "chat_template": generator.chat_template,
        "template_kwargs": generator.chat_template_kwargs,
    }
    context = make_context(generator.context, tokenizer, plain[:place], **options)
    longest = generator.sampling_params.max_generate_length
    steps: list[Step] = []
    while place < len(plain):
        answer = plain[place]
        prompt = context.prompt_token_ids()
        following = first_answer(plain[place + 1 :])
        observation = plain[place + 1 : place + 1 + following]
        response = rendered_answer(tokenizer, plain[:place], answer, observation, **options)
        for name, ids, limit, setting in (
            ("prompt", prompt, generator.max_input_length, "max_input_length"),
            ("answer", response, longest, "sampling_params.max_generate_length"),
        ):
            if len(ids) > limit:
                raise ValueError(
                    f"{where}, message {place}: wanted a {name} of at most generator.{setting}="
                    f"{limit} tokens, got {len(ids)}"
                )
        steps.append(_step(prompt, response, answer, is_trained(messages[place])))
        context.add_response(response, answer, replaced=False)
        context.add_observation(observation)
        place += 1 + following
        if place == len(plain):
            break
    return steps


def _step(prompt: list[int], response: list[int], answer: Message, trained: bool) -> Step:
    return Step(
        prompt_token_ids=prompt,
        response_ids=response,
        loss_mask=[int(trained)] * len(response),
        rollout_logprobs=None,
        reward=0.0,
        stop_reason=STOP,
        policy_version=0,
        text=str(answer.get("content") or ""),
        observation="",
        llm_seconds=0.0,
        env_seconds=0.0,
    )
