"""The model's context from turn to turn: appended token by token, or rendered again.

Three kinds with one interface: `prompt_token_ids` returns a turn's prompt; `add_response` and
`add_observation` add the response and the observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from skyrl_fast.rollout.chat_template import ChatTemplate, ContextError, Message, message_text

CONTEXTS = ("append", "retemplate", "single")
# Marks the place of the model's answer in a rendered template.
_ANSWER = "ANSWER-4f1c9b"


class Context(Protocol):
    """What the agent loop needs from a context."""

    def prompt_token_ids(self) -> list[int]:
        """Return the tokens of this turn's prompt, as a new list."""

    def add_response(self, token_ids: Sequence[int], message: Message, *, replaced: bool) -> None:
        """Add the model's answer.

        Args:
            token_ids: the sampled tokens, and an end token where one was appended.
            message: the answer for contexts made of messages; it may have tool calls.
            replaced: whether the environment replaced the sampled answer by the message's text.
        """

    def add_observation(self, messages: Sequence[Message]) -> None:
        """Add the environment's answer; called once per turn, also without messages."""


def make_context(
    kind: str,
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> Context:
    """Return a context that begins with the first prompt's messages.

    Args:
        kind: "append": tokens are only appended, so that the trained tokens are the sampled ones.
            "retemplate": the complete history is rendered by the chat template every turn, for
            models whose template rewrites it. "single": observations are plain text inside one
            answer.
        tokenizer: of transformers, with a chat template.
        messages: the first prompt.
        chat_template: replaces the tokenizer's own.
        template_kwargs: passed to the chat template, such as `tools`.
        max_length: longest prompt in tokens. A text that makes a prompt longer may be cut, and the
            prompt is still longer.

    Raises:
        ValueError: unknown kind. ContextError: the chat template refuses the messages.
    """
    render = ChatTemplate(tokenizer, chat_template, template_kwargs, max_length=max_length)
    if kind == "append":
        return _AppendContext(render, messages)
    if kind == "retemplate":
        return _RetemplateContext(render, messages)
    if kind == "single":
        return _SingleContext(render, messages)
    raise ValueError(f"make_context: kind: wanted one of {CONTEXTS}, got {kind!r}")


def rendered_answer(
    tokenizer: Any,
    messages: Sequence[Message],
    answer: Message,
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of an answer as the chat template writes it, with its end token.

    Where the template does not write the answer after the prompt (it adds or removes thoughts,
    say), they are those of its text.

    Args:
        tokenizer, chat_template, template_kwargs: as for `make_context`.
        messages: before the answer.
        answer: an assistant message; it may have tool calls.

    Raises:
        ContextError: the chat template refuses the messages.
    """
    render = ChatTemplate(tokenizer, chat_template, template_kwargs)
    prompt = render.text(messages)
    complete = render.text([*messages, answer], answer_next=False)
    text = complete[len(prompt) :] if complete.startswith(prompt) else message_text(answer)
    text = text.partition(tokenizer.eos_token)[0]
    return [*render.token_ids(text), tokenizer.eos_token_id]


def _after_answer(
    render: ChatTemplate, prompt: Sequence[Message], answer: Message, observation: Sequence[Message]
) -> str:
    """Return what the template writes after an answer: its end, observation, next start."""
    marker = _ANSWER
    while any(marker in message_text(message) for message in (*prompt, *observation)):
        marker += "-"
    plain = {"role": "assistant", "content": marker}
    if not answer.get("tool_calls"):
        return _text_after(marker, render.text([*prompt, plain, *observation]))
    # The sampled tokens contain the calls already, but some templates require a tool's answer
    # to follow its call. So: the end of a plain answer, then what the observation adds after
    # the answer with calls.
    closed = _text_after(marker, render.text([*prompt, plain], answer_next=False))
    called = [*prompt, {**answer, "content": marker}]
    before = _text_after(marker, render.text(called, answer_next=False))
    after = _text_after(marker, render.text([*called, *observation]))
    if not after.startswith(before):
        raise ContextError(
            "the chat template rewrites an answer with tool calls when an observation follows: "
            "use context=retemplate"
        )
    return closed + after[len(before) :]


def _text_after(marker: str, text: str) -> str:
    _, found, rest = text.rpartition(marker)
    if not found:
        raise ContextError(
            "the chat template leaves out or changes an answer when an observation follows: use "
            "context=retemplate"
        )
    return rest


class _AppendContext:
    """Tokens are only appended: token ids in, token ids out."""

    def __init__(self, render: ChatTemplate, messages: Sequence[Message]) -> None:
        self._render = render
        self._token_ids = render.token_ids(render.text(messages))
        # Some templates require a system or user message first: keep the prompt's messages.
        self._messages = list(messages)
        self._answer: Message = {}

    def prompt_token_ids(self) -> list[int]:
        return list(self._token_ids)

    def add_response(self, token_ids: Sequence[int], message: Message, *, replaced: bool) -> None:
        self._answer = self._render.without_control_tokens(message)
        text = message_text(self._answer)
        self._token_ids += self._render.token_ids(text) if replaced else token_ids

    def add_observation(self, messages: Sequence[Message]) -> None:
        observation = self._render.without_control_tokens(messages)
        text = _after_answer(self._render, self._messages, self._answer, observation)
        tokenizer = self._render.tokenizer
        if self._token_ids[-1:] == [tokenizer.eos_token_id]:
            # The answer ends with its end token; some templates write a space before it.
            before, found, rest = text.partition(tokenizer.eos_token)
            text = rest if found and not before.strip() else text
        self._token_ids += self._render.token_ids(text)


class _RetemplateContext:
    """The chat template renders the complete history every turn."""

    def __init__(self, render: ChatTemplate, messages: Sequence[Message]) -> None:
        self._render = render
        self._messages = list(messages)

    def prompt_token_ids(self) -> list[int]:
        return self._render.token_ids(self._render.text(self._messages))

    def add_response(self, token_ids: Sequence[int], message: Message, *, replaced: bool) -> None:
        self._messages.append(self._render.without_control_tokens(message))

    def add_observation(self, messages: Sequence[Message]) -> None:
        self._messages += self._render.without_control_tokens(messages)


class _SingleContext:
    """One long answer of the model, with observations inside."""

    def __init__(self, render: ChatTemplate, messages: Sequence[Message]) -> None:
        self._render = render
        self._token_ids = render.token_ids(render.text(messages))

    def prompt_token_ids(self) -> list[int]:
        return list(self._token_ids)

    def add_response(self, token_ids: Sequence[int], message: Message, *, replaced: bool) -> None:
        end = self._render.tokenizer.eos_token_id
        kept = token_ids[:-1] if token_ids and token_ids[-1] == end else token_ids
        text = self._render.without_control_tokens(message_text(message))
        self._token_ids += self._render.token_ids(text) if replaced else kept

    def add_observation(self, messages: Sequence[Message]) -> None:
        for message in messages:
            text = self._render.without_control_tokens(message_text(message))
            self._token_ids += self._render.token_ids(text)
