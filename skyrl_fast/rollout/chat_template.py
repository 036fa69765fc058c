"""The tokenizer's chat template: messages to text and tokens; texts contain no control tokens."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import takewhile
from typing import Any

from skyrl_fast.rollout.chat_messages import BETWEEN_PARTS, Message
from skyrl_fast.rollout.tokenization import decode, encode

# A text of more characters than this for each of n tokens has more than n tokens.
CHARACTERS_PER_TOKEN = 512
FIRST_FACTORS = (8, 64)  # characters per token of which a long text is tokenised first
KNOWN_TEXTS = 1024  # whose tokens are remembered
LONGEST_KNOWN = 8192  # characters
SHORTEST_PART = 32  # characters of a message that are in no prompt by chance
MARGIN = 64  # tokens that the end of a cut text may change
PLAIN_KEYS = {"role", "content"}  # keys of most messages
AS_JSON = "{{ messages[0] | tojson }}"  # a template that shows what templates see of a message
# Divides the name of a control token in a text, so that its parts are encoded separately. Unicode
# guarantees that these code points are no characters.
BREAK = "\ufdd0\ufdd1"
CONTINUED = "\n"  # a text before another one, with which it forms no tokens
ANYWHERE, FIRST, NOWHERE = "anywhere", "first", "nowhere"  # where system messages may be
MARKER = "ANSWER-4f1c9b"  # stands for the model's answer in a rendered template


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
        parts = []
        for p in content:
            parts.append(p.get("text") if isinstance(p, dict) else p)
        texts = [str(part) for part in parts if part is not None]
        return BETWEEN_PARTS.join(texts)
    return str(content)


class ChatTemplate:
    """The tokenizer's chat template.

    Args:
        tokenizer: of the model.
        chat_template: in place of its own.
        kwargs: variables of each prompt.
        max_length: of a prompt, in tokens.
        compile_template: in place of transformers'.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        max_length: int | None = None,
        compile_template: Callable[[str], Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._compile = _compile if compile_template is None else compile_template
        self._control = _control_tokens(tokenizer, _vocab_size(tokenizer))
        self._max_length = max_length
        self._chat_template = chat_template
        self._kwargs = dict(kwargs or {})
        # Whether `render_parts` renders without transformers; None: the first prompt shows it.
        self.renders_directly: bool | None = None if _renders_by_jinja(tokenizer) else False

    @property
    def control_tokens(self) -> re.Pattern[str]:
        return self._control.pattern

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are left out of a text without special tokens."""
        return self._control.special_ids

    @property
    def control_token_names(self) -> Mapping[int, str]:
        return self._control.names

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None:
        return self._kwargs.get("tools")

    @property
    def end_id(self) -> int:
        """The token that ends an answer: the one that the template writes after it."""
        # Its tokenizer's end-of-sequence token where the template writes none: a turn of GLM ends
        # where the next role begins.
        tokenizer = self.tokenizer
        return _end_of_turn(tokenizer, _vocab_size(tokenizer), self._chat_template)

    def ends_turn(self, token_ids: Sequence[int], *, stopped: bool = True) -> bool:
        """Return whether the last token, at which the engine `stopped` or not, ended the turn."""
        # A model has several end tokens: the template's, its tokenizer's, and others of which only
        # its engine knows, from the generation config.
        if token_ids:
            last = token_ids[-1]
        else:
            last = None
        ends = (self.end_id, self.tokenizer.eos_token_id)
        return last in ends or (stopped and last in self._control.added_names)

    def until_end(self, token_ids: Sequence[int]) -> list[int]:
        """Return an answer without what follows its end, such as the end of the conversation."""
        kept = number = len(token_ids)
        while number and self._separates(token_ids[number - 1]):
            if self.ends_turn(token_ids[:number], stopped=False):
                kept = number
            number -= 1
        return list(token_ids[:kept])

    def _separates(self, token_id: int) -> bool:
        added = token_id in self._control.added_names
        return added or not decode(self.tokenizer, [token_id]).strip()

    def first_added(self, token_ids: Sequence[int]) -> int | None:
        """Return the index of the added token that begins a text, after white space; None: none."""
        run = takewhile(lambda index: self._separates(token_ids[index]), range(len(token_ids)))
        return next((n for n in run if token_ids[n] in self._control.added_names), None)

    def text(
        self,
        messages: Sequence[Message],
        *,
        answer_next: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the messages as text.

        Args:
            answer_next: up to where the model's answer begins.
            tools, kwargs: in place of the template's keyword arguments; None: those.
        """
        if tools is None:
            given = kwargs
        else:
            given = {**kwargs, "tools": list(tools)}
        messages = self._arrange(messages)
        with _refusals(messages):
            return self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._chat_template,
                add_generation_prompt=answer_next,
                tokenize=False,
                **{**self._kwargs, **given},
            )

    def shows_tools(self) -> bool:
        """Return whether the template writes the tools that a prompt has."""
        size = _vocab_size(self.tokenizer)
        return _writes_tools(self.tokenizer, size, self._chat_template)

    def _arrange(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with system messages only where the template takes them."""
        # Agents send several. Where the template takes one, first, leading ones are joined, and a
        # later one is added to the user message before it, or becomes one. Where it takes none, the
        # leading ones are added to the user message after them.
        systems = []
        for index, m in enumerate(messages):
            if m.get("role") == "system":
                systems.append(index)
        size = _vocab_size(self.tokenizer)
        if systems:
            accepted = _find_system_places(self.tokenizer, size, self._chat_template)
        else:
            accepted = ""
        if accepted in ("", ANYWHERE) or (accepted == FIRST and systems == [0]):
            return messages
        arranged: list[Message] = []
        for message in messages:
            role = message.get("role")
            if arranged:
                last_role = arranged[-1].get("role")
            else:
                last_role = None
            joins_user = role == "user" and last_role == "system" and accepted == NOWHERE
            if joins_user or (role == "system" and last_role in ("system", "user")):
                text = f"{message_text(arranged[-1])}\n\n{message_text(message)}"
                role = role if joins_user else last_role
                arranged[-1] = {**arranged[-1], "role": role, "content": text}
            else:
                later = role == "system" and arranged
                arranged.append({**message, "role": "user"} if later else message)
        return arranged

    def render_checked(
        self, messages: Sequence[Message], num_checked: int = 0, *, answer_next: bool = True
    ) -> str:
        """Return the messages as text; see `text`.

        Args:
            num_checked: number of leading messages of which it is known that they are written.

        Raises:
            ContextError: the template refuses the messages, or leaves one out: some know no tools.
        """
        if all(map(_is_plain, messages)):
            text = "".join(self.render_parts(messages, answer_next=answer_next))
        else:
            text = self.text(messages, answer_next=answer_next)
        self.check_written(text, messages, num_checked, answer_next=answer_next)
        return text

    def check_written(
        self, text: str, messages: Sequence[Message], num_checked: int, **options: Any
    ) -> None:
        """Raise ContextError if a text has not all messages of other roles than the model's.

        It must have the model's tool calls, too. Templates may leave out thoughts.
        """
        for index, message in enumerate(messages[num_checked:], num_checked):
            if not self._writes(message, text, [*messages], index, options):
                role = message.get("role")
                if role == "assistant":
                    what = "tool calls"
                else:
                    what = f"messages of the role {role}"
                raise ContextError(f"the chat template leaves out {what}")

    def _writes(
        self,
        message: Message,
        text: str,
        messages: list[Message],
        index: int,
        options: Mapping[str, Any],
    ) -> bool:
        role = message.get("role")
        calls = message.get("tool_calls")
        others = [{key: value for key, value in message.items() if key != "tool_calls"}]
        if role == "assistant":
            part = ""
        else:
            part = message_text(message).strip()
        if not (part or (calls and role == "assistant")):
            return True
        # A short text may be in the prompt by chance, and calls are written in many ways: whether
        # the template knows the kind of message is looked up once. Some write calls or text.
        kind = (role, frozenset(key for key, value in message.items() if value))
        known = _find_known_kinds(self.tokenizer, _vocab_size(self.tokenizer), self._chat_template)
        if part in text and (kind in known or len(part) >= SHORTEST_PART):
            return True
        try:  # changed or left out? the text without it tells
            messages[index : index + 1] = others if role == "assistant" else []
            writes = self.text(messages, **options) != text
        except ContextError:  # the template requires it
            writes = True
        if writes:
            known.add(kind)
        return writes

    def prepare_message(self, message: Message) -> Message:
        """Return a message of plain values as templates see it, for `render_parts`."""
        # transformers drops and renames some keys, of which a plain message has none.
        if _is_plain(message) or self.renders_directly is False:
            return message
        with _refusals([message]):
            as_json = self.tokenizer.apply_chat_template(
                [message], chat_template=AS_JSON, tokenize=False
            )
            seen: Message = json.loads(as_json)
            return seen

    def render_parts(
        self,
        messages: Sequence[Message],
        *,
        answer_next: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Return the text of messages from `prepare_message` in parts; arguments as of `text`."""
        # Most templates write each message as one or a few parts, so that texts of a conversation
        # that grows begin with the same parts.
        # transformers copies all messages three times before it renders them. Here the compiled
        # template gets them as they are, if the first prompt shows that its text is the same.
        given: dict[str, Any] = {**self._kwargs, **kwargs}
        if tools is not None:
            given["tools"] = list(tools)
        messages = self._arrange(messages)
        may_be_direct = self.renders_directly is not False and _parameters().isdisjoint(given)
        if may_be_direct and self.renders_directly:
            return self._render(messages, answer_next, given)
        usual = self.text(messages, answer_next=answer_next, tools=tools, **kwargs)
        if may_be_direct:
            try:
                self.renders_directly = "".join(self._render(messages, answer_next, given)) == usual
            except ContextError:  # a value that only transformers can prepare
                self.renders_directly = False
        return [usual]

    def _render(
        self, messages: Sequence[Message], answer_next: bool, given: Mapping[str, Any]
    ) -> list[str]:
        values = {
            **self.tokenizer.special_tokens_map,
            **{"tools": None, "documents": None},
            **given,
            "messages": list(messages),
            "add_generation_prompt": answer_next,
        }
        with _refusals(messages):
            template = self.tokenizer.get_chat_template(self._chat_template, values["tools"])
            return [*self._compile(template).generate(values)]

    def token_ids(self, text: str, *, after: Sequence[int] = ()) -> list[int]:
        """Return the tokens of rendered text; the template has written its special tokens.

        Args:
            after: the prompt's tokens before it. SentencePiece tokenizers write a space before a
                text that begins a prompt, some also before one that follows a special token.
        """
        # Of a text that is too long for any prompt, the first ones, which are too long as well.
        if self._max_length is not None:
            for factor in FIRST_FACTORS:
                first = text[: factor * self._max_length]
                if len(first) == len(text):
                    break
                token_ids = self._encode(first, after)
                if len(token_ids) > self._max_length + MARGIN:
                    return token_ids
        return self._encode(text, after)

    def _encode(self, text: str, after: Sequence[int]) -> list[int]:
        if after:
            before = self._control.added_names.get(after[-1], CONTINUED)
        else:
            before = ""
        try:
            token_ids: list[int] = []
            for part in text.split(BREAK):
                token_ids += self._encode_part(part, before)
                before = CONTINUED
            return token_ids
        except Exception as error:  # a lone surrogate, for example, is in no vocabulary
            raise ContextError(
                f"the tokenizer refuses the messages' text ({len(text)} characters): "
                f"{type(error).__name__}: {error}"
            ) from error

    def _encode_part(self, part: str, before: str) -> Sequence[int]:
        if not (before and self._control.has_prefix):
            return self._ids_of(part)
        # A start whose tokens are the same with the text after it: they can be taken off.
        for start in dict.fromkeys((before, CONTINUED, ".")):
            token_ids = self._ids_of(start + part)
            number = len(self._ids_of(start))
            if list(token_ids[:number]) == list(self._ids_of(start)):
                return token_ids[number:]
        return self._ids_of(part)  # every start forms tokens with it

    def _ids_of(self, part: str) -> Sequence[int]:
        if len(part) > LONGEST_KNOWN:
            return encode(self.tokenizer, part)
        return _known_ids(self.tokenizer, _vocab_size(self.tokenizer), part)

    def without_control_tokens(self, value: Any) -> Any:
        """Return a text, or a message with all its texts, whose control tokens will be text."""
        # What an environment, an agent or a model writes must not begin or end a turn: `<|im_end|>`
        # from a web page is ten characters. `token_ids` encodes the name of a control token in two
        # parts, of which none is a control token. So it does with a part of such a name at the end
        # or the beginning of a text, which could become complete next to another text.
        if isinstance(value, str):
            return self._divide(value)
        if isinstance(value, Mapping):
            return {
                self.without_control_tokens(key): self.without_control_tokens(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.without_control_tokens(item) for item in value]
        return value

    def _divide(self, text: str) -> str:
        control = self._control
        text = control.pattern.sub(lambda m: m[0][0] + BREAK + m[0][1:], text)
        lengths = range(2, min(control.longest_part, len(text)) + 1)
        # Most texts have other characters there.
        if text[-2:] in control.pairs and any(text[-n:] in control.beginnings for n in lengths):
            text = text[:-1] + BREAK + text[-1:]
        if text[:2] in control.pairs and any(text[:n] in control.ends for n in lengths):
            text = text[:1] + BREAK + text[1:]
        return text


def _is_plain(message: Message) -> bool:
    return message.keys() == PLAIN_KEYS and all(type(value) is str for value in message.values())


def text_after(marker: str, text: str) -> str:
    """Return what follows a marker in a template's text; ContextError if the marker is missing."""
    _, found, rest = text.rpartition(marker)
    if not found:
        raise ContextError(
            "the chat template leaves out or changes an answer when an observation follows: use "
            "context=retemplate"
        )
    return rest


@contextmanager
def _refusals(messages: Sequence[Message]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # templates may raise anything
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ContextError(
            f"the chat template refuses messages of the roles {roles}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _renders_by_jinja(tokenizer: Any) -> bool:
    """Return whether transformers renders the tokenizer's template; some have their own code."""
    if "transformers" not in sys.modules:  # then it made no tokenizer
        return False
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    usual = PreTrainedTokenizerBase.apply_chat_template
    rendering = getattr(type(tokenizer), "apply_chat_template", None)
    return rendering is usual and hasattr(chat_template_utils, "_compile_jinja_template")


@cache
def _parameters() -> frozenset[str]:
    """Return the arguments by which transformers does more than render."""
    from transformers import PreTrainedTokenizerBase

    names = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(names) - {"tools", "documents", "kwargs"}


def _compile(template: str) -> Any:
    """Return the template as transformers compiles it, with its filters and in its sandbox."""
    from transformers.utils import chat_template_utils

    return chat_template_utils._compile_jinja_template(template)


@dataclass(frozen=True, slots=True)
class _ControlTokens:
    """The special tokens of a tokenizer with more than one character.

    Args:
        special_ids: ids of all special tokens, also those with one character.
        added_names: by id, of all tokens that the tokenizer finds before it divides a text: special
            ones and others, such as `<think>`.
        has_prefix: whether a text has other tokens at the beginning than inside another one.
        beginnings, ends: parts of the names.
        pairs: of two characters, in any of them.
        longest_part: characters of the longest of these.
    """

    pattern: re.Pattern[str]
    names: Mapping[int, str]
    special_ids: frozenset[int]
    added_names: Mapping[int, str]
    has_prefix: bool
    beginnings: frozenset[str]
    ends: frozenset[str]
    pairs: frozenset[str]
    longest_part: int


def _vocab_size(tokenizer: Any) -> int:
    """Return the number of tokens, which grows where some are added; 0: unknown."""
    try:
        return len(tokenizer)
    except TypeError:
        return 0


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any, _size: int) -> _ControlTokens:
    """Return the tokenizer's; it is asked again when its vocabulary has grown."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {id: str(token) for id, token in added.items() if token.special}
    found = {*tokenizer.all_special_tokens, *special.values()}
    names = sorted((name for name in found if len(name) > 1), key=len, reverse=True)
    encoded = {name: tokenizer.encode(name, add_special_tokens=False) for name in found}
    single = {ids[0]: name for name, ids in encoded.items() if len(ids) == 1}
    added_names = {**{id: str(token) for id, token in added.items()}, **single}
    return _ControlTokens(
        re.compile("|".join(map(re.escape, names)) or r"(?!)"),
        {token_id: name for token_id, name in single.items() if len(name) > 1},
        frozenset({*special, *single}),
        added_names,
        encode(tokenizer, "\nx") != encode(tokenizer, "\n") + encode(tokenizer, "x"),
        frozenset(name[:end] for name in names for end in range(2, len(name))),
        frozenset(name[start:] for name in names for start in range(1, len(name) - 1)),
        frozenset(name[start : start + 2] for name in names for start in range(len(name) - 1)),
        max(map(len, names), default=1) - 1,
    )


@lru_cache(maxsize=8)
def _find_known_kinds(_tokenizer: Any, _size: int, _chat_template: str | None) -> set[Any]:
    return set()


@lru_cache(maxsize=8)
def _find_system_places(tokenizer: Any, _size: int, chat_template: str | None) -> str:
    """Return where a chat template takes system messages: ANYWHERE, FIRST or NOWHERE."""
    first = {"role": "system", "content": MARKER}
    last = {"role": "system", "content": MARKER[::-1]}
    user = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": "b"}
    everywhere = [first, user, answer, last, user]
    for place, messages in ((ANYWHERE, everywhere), (FIRST, [first, user]), (NOWHERE, [user])):
        try:
            text = tokenizer.apply_chat_template(
                messages, chat_template=chat_template, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # whatever a template raises
            continue
        if all(m["content"] in text for m in messages if m["role"] == "system"):
            return place
    return ANYWHERE  # the template rejects this probe: assume any position


@lru_cache(maxsize=8)
def _writes_tools(tokenizer: Any, _size: int, chat_template: str | None) -> bool:
    schema = {"type": "object", "properties": {}}
    function = {"name": MARKER, "description": "a tool", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    template = ChatTemplate(tokenizer, chat_template)
    try:
        return MARKER in template.text([{"role": "user", "content": "a"}], tools=tools)
    except ContextError:  # of other tools the template may know more
        return True


@lru_cache(maxsize=8)
def _end_of_turn(tokenizer: Any, _size: int, chat_template: str | None) -> int:
    """Return the token that a chat template writes after an answer that other messages follow."""
    template = ChatTemplate(tokenizer, chat_template)
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARKER}]
    try:
        texts = [
            text_after(MARKER, template.text(answered, answer_next=False)),
            text_after(MARKER, template.text([*answered, answered[0]])),
        ]
        last, inner = map(template.token_ids, texts)
    except ContextError:  # the template rejects these messages
        last = inner = []
    # An added token after an answer inside a conversation is its end only if the last one has an
    # end, too: else it begins the next message. gpt-oss writes two different ends.
    if (index := template.first_added(last)) is None:
        end: int = tokenizer.eos_token_id
        return end
    inner_index = template.first_added(inner)
    if inner_index is None:
        return last[index]
    return inner[inner_index]


@lru_cache(maxsize=KNOWN_TEXTS)
def _known_ids(tokenizer: Any, _size: int, text: str) -> tuple[int, ...]:
    """Return the tokens of a text; samples of a prompt, and its evaluations, have the same."""
    return tuple(encode(tokenizer, text))
