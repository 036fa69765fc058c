"""Tools of MCP servers for an agent at the gateway."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from skyrl_fast.gateway.agents.task import AgentTask
from skyrl_fast.rollout.env.protocol import Message


@asynccontextmanager
async def mcp_tools(*servers: Sequence[str] | Any) -> AsyncIterator[McpTools]:
    """Connect to MCP servers inside the block, and list their tools.

    Args:
        servers: each a command, program and arguments, that speaks MCP over its standard input
            and output and ends with the block; or an `mcp.ClientSession` that is initialized.

    Raises:
        ValueError: two servers have a tool of the same name.

    Example:
        async def solve(task):
            async with mcp_tools(["python", "weather.py"]) as tools:
                messages = await tools.loop(task, task.row["prompt"])
            return float(task.row["answer"] in messages[-1]["content"])
    """
    from mcp import ClientSession, StdioServerParameters, stdio_client

    async with AsyncExitStack() as stack:
        tools = McpTools()
        for server in servers:
            session: Any = server
            if isinstance(server, list | tuple):
                command = StdioServerParameters(command=server[0], args=list(server[1:]))
                streams = await stack.enter_async_context(stdio_client(command))
                session = await stack.enter_async_context(ClientSession(*streams))
                await session.initialize()
            await tools.add(session)
        yield tools


CONNECTION_CLOSED = -32000  # a code of JSON-RPC errors


class McpTools:
    """The tools of several servers, as OpenAI's clients take them.

    Args:
        error_type: class of JSON-RPC errors; None: the installed package's.
    """

    def __init__(self, *, error_type: type[Exception] | None = None) -> None:
        self._error_type = error_type
        self.tools: list[dict[str, Any]] = []
        self.sessions: dict[str, Any] = {}  # by the name of a tool

    async def add(self, session: Any) -> None:
        """Add the tools of a server; see `mcp_tools`."""
        for tool in await _list_tools(session):
            if tool.name in self.sessions:
                raise ValueError(f"mcp_tools: two servers have a tool {tool.name!r}")
            self.sessions[tool.name] = session
            schema = _value(tool, "input_schema", "inputSchema")
            function = {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": schema,
            }
            self.tools.append({"type": "function", "function": function})

    async def call(self, tool_call: Any) -> Message:
        """Return the tool's message for a call in an answer of OpenAI's client.

        What the model did wrong (an unknown tool, arguments that are no JSON or that the tool
        refuses) is text for the model.
        """
        function = tool_call.function
        text = await self._text(function.name, function.arguments)
        return {"role": "tool", "tool_call_id": tool_call.id, "content": text}

    async def loop(
        self, task: AgentTask, messages: Sequence[Message], *, max_turns: int = 16, **options: Any
    ) -> list[Message]:
        """Call the model until it answers without a tool call; return the conversation."""
        history = [dict(message) for message in messages]
        for _ in range(max_turns):
            answer = await task.async_openai.chat.completions.create(
                model=task.model, messages=history, tools=self.tools, **options
            )
            message = answer.choices[0].message
            history.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            history += [await self.call(call) for call in message.tool_calls]
        return history

    async def _text(self, name: str, arguments: str) -> str:
        if name not in self.sessions:
            known = ", ".join(sorted(self.sessions))
            return f"error: no tool {name!r}; known: {known}"
        try:
            values = json.loads(arguments or "{}")
        except ValueError as error:
            return f"error: the arguments are no JSON: {error}"
        if not isinstance(values, dict):
            return "error: the arguments are no JSON object"
        errors = self._error_type or _protocol_error()
        try:
            result = await self.sessions[name].call_tool(name, values)
        except errors as error:
            if _error_code(error) == CONNECTION_CLOSED:
                raise  # no fault of the model
            return f"error: {error}"
        text = "\n".join(map(_part_text, result.content))
        structured = _value(result, "structured_content", "structuredContent")
        if structured is not None and not text:
            text = json.dumps(structured, ensure_ascii=False)
        if _value(result, "is_error", "isError"):
            return f"error: {text}"
        return text


async def _list_tools(session: Any) -> list[Any]:
    """Return the tools of all pages."""
    page = await session.list_tools()
    tools = [*page.tools]
    while (cursor := _value(page, "next_cursor", "nextCursor")) is not None:
        page = await _next_page(session, cursor)
        tools += page.tools
    return tools


async def _next_page(session: Any, cursor: str) -> Any:
    from mcp import types

    parameters = inspect.signature(session.list_tools).parameters
    if "cursor" in parameters:
        return await session.list_tools(cursor=cursor)
    return await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))


def _part_text(part: Any) -> str:
    """Return a part of a result as text; what a model cannot read is named."""
    resource = getattr(part, "resource", None)
    text = getattr(part, "text", None)
    if text is None:
        text = getattr(resource, "text", None)
    if text is not None:
        return str(text)
    kind = getattr(part, "type", type(part).__name__)
    link = getattr(part, "uri", None) or getattr(resource, "uri", None)
    if link is None:
        return f"[{kind}: no text]"
    return f"[{kind} {link}: no text]"


def _protocol_error() -> type[Exception]:
    """Return the class of JSON-RPC errors, which versions before 2 call otherwise."""
    from mcp.shared import exceptions

    if hasattr(exceptions, "MCPError"):
        name = "MCPError"
    else:
        name = "McpError"
    found: type[Exception] = getattr(exceptions, name)
    return found


def _error_code(error: Exception) -> int | None:
    inner = getattr(error, "error", error)
    return getattr(inner, "code", None)


def _value(item: Any, name: str, old: str) -> Any:
    """Return an attribute that is called otherwise in versions before 2."""
    if hasattr(item, name):
        return getattr(item, name)
    return getattr(item, old, None)
