"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from skyrl_fast.gateway.dialects.dialect import (
    ContentPart,
    Format,
    Forms,
    ParsedCall,
    event,
    one_form,
    read_form,
)
from skyrl_fast.gateway.dialects.parameters import CHAT, check_parameters
from skyrl_fast.gateway.messages import Answer, ApiError, Call, Choice, ToolCall
from skyrl_fast.gateway.request_body import Fields, RequestBodies
from skyrl_fast.rollout.chat_messages import Message, normalize_message, normalize_tools
from skyrl_fast.rollout.tool_calls import REQUIRED

MAX_CHOICES = 128  # OpenAI's limit of n
MAX_STOPS = 64
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class CalledFunction(Fields):
    """A called function."""

    name: str
    arguments: str = "{}"


class CalledTool(Fields):
    """A tool call of an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Fields):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None

    @cached_property
    def plain(self) -> Message:
        """The message as chat templates take it; the same object in later calls that repeat it.

        Raises:
            ApiError: it has other parts than text, or OpenAI's earlier form of tool calls.
        """
        try:
            return normalize_message(self.model_dump(include=_MESSAGE_FIELDS))
        except ValueError as error:
            raise ApiError(400, str(error)) from None


# Templates see no other keys, as in vLLM's server: clients add some of their own to answers.
_CALL_FIELDS = {**dict.fromkeys(("id", "type"), True), "function": {"name", "arguments"}}
_MESSAGE_FIELDS: Any = {
    **dict.fromkeys(ChatMessage.model_fields, True),
    "tool_calls": {"__all__": _CALL_FIELDS},
}


class Tool(Fields):
    """A function that the model may call, or a tool of another type, which it cannot."""

    type: str = "function"
    function: dict[str, Any] | None = None


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None


class ResponseFormat(Format):
    """The wanted form of the answer, whose schema has a name."""

    json_schema: Format | None = None


class ChatRequest(Forms):
    """A request."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    stop_token_ids: list[int] | None = None  # vLLM's, as the next ones
    include_stop_str_in_output: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class OpenAIErrors:
    """The errors of OpenAI's dialects."""

    def error(self, error: ApiError) -> dict[str, Any]:
        if error.status >= 500:
            kind = "server_error"
        else:
            kind = KINDS.get(error.status, "")
        return {
            "error": {
                "message": error.message,
                "type": kind or "invalid_request_error",
                "param": None,
                "code": error.code,
            }
        }


