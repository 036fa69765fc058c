"""Messages and tools as chat templates take them, however they are written."""

from typing import Any

import numpy as np
import pytest

from skyrl_fast.rollout.chat_messages import (
    normalize_message,
    normalize_messages,
    normalize_tools,
    template_kwargs_of,
)


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return {**more, "type": "function", "function": {"name": "f", "arguments": arguments}}


def answer(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **more}


PARTS = [{"type": "text", "text": "a", "image_url": None}, "b", {"type": "input_text", "text": "c"}]


@pytest.mark.spec("rollout.messages")
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a"}),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "user", "content": PARTS}, {"role": "user", "content": "a\nb\nc"}),
        ({"role": "user", "content": np.array(["a", "b"])}, {"role": "user", "content": "a\nb"}),
        ({"role": "tool", "content": None, "name": None}, {"role": "tool", "content": ""}),
        ({"role": "tool", "content": 3.5}, {"role": "tool", "content": "3.5"}),
        ({"role": "user", "content": "", "own": 1}, {"role": "user", "content": "", "own": 1}),
        (
            {"role": "assistant", "content": "a", "reasoning": "t", "tool_calls": []},
            {"role": "assistant", "content": "a", "reasoning_content": "t"},
        ),
        # Arguments: JSON text of a mapping is one, whose nulls count; other text remains.
        ({"role": "assistant", "tool_calls": [called('{"x": null}')]}, answer(called({"x": None}))),
        (answer(called({"x": np.int64(1)}, id=None)), answer(called({"x": 1}))),
        (answer(called("[1]"), called("{", id="c")), answer(called("[1]"), called("{", id="c"))),
        (answer(called(None), called("")), answer(called({}), called({}))),
        (answer({"name": "f", "arguments": "{}"}), answer({"name": "f", "arguments": {}})),
    ],
)  # fmt: skip
def test_plain_messages(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    plain = normalize_message(given)
    assert plain == wanted and list(plain)[:2] == ["role", "content"]
    assert normalize_message(plain) == wanted


@pytest.mark.spec("rollout.message-forms")
@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"content": "a"}, "expected a role, got None"),
        ({"role": "user", "text": "a"}, "expected content or tool_calls, got the keys role, text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "got a part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "a part of type 'text'"),
        ({"role": "tool", "content": {"price": 3}}, "content: expected text, got {'price': 3}"),
        (answer(function_call={"name": "f"}), "function_call: expected tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "tool_calls: expected mappings, got 1"),
    ],
)
def test_refused_messages_are_named(message: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=rf"^message 1: .*{error}"):
        normalize_messages([{"role": "user", "content": "a"}, message])


@pytest.mark.spec("rollout.tools")
def test_tools_and_template_arguments_of_a_row() -> None:
    schema = {"properties": {"x": {"default": None}}}
    tool = {
        "function": {"name": "f", "description": None, "parameters": schema},
        "type": "function",
    }
    plain = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert normalize_tools((tool,)) == plain
    text = '[{"type": "function", "function": {"name": "f"}}]'
    row = {"tools": text, "chat_template_kwargs": {"tools": plain, "style": "short"}}
    assert template_kwargs_of(row) == {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "style": "short",
    }
    assert template_kwargs_of({"tools": None, "chat_template_kwargs": '{"a": 1}'}) == {"a": 1}
    for row, error in [
        ({"tools": "{"}, "tools: expected a list of mappings"),
        ({"tools": '{"a": 1}'}, "tools: expected a list of mappings"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: expected a mapping"),
    ]:
        with pytest.raises(ValueError, match=error):
            template_kwargs_of(row)
