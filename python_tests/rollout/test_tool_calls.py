"""Tools of a prompt, and tool calls as environments get them."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import pytest
from _tools import TEMPLATE
from fake_envs import FakePrompt, ScriptedEngine, loop_config, says

from skyrl_fast.config import EnvironmentConfig
from skyrl_fast.rollout import groups
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.protocol import Action, Env, EnvStep
from skyrl_fast.rollout.groups import rollout
from skyrl_fast.rollout.tool_calls import ParsedAnswer, ToolCallParser, check_tool_parser
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.data.prompts import prompts_from

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class JsonParser:
    """Stands in for vLLM's parsers: a text in JSON is a call."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.seen: list[tuple[str, Any]] = []
        parsers.append(self)

    def parsed(self, text: str, tools: Any) -> ParsedAnswer:
        self.seen.append((text, tools))
        return ParsedAnswer("I look.", [json.loads(text)]) if text[0] == "{" else ParsedAnswer(text)


parsers: list[JsonParser] = []


class Recording(Env):
    actions: list[Action] = []  # noqa: RUF012 - shared on purpose

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def step(self, action: Action) -> EnvStep:
        Recording.actions.append(action)
        done = len(Recording.actions) % 2 == 0
        return EnvStep(1.0, done=done, observations={"role": "tool", "content": "a door"})


def run(tokenizer: Any, texts: list[str], prompts: list[FakePrompt], **changes: Any) -> Any:
    """Return trajectories and the engine, after two turns."""
    config = loop_config(**({"max_turns": 2, "chat_template": TEMPLATE} | changes))
    engine = ScriptedEngine(lambda call, number: says(tokenizer, texts[number]))
    Recording.actions.clear()

    async def go() -> list[Trajectory]:
        factory = EnvFactory(EnvironmentConfig(), make_env=Recording)
        options: dict[str, Any] = {"phase": "train", "policy_version": 0, "seed": 1}
        try:
            return await rollout(prompts, engine, tokenizer, factory, config, **options)
        finally:
            await factory.close()

    return asyncio.run(go()), engine


@pytest.mark.spec("rollout.tools")
def test_tools_of_a_row_replace_those_of_the_settings(tiny_tokenizer: Any) -> None:
    prompts = [
        FakePrompt("a", env_extras={"tools": [tool("search"), tool("read")]}),
        FakePrompt("b", env_extras={}),
    ]
    shared = {"tools": [tool("shared")], "other": 1}
    trajectories, _ = run(
        tiny_tokenizer, ["x"] * 4, prompts, chat_template_kwargs=shared, max_turns=1
    )
    texts = [tiny_tokenizer.decode(t.steps[0].prompt_token_ids) for t in trajectories]
    assert texts[0].startswith("<tool>search</tool><tool>read</tool><|im_start|>user")
    assert texts[1].startswith("<tool>shared</tool><|im_start|>user")


