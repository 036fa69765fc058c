"""The model's context from turn to turn: appended token by token, or rendered again.

Four kinds with one interface: `prompt_token_ids` returns a turn's prompt; `add_response` and
`add_observation` add the response and the observation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from skyrl_fast.rollout.chat_messages import with_text
from skyrl_fast.rollout.chat_template import (
    MARKER,
    ChatTemplate,
    ContextError,
    Message,
    message_text,
    text_after,
)

_OPENING_TAG = re.compile(r"([<\[◁])(\w+)([>\]▷])")  # opening tags of thoughts, such as <think>


class Context(Protocol):
    """What the agent loop needs from a context."""

    template: ChatTemplate

    def prompt_token_ids(self) -> list[int]:
        """Return the tokens of this turn's prompt: a new list, or the last one, which has grown."""

    def add_response(
        self, token_ids: Sequence[int], message: Message, *, replaced: bool, stopped: bool = True
    ) -> None:
        """Add the model's answer.

        Args:
            token_ids: the sampled tokens, and an end token where one was appended.
            message: the answer for contexts made of messages; it may have tool calls.
            replaced: whether the environment replaced the sampled answer by the message's text.
        """

    def add_observation(self, messages: Sequence[Message]) -> None:
        """Add the environment's answer; called once per turn, also without messages."""


def begin_context(kind: str, template: ChatTemplate, messages: Sequence[Message]) -> Context:
    """Return a context that begins with the first prompt's messages.

    Args:
        kind: "append": tokens are only appended, so that the trained tokens are the sampled ones.
            "retemplate": the complete history is rendered by the chat template every turn, for
            models whose template rewrites it. "single": observations are plain text inside one
            answer. "compact": as "append", until a `CompactContext` is replaced.

    Raises:
        ValueError: unknown kind. ContextError: the chat template refuses the messages.
    """
    if kind not in CONTEXTS:
        raise ValueError(f"begin_context: kind: expected one of {(*CONTEXTS,)}, got {kind!r}")
    return CONTEXTS[kind](template, messages)


