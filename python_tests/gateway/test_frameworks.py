"""Unmodified agents at real vLLM: as in their makers' documentation, but for the base URL.

A tiny model of random weights does not write tool calls by itself: vLLM's structured outputs let it
write some letters, and then one of a few calls or answers. What it writes is sampled token by token
from what the grammar allows, recorded, and recomputed by the trainer under the same grammar.
Each test needs its framework: `pip install langgraph langchain-openai openai-agents deepagents
mini-swe-agent pydantic-ai-slim`.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _gateway import played

from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.config import SamplingParams
from skyrl_fast.gateway.agents.command import CommandAgent
from skyrl_fast.rollout.tool_calls import ToolCallParser
from skyrl_fast.trajectory_store.reader import FOLDER
from skyrl_fast.trajectory_store.recorded import read_recorded
from skyrl_fast.trajectory_store.writer import TrajectoryWriter

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

CONTEXT = 65_536  # tokens of a tiny vocabulary; a command-line agent begins with half of them
SAMPLES = 8
TOLERANCE = 1e-5  # float32, for weights of this scale
DONE = "The red lamp costs 7."
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>"
    "{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}"
    "<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def called(name: str, **arguments: Any) -> str:
    """Return a tool call as models of Hermes' family write it."""
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from bench._tokenizer import byte_level_tokenizer

    text = Path(
        "LICENSE"
    ).read_text()  # which does not change: another model would choose otherwise
    return byte_level_tokenizer(texts=[text], vocab_size=2_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        **{"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"max_position_embeddings": CONTEXT, "tie_word_embeddings": True},
        **{"initializer_range": 0.05, "eos_token_id": tokenizer.eos_token_id},
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    return folder


def checked(
    agent: Any, choices: list[str], tokenizer: Any, model: Path, *, samples: int = SAMPLES
) -> Any:
    """Run an agent some times; each call must be a row that the trainer computes as vLLM did.

    Args:
        agent: a function or a `BlackBox`.
        choices: complete answers of the model.
        tokenizer, model: fixtures.
        samples: of the task.
    """
    from transformers import AutoModelForCausalLM

    from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
    from skyrl_fast.rollout.engine.vllm_start import VllmSetup
    from skyrl_fast.train.model.policy import Policy

    grammar = f"[a-z ]{{8,24}}\n({'|'.join(map(escaped, choices))})"
    sampling = SamplingParams(
        max_generate_length=256, additional_kwargs={"structured_outputs": {"regex": grammar}}
    )
    out = played(
        agent, tokenizer, chat_template=TEMPLATE, tool_parser=ToolCallParser("hermes", tokenizer),
        engine=VllmEngine(VllmSetup(str(model), max_model_len=CONTEXT)), sampling_params=sampling,
        max_input_length=CONTEXT - 256, max_retries=0, n_samples_per_prompt=samples,
    )  # fmt: skip
    assert [t.failure for t in out.trajectories] == [None] * samples
    metrics = [t.env_metrics for t in out.trajectories]
    assert [m["calls"] for m in metrics] == [len(t.steps) for t in out.trajectories]
    assert sum(m["answers_with_tool_calls"] for m in metrics) > 0
    assert sum(m["unparsed_tool_calls"] for m in metrics) == 0
    texts = [step.text.partition("\n")[2] for t in out.trajectories for step in t.steps]
    assert set(texts) <= set(choices)
    batch = batch_from_trajectories(out.trajectories)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    again = Policy(weights).batch_logprobs(batch)
    assert batch.rollout_logprobs is not None
    difference = (again - batch.rollout_logprobs)[batch.loss_mask.bool()].abs()
    print(
        f"{batch.num_rows} calls, {batch.num_tokens} tokens,"
        f" {ratios(metrics)}, largest difference {difference.max():.1e}"
    )
    assert float(difference.max()) < TOLERANCE
    return out


def escaped(text: str) -> str:
    """Return a text as a regular expression of vLLM's grammars."""
    return re.sub(r"([{}\[\]()*+?.|\\])", r"\\\1", text)


def ratios(metrics: list[dict[str, float]]) -> str:
    kinds = ("first", "continued", "forked", "restarted")
    return ", ".join(f"{sum(m[f'{k}_prompts'] for m in metrics):.0f} {k}" for k in kinds)


PRICES = {"red": 7, "blue": 5}
LOOKS = [called("price", lamp="red"), called("price", lamp="blue"), DONE]
QUESTION = "What does the red lamp cost?"


def test_openai_client(tokenizer: Any, model: Path) -> None:
    openai = pytest.importorskip("openai")
    parameters = {"type": "object", "properties": {"lamp": {"type": "string"}}}
    price = {"name": "price", "description": "The price of a lamp.", "parameters": parameters}

    async def solve(task: Any) -> float:
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            completion = await client.chat.completions.create(
                model=task.model, messages=messages, tools=[{"type": "function", "function": price}]
            )
            message = completion.choices[0].message
            if not message.tool_calls:
                return float(DONE in message.content)
            messages.append(message)
            for call in message.tool_calls:
                lamp = json.loads(call.function.arguments)["lamp"]
                content = str(PRICES[lamp])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    out = checked(solve, LOOKS, tokenizer, model)
    assert [t.steps[-1].reward for t in out.trajectories] == [1.0] * SAMPLES


def test_anthropic_client_that_streams(tokenizer: Any, model: Path) -> None:
    anthropic = pytest.importorskip("anthropic")
    schema = {"type": "object", "properties": {"lamp": {"type": "string"}}}
    price = {"name": "price", "description": "The price of a lamp.", "input_schema": schema}

    async def solve(task: Any) -> float:
        root = task.base_url.removesuffix("/v1")
        client = anthropic.AsyncAnthropic(base_url=root, api_key=task.api_key)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            read = ""
            async with client.messages.stream(
                model=task.model, max_tokens=256, messages=messages, tools=[price]
            ) as stream:
                async for text in stream.text_stream:
                    read += text
                message = await stream.get_final_message()
            uses = [block for block in message.content if block.type == "tool_use"]
            if not uses:
                return float(DONE in read)
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": use.id,
                    "content": str(PRICES[use.input["lamp"]]),
                }
                for use in uses
            ]
            messages.append({"role": "user", "content": results})

    out = checked(solve, LOOKS, tokenizer, model)
    assert [t.steps[-1].reward for t in out.trajectories] == [1.0] * SAMPLES


