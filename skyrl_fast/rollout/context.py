"""The model's context from turn to turn: appended token by token, or rendered anew.

Three kinds, one interface: `prompt_token_ids` makes a turn's prompt, `add_response` and
`add_observation` take what happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Message = dict[str, Any]

CONTEXTS = ("append", "retemplate", "single")
# Stands for the model's answer while the template around it is looked at.
_ANSWER = "ANSWER-4f1c9b"


class ContextError(RuntimeError):
    """Template or tokenizer refuse the messages, or the template rewrites what they follow."""


def message_text(message: Message) -> str:
    """A message's content as text: also of a list of parts, or of tool calls alone.

    Example:
        >>> message_text({"role": "user", "content": [{"type": "text", "text": "hi"}]})
        'hi'
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(str(p.get("text", "")) if isinstance(p, dict) else str(p) for p in content)
    return str(content)


class Context(Protocol):
    """What the agent loop asks of a context."""

    def prompt_token_ids(self) -> list[int]:
        """The tokens of this turn's prompt; a list of its own."""

    def add_response(self, token_ids: Sequence[int], message: Message, *, replaced: bool) -> None:
        """The model answered.

        Args:
            token_ids: the sampled tokens, and an end token where one was appended.
            message: the answer for contexts made of messages; it may have tool calls.
            replaced: the environment put the message's text in the sampled answer's place.
        """

    def add_observation(self, messages: Sequence[Message]) -> None:
        """The environment answered; called once per turn, also without messages."""


def make_context(
    kind: str,
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Context:
    """A context that begins with the first prompt's messages.

    Args:
        kind: "append": tokens are only ever appended, so that what is trained is what was sampled.
            "retemplate": the whole history goes through the chat template every turn, for models
            whose template rewrites it. "single": observations are plain text inside one answer.
        tokenizer: of transformers, with a chat template.
        messages: the first prompt.
        chat_template: in place of the tokenizer's own.
        template_kwargs: passed to the chat template, such as `tools`.

    Raises:
        ValueError: unknown kind. ContextError: the chat template refuses the messages.
    """
    render = _Template(tokenizer, chat_template, dict(template_kwargs or {}))
    if kind == "append":
        return _AppendContext(render, messages)
    if kind == "retemplate":
        return _RetemplateContext(render, messages)
    if kind == "single":
        return _SingleContext(render, messages)
    raise ValueError(f"make_context: kind: wanted one of {CONTEXTS}, got {kind!r}")


class _Template:
    """The tokenizer's chat template."""

    def __init__(self, tokenizer: Any, chat_template: str | None, kwargs: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._kwargs = kwargs

    def text(self, messages: Sequence[Message], *, answer_next: bool = True) -> str:
        """The messages as text; `answer_next`: up to where the model's answer begins."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._chat_template,
                add_generation_prompt=answer_next,
                tokenize=False,
                **self._kwargs,
            )
        except Exception as error:  # templates raise what they like
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ContextError(
                f"the chat template refuses messages of the roles {roles}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def token_ids(self, text: str) -> list[int]:
        """Tokens of a text whose special tokens the template has written."""
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # a lone surrogate, for one, is in no vocabulary
            raise ContextError(
                f"the tokenizer refuses the messages' text ({len(text)} characters): "
                f"{type(error).__name__}: {error}"
            ) from error

    def behind_answer(
        self, prompt: Sequence[Message], answer: Message, observation: Sequence[Message]
    ) -> str:
        """What the template writes behind an answer: its end, the observation, the next start."""
        marker = _ANSWER
        while any(marker in message_text(message) for message in (*prompt, *observation)):
            marker += "-"
        plain = {"role": "assistant", "content": marker}
        if not answer.get("tool_calls"):
            return _behind(marker, self.text([*prompt, plain, *observation]))
        # The sampled tokens hold the calls already; yet some templates want to see a tool's
        # answer behind the call that it answers. So: the end of a plain answer, and what is added
        # behind the one with calls.
        closed = _behind(marker, self.text([*prompt, plain], answer_next=False))
        called = [*prompt, {**answer, "content": marker}]
        before = _behind(marker, self.text(called, answer_next=False))
        after = _behind(marker, self.text([*called, *observation]))
        if not after.startswith(before):
            raise ContextError(
                "the chat template rewrites an answer with tool calls when an observation follows: "
                "use context=retemplate"
            )
        return closed + after[len(before) :]


def _behind(marker: str, text: str) -> str:
    _, found, behind = text.rpartition(marker)
    if not found:
        raise ContextError(
            "the chat template leaves out or changes an answer when an observation follows: use "
            "context=retemplate"
        )
    return behind


class _AppendContext:
    """Token in, token out."""

    def __init__(self, render: _Template, messages: Sequence[Message]) -> None:
        self._render = render
        self._token_ids = render.token_ids(render.text(messages))
        # Some templates demand a system or a user message first: keep the prompt's own.
        self._messages = list(messages)
        self._answer: Message = {}

    def prompt_token_ids(self) -> list[int]:
        return list(self._token_ids)

    def add_response(self, token_ids: Sequence[int], message: Message, *, replaced: bool) -> None:
        self._answer = message
        text = message_text(message)
        self._token_ids += self._render.token_ids(text) if replaced else token_ids

    def add_observation(self, messages: Sequence[Message]) -> None:
        text = self._render.behind_answer(self._messages, self._answer, messages)
        tokenizer = self._render.tokenizer
        if self._token_ids[-1:] == [tokenizer.eos_token_id]:
            # The answer brought its end; some templates write a space before theirs.
            before, found, behind = text.partition(tokenizer.eos_token)
            text = behind if found and not before.strip() else text
        self._token_ids += self._render.token_ids(text)


class _RetemplateContext:
    """The chat template renders the whole history every turn."""

    def __init__(self, render: _Template, messages: Sequence[Message]) -> None:
        self._render = render
        self._messages = list(messages)

    def prompt_token_ids(self) -> list[int]:
        return self._render.token_ids(self._render.text(self._messages))

    def add_response(self, token_ids: Sequence[int], message: Message, *, replaced: bool) -> None:
        self._messages.append(message)

    def add_observation(self, messages: Sequence[Message]) -> None:
        self._messages += messages


class _SingleContext:
    """One long answer of the model, with observations inside."""

    def __init__(self, render: _Template, messages: Sequence[Message]) -> None:
        self._render = render
        self._token_ids = render.token_ids(render.text(messages))

    def prompt_token_ids(self) -> list[int]:
        return list(self._token_ids)

    def add_response(self, token_ids: Sequence[int], message: Message, *, replaced: bool) -> None:
        end = self._render.tokenizer.eos_token_id
        kept = token_ids[:-1] if token_ids and token_ids[-1] == end else token_ids
        text = message_text(message)
        self._token_ids += self._render.token_ids(text) if replaced else kept

    def add_observation(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._token_ids += self._render.token_ids(message_text(message))
