"""Tools of MCP servers for an agent at the gateway."""

from __future__ import annotations

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


class McpTools:
    """The tools of several servers, as OpenAI's clients take them."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []
        self._sessions: dict[str, Any] = {}  # by the name of a tool

    async def add(self, session: Any) -> None:
        """Add the tools of a server; see `mcp_tools`."""
        for tool in (await session.list_tools()).tools:
            if tool.name in self._sessions:
                raise ValueError(f"mcp_tools: two servers have a tool {tool.name!r}")
            self._sessions[tool.name] = session
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
        if name not in self._sessions:
            return f"error: no tool {name!r}; known: {', '.join(sorted(self._sessions))}"
        try:
            values = json.loads(arguments or "{}")
        except ValueError as error:
            return f"error: the arguments are no JSON: {error}"
        if not isinstance(values, dict):
            return "error: the arguments are no JSON object"
        result = await self._sessions[name].call_tool(name, values)
        parts = [getattr(part, "text", None) for part in result.content]
        text = "\n".join(part for part in parts if part is not None)
        return f"error: {text}" if _value(result, "is_error", "isError") else text


def _value(item: Any, name: str, old: str) -> Any:
    """Return an attribute that is called otherwise in versions before 2."""
    return getattr(item, name) if hasattr(item, name) else getattr(item, old)
