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


class Context(Protocol):
    """What the agent loop asks of a context."""

    def prompt_token_ids(self) -> list[int]:
        """The tokens of this turn's prompt; a list of its own."""

    def add_response(self, token_ids: Sequence[int], text: str, *, replaced: bool) -> None:
        """The model answered.

        Args:
            token_ids: the sampled tokens, and an end token where one was appended.
            text: what the environment acted on, for contexts made of messages.
            replaced: the environment put `text` in the sampled answer's place.
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
        template_kwargs: passed to the chat template.
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

    def text(self, messages: Sequence[Message]) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages),
            chat_template=self._chat_template,
            add_generation_prompt=True,
            tokenize=False,
            **self._kwargs,
        )

    def token_ids(self, text: str) -> list[int]:
        # The template has written the special tokens already.
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class _AppendContext:
    """Token in, token out."""

    def __init__(self, render: _Template, messages: Sequence[Message]) -> None:
        self._render = render
        self._token_ids = render.token_ids(render.text(messages))
        # Some templates demand a system or a user message first: keep the prompt's own.
        self._messages = list(messages)

    def prompt_token_ids(self) -> list[int]:
        return list(self._token_ids)

    def add_response(self, token_ids: Sequence[int], text: str, *, replaced: bool) -> None:
        self._token_ids += self._render.token_ids(text) if replaced else token_ids

    def add_observation(self, messages: Sequence[Message]) -> None:
        answer = {"role": "assistant", "content": _ANSWER}
        text = self._render.text([*self._messages, answer, *messages])
        # What the template writes behind an answer: its end, the observation, the next start.
        token_ids = self._render.token_ids(text.rpartition(_ANSWER)[2])
        end = self._render.tokenizer.eos_token_id
        already_ended = self._token_ids[-1:] == [end]
        self._token_ids += token_ids[1:] if already_ended and token_ids[:1] == [end] else token_ids


class _RetemplateContext:
    """The chat template renders the whole history every turn."""

    def __init__(self, render: _Template, messages: Sequence[Message]) -> None:
        self._render = render
        self._messages = list(messages)

    def prompt_token_ids(self) -> list[int]:
        return self._render.token_ids(self._render.text(self._messages))

    def add_response(self, token_ids: Sequence[int], text: str, *, replaced: bool) -> None:
        self._messages.append({"role": "assistant", "content": text})

    def add_observation(self, messages: Sequence[Message]) -> None:
        self._messages += messages


class _SingleContext:
    """One long answer of the model, with observations inside."""

    def __init__(self, render: _Template, messages: Sequence[Message]) -> None:
        self._render = render
        self._token_ids = render.token_ids(render.text(messages))

    def prompt_token_ids(self) -> list[int]:
        return list(self._token_ids)

    def add_response(self, token_ids: Sequence[int], text: str, *, replaced: bool) -> None:
        end = self._render.tokenizer.eos_token_id
        kept = token_ids[:-1] if token_ids and token_ids[-1] == end else token_ids
        self._token_ids += self._render.token_ids(text) if replaced else kept

    def add_observation(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._token_ids += self._render.token_ids(str(message["content"]))