@pytest.mark.spec("rollout.tools")
@pytest.mark.parametrize("tools", ["search", [1], {"name": "search"}])
def test_tools_that_are_no_list_are_refused(tools: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts, row 0: tools: wanted a list of mappings"):
        prompts_from([{"prompt": "a", "tools": tools}], default_env_class="x")
    (prompt,) = prompts_from([{"prompt": "a", "tools": [tool("f")]}], default_env_class="x")
    assert prompt.env_extras["tools"] == [tool("f")]


@pytest.mark.spec("rollout.tool-calls")
@pytest.mark.parametrize("context", ["append", "retemplate"])
def test_environment_gets_parsed_calls_and_the_text(
    tiny_tokenizer: Any, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "ToolCallParser", JsonParser)
    text = json.dumps(CALL)
    tools = [tool("look")]
    ((trajectory,), engine) = run(
        tiny_tokenizer,
        [text, "done"],
        [FakePrompt("a", env_extras={"tools": tools})],
        tool_parser="json",
        context=context,
    )
    first, second = Recording.actions
    assert (first, first.tool_calls) == (text, [CALL])
    assert (second, second.tool_calls) == ("done", [])
    assert parsers[-1].seen == [(text, tools), ("done", tools)]
    prompt = tiny_tokenizer.decode(engine.calls[1].prompt_token_ids)
    written = text if context == "append" else f"I look.<call>{json.dumps(CALL['function'])}</call>"
    assert f"<|im_start|>assistant\n{written}<|im_end|>\n<|im_start|>tool\na door" in prompt
    assert trajectory.steps[0].text == text


@pytest.mark.spec("rollout.special-tokens")
@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, False),
        ({"tool_parser": "json"}, True),
        ({"skip_special_tokens": False}, True),
        ({"tool_parser": "json", "skip_special_tokens": True}, False),
    ],
)
def test_special_tokens_of_a_response(
    tiny_tokenizer: Any, changes: dict[str, Any], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "ToolCallParser", JsonParser)
    run(tiny_tokenizer, ["a<|im_start|>b"] * 2, [FakePrompt("p")], **changes)
    assert Recording.actions[0] == ("a<|im_start|>b" if kept else "ab")  # never the end token


def test_action_reaches_another_process() -> None:
    action = pickle.loads(pickle.dumps(Action("text", [CALL])))
    assert (type(action), action, action.tool_calls) == (Action, "text", [CALL])


@pytest.mark.spec("rollout.tool-calls")
def test_parser_of_vllm(tiny_tokenizer: Any) -> None:
    pytest.importorskip("vllm")
    parser = ToolCallParser("hermes", tiny_tokenizer)
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>'
    assert parser.parsed(f"I look.{call}", [tool("look")]) == ParsedAnswer("I look.", [CALL])
    twice = parser.parsed(call + call, None)
    assert twice == ParsedAnswer("", [CALL, CALL])
    assert parser.parsed("plain", None) == ParsedAnswer("plain")
    for broken in ("<tool_call>{not json</tool_call>", '<tool_call>{"name": 3}</tool_call>'):
        assert parser.parsed(broken, None) == ParsedAnswer(broken, failed=True)
    with pytest.raises(ValueError, match=r"generator\.tool_parser: wanted null or one of .*hermes"):
        check_tool_parser("hermez")
    with pytest.raises(ValueError, match=r"generator\.tool_parser: mistral refuses the tokenizer"):
        ToolCallParser("mistral", tiny_tokenizer)


@pytest.mark.spec("gateway.tools")
def test_forced_calls_have_the_familys_form_or_json(tiny_tokenizer: Any) -> None:
    pytest.importorskip("vllm")
    tools = [tool("look"), tool("go")]
    parser = ToolCallParser("hermes", tiny_tokenizer)
    tag = json.loads(parser.forcing(tools, "look")["structural_tag"])
    begins = [one["begin"] for one in tag["format"]["tags"]]
    assert all('"name": "look"' in begin and "<tool_call>" in begin for begin in begins)
    assert "go" in json.dumps(json.loads(parser.forcing(tools, "required")["structural_tag"]))
    with pytest.raises(ValueError, match="tool_choice"):
        parser.forcing(tools, "other")
    pythonic = ToolCallParser("pythonic", tiny_tokenizer)
    parameters = tool("look")["function"]["parameters"]
    assert pythonic.forcing(tools, "look") == {"json": parameters}
    calls = pythonic.parsed('{"n": 3}', tools, forced="look").tool_calls
    assert calls == [{"type": "function", "function": {"name": "look", "arguments": {"n": 3}}}]
    both = '[{"name": "go", "parameters": {}}, {"name": "look", "parameters": {"n": 1}}]'
    called = [c["function"] for c in pythonic.parsed(both, tools, forced="required").tool_calls]
    assert [(c["name"], c["arguments"]) for c in called] == [("go", {}), ("look", {"n": 1})]
    assert pythonic.parsed('{"n": ', tools, forced="look") == ParsedAnswer('{"n": ', failed=True)
