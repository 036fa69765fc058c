"""Demonstrations: chats whose assistant turns are trained, as steps of an agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyrl_fast.config import GeneratorConfig
from skyrl_fast.rollout.chat_messages import Message, normalize_messages, plain_value
from skyrl_fast.rollout.chat_template import ChatTemplate
from skyrl_fast.rollout.context import ContextError, begin_context, render_answer
from skyrl_fast.rollout.stop_reason import STOP
from skyrl_fast.rollout.trajectory import Step

# Keys of a message by which data sets exclude answers.
FLAGS = ("weight", "train", "loss", "trainable", "loss_weight")
_TRUE = ("1", "1.0", "true")
_FALSE = ("0", "0.0", "false")


def chat_of(row: Any, where: str) -> list[Message]:
    """Return the messages of a row.

    Args:
        row: a list of messages, or a mapping with `messages`; or one with `prompt` (text or
            messages) and `completion` (text or messages).
        where: location of the row, for messages.

    Raises:
        ValueError: another row, a message without role or content, or no answer to train.
    """
    found = plain_value(row)
    if isinstance(found, Mapping):
        given = found
        found = found.get("messages")
        if found is None:
            found = [*_as_messages(given.get("prompt"), "user")]
            found += _as_messages(given.get("completion"), "assistant")
    if not isinstance(found, list) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in found
    ):
        raise ValueError(
            f"{where}: expected a list of messages with role and content, `messages`, or `prompt` "
            f"and `completion`, got {row!r:.200}"
        )
    try:
        messages = normalize_messages(found)
        trained = list(map(is_trained, messages))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if first_answer(messages) == 0 or not any(trained):
        raise ValueError(
            f"{where}: expected a prompt and an assistant message after it that is to be trained, "
            f"got the roles {', '.join(message['role'] for message in messages) or 'none'}"
        )
    return messages


def _as_messages(value: Any, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        return value
    return [value]


def first_answer(messages: Sequence[Message]) -> int:
    """Return the number of messages before the first answer: those of the prompt."""
    roles = [message["role"] for message in messages]
    if "assistant" in roles:
        return roles.index("assistant")
    return len(roles)


def is_trained(message: Message) -> bool:
    """Return whether a message is an answer to train; one of `FLAGS` that is false excludes it.

    Raises:
        ValueError: one of the FLAGS is neither true nor false; the error names it.
    """
    if message["role"] != "assistant":
        return False
    flags = [(name, message[name]) for name in FLAGS if message.get(name) is not None]
    for name, value in flags:
        if str(value).lower() not in (*_TRUE, *_FALSE):
            raise ValueError(f"{name}: expected 0, 1, true or false, got {value!r:.100}")
    return all(str(value).lower() not in _FALSE for _, value in flags)


def build_demonstration(
    messages: Sequence[Message],
    tokenizer: Any,
    generator: GeneratorConfig,
    where: str,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Step]:
    """Return a step per answer, with the prompt that the agent loop would make.

    Args:
        messages: the result of `chat_of`.
        tokenizer: with a chat template and an end token.
        generator: settings with `chat_template` resolved.
        template_kwargs: the row's, such as `tools`, in place of the settings'.

    Raises:
        ValueError: the chat template refuses the messages, or a prompt or an answer is longer than
            the settings allow. The error names row and message.
    """
    steps: list[Step] = []
    kwargs = {**generator.chat_template_kwargs, **(template_kwargs or {})}
    try:
        for step in _steps(messages, tokenizer, generator, kwargs):
            # One by one: the number of complete steps tells which message an error is about.
            steps.append(step)
    except (ContextError, ValueError) as error:
        places = []
        for number, m in enumerate(messages):
            if m["role"] == "assistant":
                places.append(number)
        raise ValueError(f"{where}, message {places[len(steps)]}: {error}") from error
    return steps


def _steps(
    messages: Sequence[Message], tokenizer: Any, generator: GeneratorConfig, kwargs: dict[str, Any]
) -> Iterator[Step]:
    plain = []
    for message in messages:
        plain.append({k: v for k, v in message.items() if k not in FLAGS})
    place = first_answer(plain)
    options: dict[str, Any] = {
        "chat_template": generator.chat_template,
        "template_kwargs": kwargs,
    }
    template = ChatTemplate(tokenizer, generator.chat_template, kwargs)
    context = begin_context(generator.context, template, plain[:place])
    longest = generator.sampling_params.max_generate_length
    while True:
        answer = plain[place]
        prompt = list(context.prompt_token_ids())
        following = first_answer(plain[place + 1 :])
        observation = plain[place + 1 : place + 1 + following]
        response = render_answer(tokenizer, plain[:place], answer, observation, **options)
        for name, ids, limit, setting in (
            ("prompt", prompt, generator.max_input_length, "max_input_length"),
            ("answer", response, longest, "sampling_params.max_generate_length"),
        ):
            if len(ids) > limit:
                raise ValueError(
                    f"expected a {name} of at most generator.{setting}={limit} tokens, "
                    f"got {len(ids)}"
                )
        text = tokenizer.decode(response, skip_special_tokens=True)  # a tool call is no content
        yield _step(prompt, response, text, is_trained(messages[place]))
        place += 1 + following
        if place == len(plain):
            return
        context.add_response(response, answer, replaced=False)
        context.add_observation(observation)


def _step(prompt: list[int], response: list[int], text: str, trained: bool) -> Step:
    return Step(
        prompt_token_ids=prompt,
        response_ids=response,
        loss_mask=[int(trained)] * len(response),
        rollout_logprobs=None,
        reward=0.0,
        stop_reason=STOP,
        policy_version=0,
        text=text,
        observation="",
        llm_seconds=0.0,
        env_seconds=0.0,
    )
