"""Anthropic's messages: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Literal

from pydantic import Field

from skyrl_fast.gateway.dialects.dialect import (
    Format,
    FormatOptions,
    ParsedCall,
    event,
    join_texts,
    read_form,
)
from skyrl_fast.gateway.dialects.openai_chat import callable_tools
from skyrl_fast.gateway.dialects.parameters import MESSAGES, check_parameters
from skyrl_fast.gateway.messages import Answer, ApiError, Call, Choice
from skyrl_fast.gateway.request_body import Fields, RequestBodies
from skyrl_fast.rollout.chat_template import Message
from skyrl_fast.rollout.tool_calls import REQUIRED

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
THOUGHTS = ("thinking", "redacted_thinking")


class Block(Fields):
    """A part of a message's content."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: str | list[Block] | None = None


class AnthropicMessage(Fields):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Fields):
    """A function that the model may call, or a tool of another type, which it cannot."""

    type: str | None = "custom"
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Fields):
    """Whether tools are called."""

    type: str = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(Fields):
    """A request to count tokens."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None


class MessagesRequest(CountRequest):
    """A request."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    output_config: FormatOptions | None = None
    output_format: Format | None = None  # the same, of older clients


class AnthropicMessages:
    """The dialect; see `Dialect`."""

    def parse(self, body: bytes, bodies: RequestBodies, memory: dict[str, Any]) -> ParsedCall:
        fields = bodies.fields(body, MessagesRequest, "messages")
        ignored = check_parameters(fields, MESSAGES)
        if fields.messages[-1].role == "assistant":
            raise ApiError(
                400, "messages: the last one is the assistant's: prefill is not supported"
            )
        choice = fields.tool_choice or ToolChoice()
        config = fields.output_config or FormatOptions()
        call = Call(
            model=fields.model,
            messages=_messages(fields),
            tools=_tools(fields, ignored),
            parse_tools=choice.type != "none",
            forced_tool=_read_forced_tool(choice),
            structured=read_form("output_config.format", config.format or fields.output_format),
            max_tokens=fields.max_tokens,
            stop=[text for text in fields.stop_sequences or [] if text] or None,
            stream=bool(fields.stream),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            ignored=ignored,
        )
        return ParsedCall(call, fields)

    def count_call(self, body: bytes, bodies: RequestBodies) -> Call:
        fields = bodies.fields(body, CountRequest, "messages")
        return Call(model=fields.model, messages=_messages(fields), tools=_tools(fields, {}))

    def response(self, answer: Answer, request: ParsedCall, tokens: Any) -> dict[str, Any]:
        (choice,) = answer.choices
        return {
            **_head(answer),
            "content": _blocks(choice),
            **_stop(choice, request.call),
            "usage": _usage(answer, answer.num_sampled_tokens),
        }

    def events(self, answer: Answer, request: ParsedCall, tokens: Any) -> Iterator[str]:
        (choice,) = answer.choices
        start = {
            **_head(answer),
            **{"content": [], "stop_reason": None, "stop_sequence": None},
            "usage": _usage(answer, 0),
        }
        yield _event("message_start", message=start)
        for index, block in enumerate(_blocks(choice)):
            empty, deltas = _begin_block(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        usage = {"output_tokens": answer.num_sampled_tokens}
        yield _event("message_delta", delta=_stop(choice, request.call), usage=usage)
        yield _event("message_stop")

    def error(self, error: ApiError) -> dict[str, Any]:
        kind = KINDS.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


def _messages(fields: CountRequest) -> list[Message]:
    messages: list[Message] = []
    if fields.system is not None:
        messages.append({"role": "system", "content": join_texts(fields.system)})
    for message in fields.messages:
        if message.role == "assistant":
            messages.append(_assistant(message.content))
        else:
            messages += _split_user_turn(message.role, message.content)
    return messages


def _assistant(content: str | list[Block]) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input or {}},
        }
        for block in content
        if block.type == "tool_use"
    ]
    thoughts = "".join(block.thinking or "" for block in content if block.type in THOUGHTS)
    rest = [block for block in content if block.type not in (*THOUGHTS, "tool_use")]
    return {
        "role": "assistant",
        "content": join_texts(rest, ""),
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": thoughts} if thoughts else {}),
    }


def _split_user_turn(role: str, content: str | list[Block]) -> list[Message]:
    """Return the messages of a user's turn: tool results, then its text."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    messages: list[Message] = []
    for b in content:
        if b.type == "tool_result":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": b.tool_use_id,
                    "content": join_texts(b.content or ""),
                }
            )
    rest = [block for block in content if block.type != "tool_result"]
    if rest or not messages:
        messages.append({"role": role, "content": join_texts(rest)})
    return messages


def _tools(fields: CountRequest, ignored: dict[str, str]) -> list[dict[str, Any]] | None:
    """Return the functions; tools of other types are left out and added to the ignored."""
    return callable_tools([_function(tool) for tool in fields.tools or []], ignored)


def _function(tool: AnthropicTool) -> tuple[str, dict[str, Any] | None]:
    if tool.type not in ("custom", None):
        return tool.type, None
    if tool.input_schema is None:
        raise ApiError(400, f"tools: {tool.name}: input_schema: field required")
    if tool.description is None:
        described = {}
    else:
        described = {"description": tool.description}
    return "function", {"name": tool.name, **described, "parameters": tool.input_schema}


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
    }


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.thoughts:
        # Clients send the signature back, and some know a block by it; nothing here reads it.
        signature = f"skyrl_fast-{blake2b(choice.thoughts.encode(), digest_size=16).hexdigest()}"
        blocks.append({"type": "thinking", "thinking": choice.thoughts, "signature": signature})
    if choice.text or not choice.tool_calls:
        blocks.append({"type": "text", "text": choice.text})
    for call in choice.tool_calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        blocks.append({**block, "input": _mapping(call.arguments)})
    return blocks


def _begin_block(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as a stream begins it, and the deltas that complete it."""
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    kind = block["type"]
    if block[kind]:
        deltas = [{"type": f"{kind}_delta", kind: block[kind]}]
    else:
        deltas = []
    if kind == "thinking":
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    return {**block, kind: ""}, deltas


def _read_forced_tool(choice: ToolChoice) -> str | None:
    if choice.type in ("auto", "none"):
        return None
    if choice.type == "any":
        return REQUIRED
    if choice.type != "tool" or choice.name is None:
        raise ApiError(400, f"tool_choice: expected auto, none, any or a tool, got {choice.type}")
    return choice.name


def _mapping(arguments: str) -> dict[str, Any]:
    try:
        values = json.loads(arguments)
    except ValueError:
        values = arguments
    if isinstance(values, dict):
        return values
    return {"arguments": values}


def _stop(choice: Choice, call: Call) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    by_string = choice.finish == "stop" and choice.stop_string in (call.stop or [])
    return {
        "stop_reason": "stop_sequence" if by_string else reasons[choice.finish],
        "stop_sequence": choice.stop_string if by_string else None,
    }


def _usage(answer: Answer, output_tokens: int) -> dict[str, Any]:
    return {"input_tokens": answer.num_prompt_tokens, "output_tokens": output_tokens}


def _event(name: str, **data: Any) -> str:
    return event({"type": name, **data}, name)
