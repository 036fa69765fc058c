"""OpenAI's responses: `POST /v1/responses`, with function tools and `previous_response_id`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from skyrl_fast.gateway.dialects.dialect import (
    ContentPart,
    FormatOptions,
    ParsedCall,
    event,
    join_texts,
    read_form,
)
from skyrl_fast.gateway.dialects.openai_chat import (
    OpenAIErrors,
    callable_tools,
    read_forced_tool,
)
from skyrl_fast.gateway.dialects.parameters import RESPONSES, check_parameters
from skyrl_fast.gateway.messages import Answer, ApiError, Call
from skyrl_fast.gateway.request_body import Fields, RequestBodies
from skyrl_fast.rollout.chat_messages import Message, parse_arguments

LOGPROBS = "message.output_text.logprobs"


class ResponseItem(Fields):
    """A message, a function call, or its output."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[ContentPart] | None = None


class ResponseTool(Fields):
    """A function that the model may call."""

    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ResponseRequest(Fields):
    """A request."""

    model: str
    input: str | list[ResponseItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool | None = False
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    text: FormatOptions | None = None


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A checked request.

    Args:
        messages: messages of the conversation, without the instructions.
        memory: memory of the session: messages by the id of a response, items by their id.
    """

    fields: ResponseRequest
    messages: list[Message]
    memory: dict[str, Any]


class OpenAIResponses(OpenAIErrors):
    """The dialect; see `Dialect`."""

    def parse(self, body: bytes, bodies: RequestBodies, memory: dict[str, Any]) -> ParsedCall:
        fields = bodies.fields(body, ResponseRequest, "input")
        if fields.text is None:
            form = None
        else:
            form = fields.text.format
        messages: list[Message] = []
        if fields.previous_response_id is not None:
            if fields.previous_response_id not in memory:
                raise ApiError(
                    404,
                    f"Previous response with id '{fields.previous_response_id}' not found.",
                    code="previous_response_not_found",
                )
            messages += memory[fields.previous_response_id]
        messages += _messages(_items(fields.input, memory))
        if fields.instructions:
            system = [{"role": "system", "content": fields.instructions}]
        else:
            system = []
        ignored = check_parameters(fields, RESPONSES)
        for name in fields.include or []:
            if name == LOGPROBS:
                raise ApiError(400, f"include: {name} is not supported", code="unsupported")
            ignored[f"include: {name}"] = "the gateway does not have it"
        call = Call(
            model=fields.model,
            messages=[*system, *messages],
            tools=callable_tools([(t.type, _function(t)) for t in fields.tools or []], ignored),
            parse_tools=fields.tool_choice != "none",
            forced_tool=read_forced_tool(fields.tool_choice),
            structured=read_form("text.format", form),
            max_tokens=fields.max_output_tokens,
            stream=bool(fields.stream),
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            ignored=ignored,
        )
        return ParsedCall(call, CheckedRequest(fields, messages, memory))

    def response(self, answer: Answer, request: ParsedCall, tokens: Any) -> dict[str, Any]:
        checked_request: CheckedRequest = request.fields
        items = _output(answer)
        answered = [ResponseItem(**item) for item in items]
        history = [*checked_request.messages, *_messages(answered)]
        checked_request.memory.update((str(item.id), item) for item in answered)
        checked_request.memory[f"resp_{answer.id}"] = history
        return _response(answer, checked_request.fields, items)

    def events(self, answer: Answer, request: ParsedCall, tokens: Any) -> Iterator[str]:
        complete = self.response(answer, request, tokens)
        begun = {**complete, "status": "in_progress", "output": [], "usage": None}
        number = 0

        def number_event(kind: str, **data: Any) -> str:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1, **data}, kind)

        yield number_event("response.created", response=begun)
        yield number_event("response.in_progress", response=begun)
        for index, item in enumerate(complete["output"]):
            place = {"item_id": item["id"], "output_index": index}
            started = {**item, "status": "in_progress"}
            started["content" if "content" in item else "arguments"] = (
                [] if "content" in item else ""
            )
            yield number_event("response.output_item.added", output_index=index, item=started)
            if "content" in item:
                (part,) = item["content"]
                place["content_index"] = 0
                empty = {**part, "text": ""}
                kind = f"response.{part['type']}"
                more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
                yield number_event("response.content_part.added", **place, part=empty)
                if part["text"]:
                    yield number_event(f"{kind}.delta", **place, delta=part["text"], **more)
                yield number_event(f"{kind}.done", **place, text=part["text"], **more)
                yield number_event("response.content_part.done", **place, part=part)
            else:
                arguments = item["arguments"]
                kind = "response.function_call_arguments"
                yield number_event(f"{kind}.delta", **place, delta=arguments)
                yield number_event(f"{kind}.done", **place, name=item["name"], arguments=arguments)
            yield number_event("response.output_item.done", output_index=index, item=item)
        yield number_event(f"response.{complete['status']}", response=complete)


def _messages(given: str | list[ResponseItem]) -> list[Message]:
    """Return items as messages; a function call is a part of the answer before it."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    thoughts: dict[str, str] = {}  # thoughts of the next answer
    for item in given:
        if item.type == "reasoning":
            if item.content:
                thoughts = {"reasoning_content": join_texts(item.content)}
            else:
                thoughts = {}
        elif item.type == "message":
            role = "system" if item.role == "developer" else item.role
            if role not in ("system", "user", "assistant"):
                raise ApiError(400, f"input: role: expected user or another, got {item.role!r}")
            more = thoughts if role == "assistant" else {}
            messages.append({"role": role, "content": join_texts(item.content), **more})
            thoughts = {}
        elif item.type == "function_call":
            if not messages or messages[-1]["role"] != "assistant" or thoughts:
                messages.append({"role": "assistant", "content": "", **thoughts})
                thoughts = {}
            function = {"name": item.name, "arguments": parse_arguments(item.arguments)}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif item.type == "function_call_output":
            result = {
                "role": "tool",
                "tool_call_id": item.call_id,
                "content": join_texts(item.output),
            }
            messages.append(result)
        else:
            raise ApiError(400, f"input: items of type {item.type!r} are not supported")
    return messages


def _items(given: str | list[ResponseItem], memory: dict[str, Any]) -> str | list[ResponseItem]:
    """Return a request's items, those of earlier answers in place of references to them."""
    if isinstance(given, str):
        return given
    items = []
    for item in given:
        if item.type == "item_reference":
            known = memory.get(item.id or "")
            if not isinstance(known, ResponseItem):
                raise ApiError(404, f"Item with id '{item.id}' not found.", code="item_not_found")
            item = known
        items.append(item)
    return items


def _function(tool: ResponseTool) -> dict[str, Any]:
    return {
        "name": tool.name,
        **({} if tool.description is None else {"description": tool.description}),
        "parameters": tool.parameters or {"type": "object", "properties": {}},
    }


def _output(answer: Answer) -> list[dict[str, Any]]:
    (choice,) = answer.choices
    items: list[dict[str, Any]] = []
    if choice.thoughts:
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{answer.id}",
                "status": "completed",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": choice.thoughts}],
            }
        )
    if choice.text or not choice.tool_calls:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{answer.id}",
                "status": "completed",
                "role": "assistant",
                "content": [part],
            }
        )
    for number, call in enumerate(choice.tool_calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{number}_{answer.id}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items


def _response(
    answer: Answer, fields: ResponseRequest, items: list[dict[str, Any]]
) -> dict[str, Any]:
    is_cut = answer.choices[0].finish == "length"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": {},
        "model": answer.model,
        "output": items,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "temperature": None,
        "tool_choice": fields.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in fields.tools or []],
        "top_p": None,
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.num_sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
        },
    }