def render_answer(
    tokenizer: Any,
    messages: Sequence[Message],
    answer: Message,
    following: Sequence[Message] = (),
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of an answer as the chat template writes it, with its end token.

    Thoughts in the answer's text that the template removes are kept, as the model writes them.

    Args:
        following: messages after it. Where the template writes no end after an answer, it ends
            with the beginning of the next message, if there is one: GLM's models do.

    Raises:
        ContextError: the chat template refuses the messages or leaves out a part of the answer.
    """
    template = ChatTemplate(tokenizer, chat_template, template_kwargs)
    prompt = template.text(messages)
    text = _answer_text(template, prompt, messages, answer)
    ids = template.token_ids(text, after=template.token_ids(prompt))
    ids = template.until_end(ids)
    if template.ends_turn(ids, stopped=False) or template.special_ids.issuperset(ids[-1:]):
        return ids
    if following:
        after = _after_answer(template, messages, answer, following)
    else:
        after = ""
    following_ids = template.token_ids(after, after=ids)
    index = template.first_added(following_ids)
    return [*ids, template.end_id if index is None else following_ids[index]]


def _answer_text(
    template: ChatTemplate, prompt: str, messages: Sequence[Message], answer: Message
) -> str:
    complete = template.render_checked([*messages, answer], len(messages), answer_next=False)
    before = template.text(messages, answer_next=False)
    shared = start = len(prompt)
    if not complete.startswith(prompt):
        # The prompt may open what the answer itself begins, such as thoughts: compare up to where
        # they part.
        parted = len(complete)
        for place, (one, other) in enumerate(zip(prompt, complete, strict=False)):
            if one != other:
                parted = place
                break
        if parted < len(before.rstrip()):
            start = _answer_start(template, prompt, before, messages, complete)
        else:
            shared = start = parted
    opened = prompt[shared:]
    text = complete[start:]
    content = message_text(answer)
    if not _contains(prompt[len(before) : shared] + text, content):
        # The template drops thoughts, which the model writes: they are trained as they are.
        text = content
        if answer.get("tool_calls"):
            raise ContextError("the chat template leaves out the text before tool calls")
    # The answer repeats the opening that the prompt has: it is trained once.
    if opened.strip() and content.lstrip().startswith(opened.strip()):
        text = content.lstrip().removeprefix(opened.strip()).removeprefix("\n")
    for left, tag, right in _OPENING_TAG.findall(opened):
        closing = f"{left}/{tag}{right}"
        if closing not in opened and closing not in text:
            raise ContextError(
                f"the chat template begins an answer with {left}{tag}{right}, which this answer "
                f"does not continue: expected thoughts and {closing} before its text"
            )
    if not _contains(text, message_text({"content": answer.get("reasoning_content")})):
        raise ContextError("the chat template leaves out the thoughts of the answer")
    return text


def _answer_start(
    template: ChatTemplate, prompt: str, before: str, messages: Sequence[Message], complete: str
) -> int:
    """Return where an answer begins in a render that changes the messages before it.

    Qwen3's template writes empty thoughts into the last of several answers in a row only.
    """
    opening = prompt.removeprefix(before)
    marker = _unused_marker(messages)
    plain = template.text([*messages, {"role": "assistant", "content": marker}], answer_next=False)
    head, found, _ = plain.partition(marker)
    begin = head.rfind(opening)
    start = begin + len(opening)
    is_marked = opening not in ("", prompt) and bool(found) and begin >= 0
    if not is_marked or not complete.startswith(head[:start]):
        raise ContextError(
            "the chat template writes the messages before this answer otherwise once it follows "
            "them, and does not mark where it begins: expected a template that writes both alike, "
            "or other messages before the answer"
        )
    return start


def _contains(text: str, part: str) -> bool:
    """Return whether a text contains another one, but for white space."""
    # Templates strip and indent as they like; only the words must be there.
    return "".join(part.split()) in "".join(text.split())


def _unused_marker(messages: Sequence[Message]) -> str:
    marker = MARKER
    while any(marker in message_text(message) for message in messages):
        # A text of the chat must not be taken for the place of the answer.
        marker += "-"
    return marker


def _after_answer(
    template: ChatTemplate,
    prompt: Sequence[Message],
    answer: Message,
    observation: Sequence[Message],
    end: str = "",
) -> str:
    """Return what the template writes after an answer: its end, observation, next start.

    Args:
        end: the end token that was sampled; "": none.
    """
    marker = _unused_marker([*prompt, *observation])
    plain = {"role": "assistant", "content": marker}
    if not answer.get("tool_calls"):
        return text_after(
            marker, template.render_checked([*prompt, plain, *observation], len(prompt))
        )
    # The sampled tokens contain the calls already, but some templates require a tool's answer
    # to follow its call. So: the end of a plain answer, or the one that was sampled where calls
    # end otherwise, then what the observation adds after the answer with calls.
    closed = text_after(marker, template.text([*prompt, plain], answer_next=False))
    # Gemma 4 writes a text after the tools' answers: there only a call without one is continued.
    for content in (marker, "") if not message_text(answer) else (marker,):
        called = [*prompt, {**answer, "content": content}]
        before = template.text(called, answer_next=False)
        after = template.render_checked([*called, *observation], len(called))
        stripped = before.rstrip()
        if end and stripped.endswith(end):
            closed = before[len(stripped) - len(end) :]
        if marker in before and marker in after:  # some templates write calls without a text
            before = text_after(marker, before)
            after = text_after(marker, after)
        if after.startswith(before):
            return closed + after[len(before) :]
    raise ContextError(
        "the chat template rewrites an answer with tool calls when an observation follows: "
        "use context=retemplate"
    )


class _GrowingContext:
    def __init__(self, template: ChatTemplate, messages: Sequence[Message]) -> None:
        self.template = template
        self._token_ids = template.token_ids(template.render_checked(messages))

    def prompt_token_ids(self) -> list[int]:
        return self._token_ids


class _AppendContext(_GrowingContext):
    def __init__(self, template: ChatTemplate, messages: Sequence[Message]) -> None:
        super().__init__(template, messages)
        # Some templates require a system or user message first: keep the prompt's messages.
        self._messages = list(messages)
        self._answer: Message = {}
        self._ended = False

    def add_response(
        self, token_ids: Sequence[int], message: Message, *, replaced: bool, stopped: bool = True
    ) -> None:
        self._answer = self.template.without_control_tokens(message)
        if replaced:
            text = message_text(self._answer)
            token_ids = self.template.token_ids(text, after=self._token_ids)
        self._token_ids += token_ids
        self._ended = not replaced and self.template.ends_turn(token_ids, stopped=stopped)

    def add_observation(self, messages: Sequence[Message]) -> None:
        self._token_ids += self._observation_ids(messages, self._token_ids)

    def _observation_ids(self, messages: Sequence[Message], before: Sequence[int]) -> list[int]:
        """Return the tokens of an observation after the last answer, with which `before` ends."""
        template = self.template
        observation = template.without_control_tokens(messages)
        if self._ended:
            end = template.control_token_names.get(before[-1], "")
        else:
            end = ""
        text = _after_answer(template, self._messages, self._answer, observation, end)
        ids = template.token_ids(text, after=before)
        index = template.first_added(ids)
        if index is not None:
            is_end = self._ended and template.ends_turn(ids[: index + 1], stopped=False)
            if is_end or [ids[index]] == list(before[-1:]):  # the answer has its end already
                ids = ids[index + 1 :]
        return ids


class _RetemplateContext:
    def __init__(self, template: ChatTemplate, messages: Sequence[Message]) -> None:
        self.template = template
        self._messages = list(messages)
        self._num_checked = 0

    def prompt_token_ids(self) -> list[int]:
        text = self.template.render_checked(self._messages, self._num_checked)
        # Only new messages are looked for: a search of all of them each turn would be quadratic.
        self._num_checked = len(self._messages)
        return self.template.token_ids(text)

    def add_response(
        self, token_ids: Sequence[int], message: Message, *, replaced: bool, stopped: bool = True
    ) -> None:
        self._messages.append(self.template.without_control_tokens(message))

    def add_observation(self, messages: Sequence[Message]) -> None:
        self._messages += self.template.without_control_tokens(messages)


class _SingleContext(_GrowingContext):
    def add_response(
        self, token_ids: Sequence[int], message: Message, *, replaced: bool, stopped: bool = True
    ) -> None:
        if replaced:
            self._add_text(message_text(message))
        else:
            ends = self.template.ends_turn(token_ids, stopped=stopped)
            # Observations follow inside the answer, so its end token would end it too early.
            if ends:
                self._token_ids += token_ids[:-1]
            else:
                self._token_ids += token_ids

    def add_observation(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._add_text(message_text(message))

    def _add_text(self, text: str) -> None:
        text = self.template.without_control_tokens(text)
        self._token_ids += self.template.token_ids(text, after=self._token_ids)


class CompactContext(_AppendContext):
    """A context that is appended to, and knows the messages that it consists of."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Message]) -> None:
        super().__init__(template, messages)
        self.messages = [*messages]
        self._observation: Sequence[Message] = ()
        self._num_before = 0  # tokens before that observation

    def add_response(
        self, token_ids: Sequence[int], message: Message, *, replaced: bool, stopped: bool = True
    ) -> None:
        super().add_response(token_ids, message, replaced=replaced, stopped=stopped)
        self.messages.append(self._answer)

    def add_observation(self, messages: Sequence[Message]) -> None:
        self._num_before = len(self._token_ids)
        self._observation = messages
        super().add_observation(messages)
        self.messages += self.template.without_control_tokens(messages)

    def request_token_ids(self, request: str) -> list[int]:
        """Return the prompt that asks for something after the last observation.

        The context itself stays as it is.
        """
        before = self._token_ids[: self._num_before]
        return before + self._observation_ids(with_text(self._observation, request), before)


CONTEXTS: dict[str, Callable[[ChatTemplate, Sequence[Message]], Context]] = {
    "append": _AppendContext,
    "retemplate": _RetemplateContext,
    "single": _SingleContext,
    "compact": CompactContext,
}