def test_langgraph(tokenizer: Any, model: Path) -> None:
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def price(lamp: str) -> int:
        """Return the price of a lamp."""
        return PRICES[lamp]

    async def solve(task: Any) -> float:
        llm = ChatOpenAI(model=task.model, base_url=task.base_url, api_key=task.api_key)
        llm_with_tools = llm.bind_tools([price])

        async def call_model(state: MessagesState) -> dict[str, Any]:
            messages = [SystemMessage("You know the prices of lamps."), *state["messages"]]
            return {"messages": [await llm_with_tools.ainvoke(messages)]}

        builder = StateGraph(MessagesState)
        builder.add_node("llm", call_model)
        builder.add_node("tools", ToolNode([price]))
        builder.add_edge(START, "llm")
        builder.add_conditional_edges("llm", tools_condition)
        builder.add_edge("tools", "llm")
        graph = builder.compile()
        result = await graph.ainvoke({"messages": [HumanMessage(QUESTION)]})
        return float(DONE in result["messages"][-1].content)

    out = checked(solve, LOOKS, tokenizer, model)
    assert [t.steps[-1].reward for t in out.trajectories] == [1.0] * SAMPLES


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_openai_agents(api: str, tokenizer: Any, model: Path) -> None:
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    @agents.function_tool
    def price(lamp: str) -> int:
        """Return the price of a lamp."""
        return PRICES[lamp]

    async def solve(task: Any) -> float:
        client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        kind = (
            agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
        )
        agent = agents.Agent(
            name="Lamps",
            instructions="You know the prices of lamps.",
            model=kind(model=task.model, openai_client=client),
            tools=[price],
        )
        result = await agents.Runner.run(agent, QUESTION, max_turns=40)
        return float(DONE in result.final_output)

    agents.set_tracing_disabled(True)
    out = checked(solve, LOOKS, tokenizer, model)
    assert [t.steps[-1].reward for t in out.trajectories] == [1.0] * SAMPLES


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_pydantic_ai(client: str, tokenizer: Any, model: Path) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")

    def served(task: Any) -> Any:
        if client == "openai":
            from pydantic_ai.models.openai import OpenAIChatModel
            from pydantic_ai.providers.openai import OpenAIProvider

            provider = OpenAIProvider(base_url=task.base_url, api_key=task.api_key)
            return OpenAIChatModel(task.model, provider=provider)
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        anthropic = AsyncAnthropic(base_url=task.url, api_key=task.api_key)
        return AnthropicModel(task.model, provider=AnthropicProvider(anthropic_client=anthropic))

    async def solve(task: Any) -> float:
        agent = pydantic_ai.Agent(served(task), instructions="You know the prices of lamps.")

        @agent.tool_plain
        def price(lamp: str) -> int:
            """Return the price of a lamp."""
            return PRICES[lamp]

        result = await agent.run(QUESTION)
        return float(DONE in result.output)

    out = checked(solve, LOOKS, tokenizer, model)
    assert [t.steps[-1].reward for t in out.trajectories] == [1.0] * SAMPLES