class OpenAIChat(OpenAIErrors):
    """The dialect; see `Dialect`."""

    def parse(self, body: bytes, bodies: RequestBodies, memory: dict[str, Any]) -> ParsedCall:
        fields = bodies.fields(body, ChatRequest, "messages")
        ignored = check_parameters(fields, CHAT)
        tools = callable_tools([(tool.type, tool.function) for tool in fields.tools or []], ignored)
        form = fields.response_format
        if form is not None and form.json_schema is not None:
            form.schema_ = form.json_schema.schema_
        call = Call(
            model=fields.model,
            messages=[message.plain for message in fields.messages],
            tools=tools,
            template_kwargs=fields.chat_template_kwargs or {},
            parse_tools=fields.tool_choice != "none",
            forced_tool=read_forced_tool(fields.tool_choice),
            structured=one_form(fields, read_form("response_format", form)),
            max_tokens=fields.max_completion_tokens or fields.max_tokens,
            stop=stop_strings(fields.stop),
            include_stop=fields.include_stop_str_in_output,
            num_choices=fields.n or 1,
            stream=bool(fields.stream),
            stop_token_ids=fields.stop_token_ids,
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            ignored=ignored,
        )
        return ParsedCall(call, fields)

    def response(self, answer: Answer, request: ParsedCall, tokens: Any) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(answer.choices):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": choice.text or (None if choice.tool_calls else ""),
                "refusal": None,
            }
            if choice.thoughts:
                message.update(_thoughts(choice.thoughts))
            if choice.tool_calls:
                message["tool_calls"] = [_write_call(call) for call in choice.tool_calls]
            if request.fields.logprobs:
                logprobs = _logprobs(choice, tokens)
            else:
                logprobs = None
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": choice.finish,
                }
            )
        return {
            **head(answer, "chatcmpl", "chat.completion"),
            "choices": choices,
            "usage": usage(answer),
        }

    def events(self, answer: Answer, request: ParsedCall, tokens: Any) -> Iterator[str]:
        same = head(answer, "chatcmpl", "chat.completion.chunk")
        options = request.fields.stream_options
        with_usage = options is not None and bool(options.include_usage)
        more = {"usage": None} if with_usage else {}

        def chunk(index: int, delta: dict[str, Any], finish: str | None, logprobs: Any) -> str:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return event({**same, "choices": [choice], **more})

        for index, choice in enumerate(answer.choices):
            if request.fields.logprobs:
                logprobs = _logprobs(choice, tokens)
            else:
                logprobs = None
            yield chunk(index, {"role": "assistant", "content": ""}, None, None)
            if choice.thoughts:
                deltas = [_thoughts(choice.thoughts)]
            else:
                deltas = []
            if choice.text:
                deltas += [{"content": choice.text}]
            else:
                deltas += []
            for delta in deltas:
                yield chunk(index, delta, None, logprobs)
                logprobs = None
            for number, call in enumerate(choice.tool_calls):
                called = {"index": number, **_write_call(call)}
                yield chunk(index, {"tool_calls": [called]}, None, logprobs)
                logprobs = None
            yield chunk(index, {}, choice.finish, logprobs)
        if with_usage:
            yield event({**same, "choices": [], "usage": usage(answer)})
        yield "data: [DONE]\n\n"


def callable_tools(
    tools: Sequence[tuple[str, dict[str, Any] | None]], ignored: dict[str, str]
) -> list[dict[str, Any]] | None:
    """Return a request's functions as chat templates take them; None: it has none.

    A tool that a provider executes, such as a web search, cannot be called here: it is left out of
    the prompt and added to the ignored parameters.
    """
    functions = []
    for kind, function in tools:
        if kind == "function" and function is not None:
            functions.append({"type": "function", "function": function})
        else:
            ignored[f"a tool of type {kind}"] = "the model here cannot call it, and does not see it"
    return normalize_tools(functions) or None


def read_forced_tool(choice: str | dict[str, Any] | None) -> str | None:
    """Return "required" or the name of the function that a request forces; None: it forces none.

    Raises:
        ApiError: another choice, such as from some of the tools.
    """
    if choice in (None, "auto", "none"):
        return None
    if choice == REQUIRED:
        return REQUIRED
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = choice.get("name", (choice.get("function") or {}).get("name"))
        if isinstance(name, str):
            return name
    wanted = "auto, none, required or a function"
    raise ApiError(400, f"tool_choice: expected {wanted}, got {choice!r}", code="unsupported")


def stop_strings(stop: str | list[str] | None) -> list[str] | None:
    if isinstance(stop, str):
        stops = [stop]
    else:
        stops = stop or []
    stops = [text for text in stops if text]
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop: expected at most {MAX_STOPS} strings, got {len(stops)}")
    return stops or None


def usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
    }


def head(answer: Answer, prefix: str, kind: str) -> dict[str, Any]:
    """Return what an answer and each event of it begin with."""
    return {
        "id": f"{prefix}-{answer.id}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
    }


def _thoughts(text: str) -> dict[str, str]:
    """Return thoughts under both names that clients read: vLLM's and DeepSeek's."""
    return {"reasoning": text, "reasoning_content": text}


def _write_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(choice: Choice, tokens: Any) -> dict[str, Any]:
    content = []
    for token, logprob in zip(choice.token_ids, choice.logprobs, strict=True):
        text = tokens.decode([token])
        content.append(
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
        )
    return {"content": content, "refusal": None}
