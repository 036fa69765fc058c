"""Agents that nobody here wrote finish a task with tools; the template takes one system message.

The policy is scripted: what is tested are the requests, and that each call continues the one
before. Agents that are not installed are skipped.
"""

import json
import shutil
import sys
from typing import Any

import pytest
from _families import FAMILIES, FOLDER, byte_tokenizer
from _gateway import played
from fake_envs import says

from skyrl_fast.config import SamplingParams
from skyrl_fast.gateway.agents.command import CommandAgent
from skyrl_fast.rollout.tool_calls import ToolCallParser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TASK = "Write the word hello to the file out.txt."
VERIFIER = [sys.executable, "-c", "assert open('out.txt').read() == 'hello\\n'"]
ONE_SYSTEM = "{%- for message in messages %}" + (
    "{%- if message.role not in ('system', 'user', 'assistant', 'tool') "
    "or (message.role == 'system' and not loop.first) %}"
    "{{ raise_exception('one system message, first') }}{%- endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    template = (FOLDER / "qwen3.jinja").read_text()
    strict = template.replace("{%- for message in messages %}", ONE_SYSTEM, 1)
    assert strict != template
    return byte_tokenizer(strict, **FAMILIES["qwen3"])


def check(
    agent: Any, tokenizer: Any, calls: dict[str, dict[str, Any]], *, continues: bool = True
) -> None:
    """Let an agent call the first of these tools that it offers, then end.

    Args:
        agent: a function or a `BlackBox`.
        tokenizer: fixture.
        calls: arguments by the name of the tool.
        continues: whether the agent only adds to its messages.
    """

    def answer(call: Any, n: int) -> Any:
        text = tokenizer.decode(list(call.prompt_token_ids))
        tools, _, rest = text.partition("<tools>\n")[2].partition("\n</tools>")
        for name, arguments in calls.items():
            if f'"name": "{name}"' in tools and "<tool_response>" not in rest:
                body = json.dumps({"name": name, "arguments": arguments})
                return says(tokenizer, f"<tool_call>\n{body}\n</tool_call>")
        return says(tokenizer, "The red lamp costs 7.")

    trajectory = played(
        agent, tokenizer, answer=answer, tool_parser=ToolCallParser("hermes", tokenizer),
        max_input_length=400_000, max_retries=0,
        sampling_params=SamplingParams(max_generate_length=4_096),
    ).only  # fmt: skip
    assert trajectory.failure is None
    assert trajectory.steps[-1].reward == 1.0
    metrics = trajectory.env_metrics
    assert metrics["answers_with_tool_calls"] == 1
    assert metrics["calls"] == len(trajectory.steps) > 1
    assert metrics["continued_prompts"] == (metrics["calls"] - 1 if continues else 0)


@pytest.mark.spec("gateway.other-tools", "rollout.system-messages")
def test_claude_code(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = shutil.which("claude") or pytest.skip("claude is not installed")
    for name in ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "IS_SANDBOX"):
        monkeypatch.setenv(name, "1")
    command = [program, "-p", TASK, "--model", "policy", "--dangerously-skip-permissions"]
    arguments = {"command": "echo hello > out.txt", "description": "write"}
    check(CommandAgent(command, verifier=VERIFIER), tokenizer, {"Bash": arguments})


def test_codex(tokenizer: Any) -> None:
    program = shutil.which("codex") or pytest.skip("codex is not installed")
    provider = "-c model_providers.g.{}=".format
    command = " ".join(
        [
            f"exec {program} exec --skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox -c model_provider=g -m policy",
            provider("name") + "g",
            provider("base_url") + '"$OPENAI_BASE_URL"',
            provider("env_key") + "OPENAI_API_KEY",
            provider("wire_api") + "responses",
            f"'{TASK}'",
        ]
    )
    shell = {"command": ["bash", "-lc", "echo hello > out.txt"]}
    calls = {"exec_command": {"cmd": "echo hello > out.txt"}, "shell": shell}
    check(CommandAgent(["sh", "-c", command], verifier=VERIFIER), tokenizer, calls)


def lamp_price(colour: str) -> str:
    """Return the price of a lamp.

    Args:
        colour: of the lamp.
    """
    return {"red": "7"}.get(colour, "unknown")


LAMP = {"lamp_price": {"colour": "red"}}


def test_smolagents(tokenizer: Any) -> None:
    smolagents = pytest.importorskip("smolagents")

    def agent(task: Any) -> float:
        model = smolagents.OpenAIServerModel(
            model_id=task.model, api_base=task.base_url, api_key=task.api_key
        )
        tools = [smolagents.tool(lamp_price)]
        smolagents.ToolCallingAgent(tools=tools, model=model, max_steps=1).run("The price?")
        return 1.0

    check(agent, tokenizer, LAMP, continues=False)  # it writes calls as text


def test_agno(tokenizer: Any) -> None:
    pytest.importorskip("agno")
    from agno.agent import Agent
    from agno.models.openai import OpenAIChat

    async def agent(task: Any) -> float:
        model = OpenAIChat(id=task.model, base_url=task.base_url, api_key=task.api_key)
        shop = Agent(model=model, tools=[lamp_price], instructions="You sell.", telemetry=False)
        answer = await shop.arun("The price of the red lamp?")
        return float("costs 7" in answer.content)

    check(agent, tokenizer, LAMP)


def test_autogen(tokenizer: Any) -> None:
    pytest.importorskip("autogen_agentchat")
    pytest.importorskip("autogen_ext.models.openai")
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def price(colour: str) -> str:
        """Return the price of a lamp."""
        return lamp_price(colour)

    async def agent(task: Any) -> float:
        info = {
            **{"vision": False, "function_calling": True, "json_output": False},
            **{"family": "unknown", "structured_output": False},
        }
        client = OpenAIChatCompletionClient(
            model=task.model, base_url=task.base_url, api_key=task.api_key, model_info=info
        )
        shop = AssistantAgent("shop", client, tools=[price], reflect_on_tool_use=True)
        result = await shop.run(task="The price of the red lamp?")
        return float("costs 7" in str(result.messages[-1].content))

    # Its second call offers no tools.
    check(agent, tokenizer, {"price": {"colour": "red"}}, continues=False)


def test_strands(tokenizer: Any) -> None:
    strands = pytest.importorskip("strands")
    from strands.models.openai import OpenAIModel

    async def agent(task: Any) -> float:
        options = {"base_url": task.base_url, "api_key": task.api_key}
        model = OpenAIModel(client_args=options, model_id=task.model)
        shop = strands.Agent(model=model, tools=[strands.tool(lamp_price)], callback_handler=None)
        answer = await shop.invoke_async("The price of the red lamp?")
        return float("costs 7" in str(answer))

    check(agent, tokenizer, LAMP)
