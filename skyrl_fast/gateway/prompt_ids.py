"""Prompt tokens of one session's calls: what the session has sampled keeps its tokens.

A rendered prompt is divided before each special token that the template wrote. Tokenizers encode
these pieces independently, so a piece that was seen before has known tokens, and only new ones are
encoded. The piece that a sampled response completed is known by the text that it decodes to, with
the sampled tokens: where a later prompt has this text, it gets these tokens. So a conversation that
only grows keeps all of its tokens, with any template, and any other prompt is a fork.

Design: docs/design/021-gateway.md.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import compress, count
from typing import Any, NamedTuple

import numpy as np

from skyrl_fast.gateway.messages import Call
from skyrl_fast.rollout.chat_template import ChatTemplate, ContextError, Message
from skyrl_fast.rollout.token_ids import TokenIds, ids_array
from skyrl_fast.rollout.tokenization import decode
from skyrl_fast.system.digests import chain_digest

CONTINUED = "continued"  # begins with the prompt and response of a call, its last answer
FIRST = "first"  # the session's first
RESTARTED = "restarted"  # no answer of this session in it: a sub-agent, or a summarised context
FORKED = "forked"  # has an answer of this session, but after other tokens
# What a prompt is made of besides the template's arguments; a request has fields for them.
_NOT_OF_TEMPLATES = {
    "messages",
    "tools",
    "self",
    "answer_next",
    "add_generation_prompt",
    "chat_template",
    "tokenize",
    "conversation",
}
MAX_STARTS = 8  # beginnings of earlier prompts that are kept: of as many interleaved conversations
MAX_SHARED = 1 << 18  # tokens of the largest usual vocabularies


class PieceIds(NamedTuple):
    """The tokens of a piece: as the engine takes them, and as steps keep them."""

    ids: list[int]
    array: np.ndarray  # int32


class RenderedText:
    """A text in parts, which is put together only where it is needed as a whole."""

    def __init__(self, parts: list[str]) -> None:
        self.parts = parts

    @cached_property
    def text(self) -> str:
        return "".join(self.parts)

    @cached_property
    def num_characters(self) -> int:
        return sum(map(len, self.parts))

    def without_end(self, length: int) -> RenderedText:
        """Return the text without so many characters at its end."""
        kept = [*self.parts]
        while length:
            last = kept.pop()
            if len(last) > length:
                kept.append(last[:-length])
            length -= min(length, len(last))
        return RenderedText(kept)

    def after(self, beginning: RenderedText) -> str | None:
        """Return what follows a beginning; None: the text begins otherwise."""
        number = len(beginning.parts)
        if self.parts[:number] == beginning.parts:
            return "".join(self.parts[number:])
        if self.text.startswith(beginning.text):
            return self.text[len(beginning.text) :]
        return None


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The tokens of one prompt.

    Args:
        token_ids: as the engine gets them. After `PromptIds.release` they may become those of a
            longer prompt.
        kept: the same as its step keeps them, in parts that all steps of the session share.
        rendered: the text; none where the client gave tokens.
        chain: digest of the pieces before the last one.
        last_text, last_ids: the last piece, which the response continues.
        kind: how it relates to the session's earlier calls.
        num_answers: messages of the assistant in it; None: unknown, of a text or of tokens.
        parent: number of the step whose response it continues; None: unknown, or of none.
    """

    token_ids: list[int]
    kept: TokenIds
    rendered: RenderedText
    chain: bytes
    last_text: str
    last_ids: list[int]
    kind: str
    digest: bytes
    num_answers: int | None = None
    parent: int | None = None


@dataclass(slots=True, eq=False)
class _Start:
    """All pieces but the last of an earlier prompt, their tokens, and what is known of them."""

    rendered: RenderedText
    token_ids: list[int]
    num_tokens: int
    parts: tuple[np.ndarray, ...]
    chain: bytes
    end: bytes | None
    answers: bool
    released: bool = False

    def ids(self) -> list[int]:
        """Return these pieces' tokens, in the earlier prompt's list if it was released."""
        # So a conversation of n tokens that grows is not copied: each call costs its new ones.
        if not self.released:
            return self.token_ids[: self.num_tokens]
        del self.token_ids[self.num_tokens :]
        return self.token_ids


