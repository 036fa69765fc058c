"""Chat messages and tools as chat templates take them, from whichever source they come.

Rows of prompts and demonstrations, environments, and requests at the gateway write the same
conversation in several ways; see docs/spec.md, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from skyrl_fast.rollout.env.protocol import Message
from skyrl_fast.setting import tools_error

BETWEEN_PARTS = "\n"  # as vLLM's server joins them
_PLAIN_KEYS = {"role", "content"}
_PLAIN_ROLES = ("system", "user", "assistant", "tool")
# Keys in the order in which templates see them that write a message, a call or a tool as JSON.
_MESSAGE_KEYS = ("role", "content", "tool_calls", "reasoning_content")
_CALL_KEYS = ("id", "type", "function", "name", "arguments")
_TOOL_KEYS = ("type", "function")


def normalize_messages(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Return each message by `normalize_message`; a ValueError has the number of an invalid one."""
    plain = []
    for number, message in enumerate(messages):
        try:
            plain.append(normalize_message(message))
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from None
    return plain


def normalize_message(message: Mapping[str, Any]) -> Message:
    """Return a message as chat templates take it.

    The content is text, `developer` is `system`, arguments of calls are mappings where their text
    is JSON of one, thoughts are `reasoning_content`, and there are no nulls. Other keys remain.

    Raises:
        ValueError: it has no role, parts that are not text, or neither content nor tool calls.

    Example:
        >>> normalize_message({"role": "developer", "content": [{"type": "text", "text": "hi"}]})
        {'role': 'system', 'content': 'hi'}
    """
    role = message.get("role")
    content = message.get("content")
    if message.keys() == _PLAIN_KEYS and role in _PLAIN_ROLES and isinstance(content, str):
        return dict(message)  # most messages
    calls = plain_value(message.get("tool_calls"))
    if not isinstance(role, str):
        raise ValueError(f"expected a role, got {role!r:.100}")
    if message.get("function_call") is not None:
        raise ValueError("function_call: expected tool_calls, got OpenAI's earlier form of them")
    if "content" not in message and not calls:
        raise ValueError(
            f"expected content or tool_calls, got the keys {', '.join(map(str, message))}"
        )
    plain = {
        **{name: plain_value(value) for name, value in message.items()},
        "role": "system" if role == "developer" else role,
        "content": _text_of(content),
        "tool_calls": [_normalize_call(call) for call in calls or ()] or None,
        "reasoning_content": message.get("reasoning_content") or message.get("reasoning") or None,
    }
    plain.pop("reasoning", None)
    return _order_keys(plain, _MESSAGE_KEYS)


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with a text of the user's at their end.

    It is added to the last message where that is the user's: many chat templates want an answer
    between two of them.

    Example:
        >>> with_text([{"role": "user", "content": "one"}], "two")
        [{'role': 'user', 'content': 'one\\n\\ntwo'}]
    """
    if messages and messages[-1].get("role") == "user":
        last = dict(messages[-1])
        texts = [_text_of(last.get("content")), text]
        last["content"] = "\n\n".join(filter(None, texts))
        return [*messages[:-1], last]
    return [*messages, {"role": "user", "content": text}]


def _text_of(content: Any) -> str:
    content = plain_value(content)
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, int | float):
        return str(content)
    if not isinstance(content, list):
        raise ValueError(f"content: expected text, got {content!r:.100}")
    texts: list[Any] = []
    for part in content:
        if isinstance(part, Mapping):
            texts.append(part.get("text"))
        else:
            texts.append(part)
    for part, text in zip(content, texts, strict=True):
        if not isinstance(text, str):
            if isinstance(part, Mapping):
                kind = part.get("type")
            else:
                kind = type(part).__name__
            raise ValueError(f"content: expected text, got a part of type {kind!r}")
    return BETWEEN_PARTS.join(texts)


def _normalize_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise ValueError(f"tool_calls: expected mappings, got {call!r:.100}")
    function = call.get("function")
    if isinstance(function, Mapping):
        named = {**function, "arguments": parse_arguments(function.get("arguments"))}
        call = {**call, "type": call.get("type") or "function"}
        call["function"] = _order_keys(named, _CALL_KEYS)
    elif "arguments" in call:  # without `function` around name and arguments
        call = {**call, "arguments": parse_arguments(call["arguments"])}
    return _order_keys(call, _CALL_KEYS)


def parse_arguments(arguments: Any) -> Any:
    """Return a call's arguments as chat templates take them: a mapping where they are JSON of one.

    Example:
        >>> parse_arguments('{"x": 1}'), parse_arguments("[1]"), parse_arguments(None)
        ({'x': 1}, '[1]', {})
    """
    if not arguments:
        return {}
    values = parse_json(arguments)
    return values if isinstance(values, dict) else arguments


def normalize_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return tools, a list or the JSON of one, as chat templates take them; None: there are none.

    Nulls of a tool and of its function are left out, but those inside a schema mean something.
    """
    tools = plain_value(parse_json(tools))
    wrong = tools_error(tools)
    if wrong is not None:
        raise ValueError(f"tools: {wrong}")
    if tools is None:
        return None
    plain = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping):
            named = _order_keys(function)
        else:
            named = function
        plain.append(_order_keys({**tool, "function": named}, _TOOL_KEYS))
    return plain


def template_kwargs_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's arguments of a row; a ValueError names a column of another type.

    They are its columns `chat_template_kwargs` and `tools`, each as value or JSON text.
    """
    kwargs = plain_value(parse_json(row.get("chat_template_kwargs")))
    if kwargs is None:
        kwargs = {}
    if not isinstance(kwargs, dict):
        raise ValueError(f"chat_template_kwargs: expected a mapping, got {kwargs!r:.100}")
    tools = row.get("tools")  # the column counts before the same key of the arguments
    tools = normalize_tools(kwargs.get("tools") if tools is None else tools)
    if tools is None:
        return kwargs
    return {**kwargs, "tools": tools}


def plain_value(value: Any) -> Any:
    """Return a value with lists for tuples and arrays, and numbers for those of NumPy."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {
            name if isinstance(name, tuple) else plain_value(name): plain_value(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if not callable(getattr(value, "tolist", None)):
        return value
    is_time = getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m")  # else a number
    return plain_value((value.astype(str) if is_time else value).tolist())


def without_nulls(value: Any, keep: Collection[str] = ()) -> Any:
    """Return a plain value without null-valued keys at any depth; outermost ones of `keep` stay."""
    if isinstance(value, dict):
        kept = {}
        for name, item in value.items():
            if item is not None or name in keep:
                kept[name] = without_nulls(item)
        return kept
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def parse_json(value: Any) -> Any:
    """Return the value of a JSON text; any other value as it is."""
    try:
        if isinstance(value, str):
            return json.loads(value)
        return value
    except (ValueError, RecursionError):
        return value


def _order_keys(values: Mapping[str, Any], first: Collection[str] = ()) -> dict[str, Any]:
    """Return the values that are not null, those of some keys first."""
    names = [name for name in first if name in values]
    for name in values:
        if name not in first:
            names.append(name)
    return {name: values[name] for name in names if values[name] is not None}