def test_deepagents_with_a_sub_agent_and_summaries(
    tokenizer: Any, model: Path, tmp_path: Path
) -> None:
    """`bench.forms_of_rows` reads what is stored here."""
    deepagents = pytest.importorskip("deepagents")
    pytest.importorskip("langchain_openai")
    from langchain_openai import ChatOpenAI

    def price(lamp: str) -> int:
        """Return the price of a lamp."""
        return PRICES[lamp]

    def manual(lamp: str) -> str:
        """Return the manual of a lamp."""
        return f"This is the manual of the {lamp} lamp. " * 60  # some 500 tokens

    async def solve(task: Any) -> float:
        agent = deepagents.create_deep_agent(
            model=ChatOpenAI(
                model=task.model,
                base_url=task.base_url,
                api_key=task.api_key,
                profile={"max_input_tokens": 4_600},  # summaries begin at 85% of it
            ),
            tools=[price, manual],
            system_prompt="You know the prices of lamps.",
            subagents=[
                {
                    "name": "blue",
                    "description": "Knows blue lamps.",
                    "system_prompt": "You know the price of blue lamps.",
                    "tools": [price],
                }
            ],
        )
        messages = {"messages": [{"role": "user", "content": QUESTION}]}
        result = await agent.ainvoke(messages, {"recursion_limit": 200})
        return float(DONE in result["messages"][-1].content)

    sub_agent = called("task", description="Look at it.", subagent_type="blue")
    choices = [DONE, called("manual", lamp="red"), called("manual", lamp="blue"), sub_agent]
    out = checked(solve, choices, tokenizer, model, samples=16)
    prompts = [
        tokenizer.decode(list(step.prompt_token_ids)) for t in out.trajectories for step in t.steps
    ]
    assert any("You know the price of blue lamps." in prompt for prompt in prompts)
    assert any("messages to summarize" in prompt.lower() for prompt in prompts)
    assert sum(t.env_metrics["restarted_prompts"] for t in out.trajectories) > 0
    folder = tmp_path / FOLDER
    TrajectoryWriter(folder, tokenizer, last_step=0, with_replay=True).write(
        1, "eval", out.trajectories
    )
    rows = batch_from_trajectories(out.trajectories)
    stored = batch_from_trajectories(read_recorded(tmp_path, phase="eval"))
    assert torch.equal(stored.tokens, rows.tokens)
    assert torch.equal(stored.loss_mask, rows.loss_mask)


def test_mini_swe_agent_as_a_command(tokenizer: Any, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("minisweagent")
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    choices = [called("bash", command="ls"), called("bash", command=submit)]
    command = [
        *(sys.executable, "-m", "minisweagent.run.mini", "--task", QUESTION, "--yolo"),
        *("--exit-immediately", "--model", "openai/policy", "--output", "trajectory.json"),
    ]
    environment = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
    }
    pairs = [f"{name}={value}" for name, value in environment.items()]
    agent = CommandAgent(["env", *pairs, *command])
    checked(agent, choices, tokenizer, model)


def test_qwen_code_as_a_command(tokenizer: Any, model: Path, tmp_path: Path) -> None:
    program = shutil.which("qwen")
    if program is None:
        pytest.skip("npm install -g @qwen-code/qwen-code")
    choices = [called("run_shell_command", command="ls", is_background=False), DONE]
    command = [program, QUESTION, "--yolo", "--auth-type", "openai", "--model", "policy"]
    agent = CommandAgent(["env", f"HOME={tmp_path}", *command])
    checked(agent, choices, tokenizer, model, samples=6)