class PromptIds:
    """Render prompts, and remember the session's tokens."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._lock = threading.Lock()  # long prompts are rendered in threads
        self._texts: dict[str, str] = {}  # values of messages, without control tokens
        # The last chat that the template wrote, and the same as the template sees it: one value, as
        # threads replace it.
        self._last: tuple[list[Message], list[Message]] = ([], [])
        self._starts: deque[_Start] = deque(maxlen=MAX_STARTS)
        self._known: dict[str, PieceIds] = {}  # tokens of a piece
        self._sampled: dict[
            tuple[bytes, str], PieceIds
        ] = {}  # of one with a response, by its place
        # Chains that end with a response, each with the number of the assistant's messages in it.
        self._ends: dict[bytes, int | None] = {}
        self._steps: dict[bytes, int] = {}  # and the number of the response's step
        self._answers: set[str] = set()  # pieces with a response
        self._divides: bool | None = None  # whether pieces are encoded as the complete text is

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> PromptTokens:
        """Return the prompt of a chat.

        Raises:
            ContextError: the chat template refuses the messages or leaves one out, or the tokenizer
                refuses their text.
        """
        with self._lock:
            num_answers = sum(message.get("role") == "assistant" for message in messages)
            shared = _num_shared(messages, self._last[0])
            seen = self._as_template_sees(messages)
            rendered, options = self._render(seen, tools, template_kwargs)
            self._template.check_written(rendered.text, seen, shared, **options)
            self._last = (list(messages), seen)
            return self._prompt(rendered, num_answers)

    def _render(
        self,
        seen: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> tuple[RenderedText, dict[str, Any]]:
        """Return the text of messages as the template sees them, and the template's options."""
        taken = sorted(_NOT_OF_TEMPLATES & template_kwargs.keys())
        if taken:
            raise ContextError(
                "chat_template_kwargs: expected arguments of the chat template that the request "
                f"sets nowhere else, got {', '.join(taken)}"
            )
        as_text = self._template.without_control_tokens
        options = {"tools": as_text(tools) if tools else None, **as_text(template_kwargs)}
        return RenderedText(self._template.render_parts(seen, **options)), options

    def _as_template_sees(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages as the template sees them, without control tokens."""
        last, seen = self._last
        shared = _num_shared(messages, last)
        plain = []
        for m in messages[shared:]:
            plain.append({key: self._as_text(item) for key, item in m.items()})
        return [*seen[:shared], *map(self._template.prepare_message, plain)]

    def _as_text(self, value: Any) -> Any:
        """Return a message's value without control tokens; a text is searched for them once."""
        if not isinstance(value, str):
            return self._template.without_control_tokens(value)
        if value not in self._texts:
            self._texts[value] = self._template.without_control_tokens(value)
        return self._texts[value]

    def num_new_characters(self, call: Call) -> int:
        """Return the length of a call's texts that were in no earlier prompt, tools' included."""
        if call.messages is None:
            return len(call.prompt or "")
        new = call.messages[_num_shared(call.messages, self._last[0]) :]
        return self._num_characters([*new, call.tools, call.template_kwargs])

    def _num_characters(self, value: Any) -> int:
        if isinstance(value, str):
            if value in self._texts:
                return 0
            return len(value)
        if isinstance(value, Mapping):
            return sum(len(key) + self._num_characters(item) for key, item in value.items())
        if isinstance(value, list):
            return sum(map(self._num_characters, value))
        return 1

    def text(self, text: str) -> PromptTokens:
        """Return the prompt of a text with its special tokens; ContextError if it is refused."""
        with self._lock:
            return self._prompt(RenderedText([text]))

    def from_ids(self, token_ids: Sequence[int]) -> PromptTokens:
        """Return a prompt of given tokens; ContextError if one is too large for any vocabulary."""
        try:
            kept = TokenIds([ids_array(token_ids)])
        except OverflowError as error:
            raise ContextError(f"prompt: {error}") from error
        digest = chain_digest(b"", repr(list(token_ids)))
        kind = self._kind(None, False, None)
        return PromptTokens(list(token_ids), kept, RenderedText([]), b"", "", [], kind, digest)

    def release(self, prompt: PromptTokens) -> None:
        """Allow a prompt's list of ids to be extended by the next one: no one reads it any more."""
        with self._lock:
            for start in self._starts:
                start.released = start.released or start.token_ids is prompt.token_ids

    def add_response(
        self,
        prompt: PromptTokens,
        token_ids: Sequence[int],
        text: str | None = None,
        *,
        number: int | None = None,
    ) -> None:
        """Remember a response to a prompt, and its text without special tokens, if known.

        `number` is its step's. It may come back in two ways: special tokens inside it as the
        template writes them (around a tool call, say), or as text of the message that the client
        sends.
        """
        with self._lock:
            for pieces in self._forms(prompt, token_ids, text):
                chain = prompt.chain
                for piece, ids in pieces:
                    known = self._known.get(piece)
                    if known is None or known.ids != ids:
                        known = PieceIds(ids, ids_array(ids))
                    self._known.setdefault(piece, known)
                    self._sampled.setdefault((chain, piece), known)
                    self._answers.add(piece)
                    chain = chain_digest(chain, piece)
                before = prompt.num_answers
                if before is None:
                    self._ends[chain] = None
                else:
                    self._ends[chain] = before + 1
                if number is not None:
                    self._steps[chain] = number

    def continuing(
        self,
        prompt: PromptTokens,
        token_ids: Sequence[int],
        messages: Sequence[Message],
        answers: Sequence[Message],
        **arguments: Any,
    ) -> int | None:
        """Return the index of the first form of an answer that the template writes as sampled.

        None: it writes none of them so. Some templates write the last message in another way than
        earlier ones, so a message follows it.
        """
        before = prompt.rendered.without_end(len(prompt.last_text)).text
        expected = []
        for pieces in self._forms(prompt, token_ids):
            expected.append(before + "".join(text for text, _ in pieces))
        next_piece = self._template.control_tokens.match
        for index, answer in enumerate(answers):
            for following in _following(answer):
                try:
                    seen = self._as_template_sees([*messages, answer, *following])
                    text = self._render(seen, **arguments)[0].text
                except ContextError:
                    continue
                if any(text.startswith(e) and next_piece(text, len(e)) for e in expected):
                    return index
                break
        return None

    def _forms(
        self, prompt: PromptTokens, token_ids: Sequence[int], text: str | None = None
    ) -> list[list[tuple[str, list[int]]]]:
        """Return the ways in which a response may come back: each the pieces that it completes."""
        names = self._template.control_token_names
        sampled = list(token_ids)
        if sampled and sampled[-1] in names:  # the end of the turn is the template's
            sampled.pop()
        if self._template.special_ids.isdisjoint(sampled):
            if text is None:
                text = decode(self._template.tokenizer, sampled)
            text = self._template.without_control_tokens(text)
            ids = _share_objects(sampled)
            return [[(prompt.last_text + text, prompt.last_ids + ids)]]
        divided: list[tuple[str, list[int]]] = [("", [])]
        for token in sampled:
            if token in names:
                divided.append((names[token], []))
            divided[-1][1].append(token)
        if len(divided) == 1:
            forms = [divided]
        else:
            forms = [divided, [("", sampled)]]
        return [self._complete_pieces(prompt, form) for form in forms]

    def _complete_pieces(
        self, prompt: PromptTokens, divided: Sequence[tuple[str, list[int]]]
    ) -> list[tuple[str, list[int]]]:
        tokenizer = self._template.tokenizer
        as_text = self._template.without_control_tokens
        pieces = [
            (name + as_text(decode(tokenizer, ids[1:] if name else ids)), _share_objects(ids))
            for name, ids in divided
        ]
        text, ids = pieces[0]
        return [(prompt.last_text + text, prompt.last_ids + ids), *pieces[1:]]

    def _prompt(self, rendered: RenderedText, num_answers: int | None = None) -> PromptTokens:
        start, new_text = self._start(rendered)
        token_ids = start.ids()
        parts = [*start.parts]
        chain = start.chain
        end = start.end
        answers = start.answers
        *before, last = self._divide(new_text)
        for piece in before:
            ids, array = self._ids_at(chain, piece)
            token_ids += ids
            parts.append(array)
            answers = answers or piece in self._answers
            chain = chain_digest(chain, piece)
            if chain in self._ends:
                end = chain
        if self._divides:
            if start in self._starts:
                self._starts.remove(start)  # the new one is longer, or the same
            known = (rendered.without_end(len(last)), token_ids, len(token_ids), tuple(parts))
            self._starts.append(_Start(*known, chain, end, answers))
        ids, array = self._ids_at(chain, last)
        token_ids += ids
        kept = TokenIds([*parts, array], len(token_ids))
        digest = chain_digest(chain, last)
        if digest in self._ends:
            end = digest
        kind = self._kind(end, answers or last in self._answers, num_answers)
        if end is None:
            parent = None
        else:
            parent = self._steps.get(end)
        return PromptTokens(
            token_ids, kept, rendered, chain, last, ids, kind, digest, num_answers, parent
        )

    def _ids_at(self, chain: bytes, piece: str) -> PieceIds:
        return self._sampled.get((chain, piece)) or self._piece(piece)

    def _start(self, rendered: RenderedText) -> tuple[_Start, str]:
        """Return the longest known beginning, after which a piece begins, and what follows it."""
        next_piece = self._template.control_tokens.match
        for start in sorted(self._starts, key=lambda start: -start.rendered.num_characters):
            new_text = rendered.after(start.rendered)
            if new_text is not None and next_piece(new_text):
                return start, new_text
        return _Start(RenderedText([]), [], 0, (), b"", None, False), rendered.text

    def _kind(self, end: bytes | None, answers: bool, num_answers: int | None) -> str:
        """Return the kind of a prompt; `end` is the last chain in it that ends with a response."""
        if end is not None:
            # An answer after the response is one that came back changed.
            is_last = num_answers is None or self._ends[end] in (None, num_answers)
            return CONTINUED if is_last else FORKED
        if not self._ends:
            return FIRST
        return FORKED if answers else RESTARTED

    def _piece(self, piece: str) -> PieceIds:
        if piece not in self._known:
            ids = _share_objects(self._template.token_ids(piece))
            self._known[piece] = PieceIds(ids, ids_array(ids))
        return self._known[piece]

    def _divide(self, text: str) -> list[str]:
        """Return the text in pieces, or as one piece if its pieces would have other tokens."""
        starts = []
        for match in self._template.control_tokens.finditer(text):
            starts.append(match.start())
        ends = [start for start in starts if start > 0]
        pieces = [
            text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)
        ]
        if self._divides is None:  # a property of the tokenizer: the first prompt shows it
            joined = [token for piece in pieces for token in self._piece(piece).ids]
            self._divides = joined == self._template.token_ids(text)
        return pieces if self._divides else [text]


def _following(answer: Message) -> list[list[Message]]:
    """Return messages that may follow an answer: results of its calls, or a user's."""
    user: Message = {"role": "user", "content": ""}
    calls = answer.get("tool_calls") or []
    if not calls:
        return [[user]]
    return [[{"role": "tool", "tool_call_id": c.get("id"), "content": ""} for c in calls], [user]]


@cache
def _objects() -> tuple[int, ...]:
    """Return one object for each token, so that long lists of all sessions need no more."""
    return tuple(range(MAX_SHARED))


def _share_objects(token_ids: Sequence[int]) -> list[int]:
    objects = _objects()
    try:
        return [objects[token_id] for token_id in token_ids]
    except IndexError:
        return list(token_ids)


def _num_shared(messages: Sequence[Message], last: Sequence[Message]) -> int:
    others = map(operator.is_not, messages, last)
    return next(compress(count(), others), min(len(messages), len(last)))
