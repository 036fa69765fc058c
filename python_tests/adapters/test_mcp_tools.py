"""Tools of a real MCP server in an agent's loop."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _gateway import played
from _tools import TEMPLATE
from fake_envs import says

pytest.importorskip("mcp")
pytest.importorskip("openai")

from skyrl_fast.adapters import mcp_tools as mcp_module
from skyrl_fast.adapters.mcp_tools import mcp_tools
from skyrl_fast.rollout.tool_calls import ParsedAnswer

SERVER = """
try:
    from mcp.server import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server
server = Server("weather")

@server.tool()
def weather(city: str) -> str:
    "Return the weather of a city."
    if city == "Atlantis":
        raise ValueError("under water")
    return f"rain in {city}"

server.run()
"""


class Parser:
    """Reads `call NAME ARGUMENTS` lines, in place of vLLM's parsers."""

    def parse(self, text: str, tools: Any, *, forced: str | None = None) -> ParsedAnswer:
        text = text.removesuffix("<|im_end|>")
        if not text.startswith("call "):
            return ParsedAnswer(text)
        _, name, arguments = text.split(" ", 2)
        return ParsedAnswer("", [{"type": "function", "function": {"name": name, "arguments": arguments}}])  # noqa: E501  # fmt: skip


@pytest.mark.spec("gateway.mcp")
def test_an_agent_uses_the_tools_of_a_server(tmp_path: Path, tiny_tokenizer: Any) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py")]
    answers = [
        'call weather {"city": "Rome"}',
        'call weather {"city": "Atlantis"}',
        "call weather {",
        "call wether {}",
        "It rains.",
    ]
    seen: list[Any] = []

    async def agent(task: Any) -> float:
        async with mcp_tools(command) as tools:
            (tool,) = tools.tools
            assert tool["function"]["name"] == "weather"
            assert tool["function"]["description"] == "Return the weather of a city."
            assert tool["function"]["parameters"]["required"] == ["city"]
            seen.extend(await tools.loop(task, task.row["prompt"]))
            with pytest.raises(ValueError, match="two servers have a tool 'weather'"):
                await tools.add(next(iter(tools.sessions.values())))
        return 1.0

    t = played(
        agent,
        tiny_tokenizer,
        answer=lambda call, n: says(tiny_tokenizer, answers[n]),
        tool_parser=Parser(),
        max_input_length=4000,
        chat_template=TEMPLATE,
    ).only
    assert (t.failure, len(t.steps)) == (None, 5)
    results = [message["content"] for message in seen if message["role"] == "tool"]
    assert results[0] == "rain in Rome"
    assert results[1].startswith("error: ")
    assert "under water" in results[1] or "weather" in results[1]
    assert results[2].startswith("error: the arguments are no JSON")
    assert results[3] == "error: no tool 'wether'; known: weather"
    assert seen[-1]["content"] == "It rains."


class Pages:
    """A session whose tools come in three pages, and whose results are of many kinds."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {
            "link": [SimpleNamespace(type="resource_link", uri="file://x")],
            "resource": [SimpleNamespace(resource=SimpleNamespace(text="of a file"))],
            "image": [SimpleNamespace(type="image", data="...")],
            "structured": [],
        }

    async def list_tools(self, cursor: str | None = None) -> Any:
        page = int(cursor or 0)
        names = [["link", "resource"], ["image", "refused"], ["structured", "closed"]][page]
        tools = [SimpleNamespace(name=n, description="", input_schema={}) for n in names]
        return SimpleNamespace(tools=tools, next_cursor=str(page + 1) if page < 2 else None)

    async def call_tool(self, name: str, values: Any) -> Any:
        if name in ("refused", "closed"):
            code = mcp_module.CONNECTION_CLOSED if name == "closed" else -32602
            raise ProtocolError(code)
        structured = {"degrees": 3} if name == "structured" else None
        return SimpleNamespace(
            content=self.results[name], structured_content=structured, is_error=False
        )


class ProtocolError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("arguments are refused")
        self.code = code


@pytest.mark.spec("gateway.mcp")
async def test_tools_of_all_pages_and_results_of_all_kinds() -> None:
    tools = mcp_module.McpTools(error_type=ProtocolError)
    await tools.add(Pages())
    assert len(tools.tools) == 6
    wanted = {
        "link": "[resource_link file://x: no text]",
        "resource": "of a file",
        "image": "[image: no text]",
        "refused": "error: arguments are refused",
        "structured": '{"degrees": 3}',
    }
    for name, text in wanted.items():
        call = SimpleNamespace(id="1", function=SimpleNamespace(name=name, arguments="{}"))
        assert (await tools.call(call))["content"] == text
    closed = SimpleNamespace(id="1", function=SimpleNamespace(name="closed", arguments="{}"))
    with pytest.raises(ProtocolError):
        await tools.call(closed)
