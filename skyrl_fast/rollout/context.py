"""The model's context from turn to turn: appended token by token, or rendered again.

Three kinds with one interface: `prompt_token_ids` returns a turn's prompt; `add_response` and
`add_observation` add the response and the observation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Message = dict[str, Any]

CONTEXTS = ("append", "retemplate", "single")
# A text of more characters than this for each of n tokens has more than n tokens.
CHARACTERS_PER_TOKEN = 512
FIRST_FACTORS = (8, 64)  # characters per token of which a long text is tokenised first
MARGIN = 64  # tokens that the end of a cut text may change
# Marks the place of the model's answer in a rendered template.
_ANSWER = "ANSWER-4f1c9b"
# Divides the name of a control token in a text, so that its parts are encoded separately. Unicode
# guarantees that these code points are no characters.
_BREAK = "\ufdd0\ufdd1"
_NOT_TEXT = frozenset(("role", "type", "id"))  # keys of a message


class ContextError(RuntimeError):
    """The template or tokenizer refuses the messages, or the template rewrites the history."""


def message_text(message: Message) -> str:
    """Return a message's content as text, also for a list of parts or for tool calls only.

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
    render = _Template(tokenizer, chat_template, dict(template_kwargs or {}), max_length)
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
    render = _Template(tokenizer, chat_template, dict(template_kwargs or {}), max_length=None)
    prompt = render.text(messages)
    complete = render.text([*messages, answer], answer_next=False)
    text = complete[len(prompt) :] if complete.startswith(prompt) else message_text(answer)
    text = text.partition(tokenizer.eos_token)[0]
    return [*render.token_ids(text), tokenizer.eos_token_id]


class _Template:
    """The tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None,
        kwargs: dict[str, Any],
        max_length: int | None,
    ) -> None:
        self.tokenizer = tokenizer
        self._control_tokens = _control_tokens(tokenizer)
        self._max_length = max_length
        self._chat_template = chat_template
        self._kwargs = kwargs

    def text(self, messages: Sequence[Message], *, answer_next: bool = True) -> str:
        """Return the messages as text; `answer_next`: up to where the model's answer begins."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._chat_template,
                add_generation_prompt=answer_next,
                tokenize=False,
                **self._kwargs,
            )
        except Exception as error:  # templates may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ContextError(
                f"the chat template refuses messages of the roles {roles}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of rendered text; the template has written its special tokens.

        Of a text that is too long for any prompt, the first ones, which are too long as well.
        """
        if self._max_length is not None:
            for factor in FIRST_FACTORS:
                first = text[: factor * self._max_length]
                if len(first) == len(text):
                    break
                token_ids = self._encoded(first)
                if len(token_ids) > self._max_length + MARGIN:
                    return token_ids
        return self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        try:
            return [
                token_id
                for part in text.split(_BREAK)
                for token_id in self.tokenizer.encode(part, add_special_tokens=False)
            ]
        except Exception as error:  # a lone surrogate, for example, is in no vocabulary
            raise ContextError(
                f"the tokenizer refuses the messages' text ({len(text)} characters): "
                f"{type(error).__name__}: {error}"
            ) from error

    def without_control_tokens(self, value: Any) -> Any:
        """Return a text, or a message with all its texts, whose control tokens will be text.

        What an environment or a model writes must not begin or end a turn: `<|im_end|>` from a web
        page is ten characters. `token_ids` encodes the name of a control token in two parts, of
        which none is a control token.
        """
        if isinstance(value, str):
            return self._control_tokens.sub(lambda m: m[0][0] + _BREAK + m[0][1:], value)
        if isinstance(value, Mapping):
            return {
                key: item if key in _NOT_TEXT else self.without_control_tokens(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.without_control_tokens(item) for item in value]
        return value

    def after_answer(
        self, prompt: Sequence[Message], answer: Message, observation: Sequence[Message]
    ) -> str:
        """Return what the template writes after an answer: its end, observation, next start."""
        marker = _ANSWER
        while any(marker in message_text(message) for message in (*prompt, *observation)):
            marker += "-"
        plain = {"role": "assistant", "content": marker}
        if not answer.get("tool_calls"):
            return _text_after(marker, self.text([*prompt, plain, *observation]))
        # The sampled tokens contain the calls already, but some templates require a tool's answer
        # to follow its call. So: the end of a plain answer, then what the observation adds after
        # the answer with calls.
        closed = _text_after(marker, self.text([*prompt, plain], answer_next=False))
        called = [*prompt, {**answer, "content": marker}]
        before = _text_after(marker, self.text(called, answer_next=False))
        after = _text_after(marker, self.text([*called, *observation]))
        if not after.startswith(before):
            raise ContextError(
                "the chat template rewrites an answer with tool calls when an observation follows: "
                "use context=retemplate"
            )
        return closed + after[len(before) :]


def _control_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern of the names of the special tokens; those of one character stay."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    ordered = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


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

    def __init__(self, render: _Template, messages: Sequence[Message]) -> None:
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
        text = self._render.after_answer(self._messages, self._answer, observation)
        tokenizer = self._render.tokenizer
        if self._token_ids[-1:] == [tokenizer.eos_token_id]:
            # The answer ends with its end token; some templates write a space before it.
            before, found, rest = text.partition(tokenizer.eos_token)
            text = rest if found and not before.strip() else text
        self._token_ids += self._render.token_ids(text)


class _RetemplateContext:
    """The chat template renders the complete history every turn."""

    def __init__(self, render: _Template, messages: Sequence[Message]) -> None:
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

    def __init__(self, render: _Template, messages: Sequence[Message]) -> None:
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
