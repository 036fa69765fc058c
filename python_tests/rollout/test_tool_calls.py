"""Tools of a prompt, and tool calls as environments get them."""

import asyncio
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _gateway import USER, chat, played
from _tools import HOSTILE, TEMPLATE, SlowParser
from fake_envs import FakePrompt, ScriptedEngine, loop_config, says

from skyrl_fast.config import EnvironmentConfig, SamplingParams
from skyrl_fast.rollout import groups
from skyrl_fast.rollout.answer_parser import AnswerParser
from skyrl_fast.rollout.engine.vllm_start import VllmSetup, engine_environment
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.protocol import Action, Env, EnvStep
from skyrl_fast.rollout.groups import rollout
from skyrl_fast.rollout.reasoning import ReasoningParser
from skyrl_fast.rollout.tool_calls import ParsedAnswer, ToolCallParser
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.system.parent_watch import configure_logging
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

    def parse(self, text: str, tools: Any, *, forced: str | None = None) -> ParsedAnswer:
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


@pytest.mark.parametrize("tools", ["search", [1], {"name": "search"}])
def test_tools_that_are_no_list_are_refused(tools: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts, row 0: tools: expected a list of mappings"):
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
    (call,) = first.tool_calls
    assert (first, {**CALL, "id": call["id"]}) == (text, call)
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
    action = pickle.loads(pickle.dumps(Action("text", [CALL], True)))
    assert (type(action), action, action.tool_calls) == (Action, "text", [CALL])
    assert action.unparsed_tool_calls


@pytest.mark.spec("rollout.unparsed-tool-calls")
@pytest.mark.parametrize(
    ("name", "arguments", "counted", "seen"),
    [
        ("look", {"at": "door"}, False, True),
        ("look", {}, False, True),
        ("fly", {"at": "door"}, True, True),
        ("look", "door", True, False),
        ("look", "null", True, False),
    ],
)
def test_calls_that_a_model_got_wrong(
    name: str,
    arguments: Any,
    counted: bool,
    seen: bool,
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    monkeypatch.setattr(groups, "ToolCallParser", JsonParser)
    prompt = FakePrompt("a", env_extras={"tools": [tool("look")]})
    ((trajectory,), _) = run(tiny_tokenizer, [json.dumps(call), "x"], [prompt], tool_parser="json")
    action = Recording.actions[0]
    assert [c["function"] for c in action.tool_calls] == ([call["function"]] if seen else [])
    assert action.unparsed_tool_calls == counted
    assert trajectory.env_metrics == {"unparsed_tool_calls": float(counted)}

    async def agent(task: Any) -> float:
        message = (await chat(task, [USER], tools=[tool("look")])).choices[0].message
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        (asked,) = message.tool_calls
        assert (asked.function.name, asked.function.arguments) == (name, text)
        return 1.0

    out = played(
        agent, tiny_tokenizer, chat_template=TEMPLATE, tool_parser=JsonParser("", None),
        answer=lambda _, n: says(tiny_tokenizer, json.dumps(call)), max_input_length=500,
        sampling_params=SamplingParams(max_generate_length=200),
    )  # fmt: skip
    assert out.only.env_metrics["unparsed_tool_calls"] == counted


@pytest.mark.spec("rollout.tool-call-ids")
def test_ids_of_calls_follow_from_their_place() -> None:
    def ids(place: str, *calls: dict[str, Any]) -> list[str]:
        parser = AnswerParser(JsonParser("", None))  # type: ignore[arg-type]
        parser.tool_parser.parse = lambda *a, **k: ParsedAnswer("", [*calls])  # type: ignore
        parts = asyncio.run(parser.parse("x", None, place=place))
        return [call["id"] for call in parts.tool_calls]

    first, second = ids("turn-0", CALL, CALL)
    assert ids("turn-0", CALL, CALL) == [first, second]
    assert len({first, second, *ids("turn-1", CALL, CALL)}) == 4
    assert all(re.fullmatch("[0-9a-zA-Z]{9}", made) for made in (first, second))
    assert ids("turn-0", {**CALL, "id": "functions.f:0"}) == ["functions.f:0"]


@pytest.mark.spec("rollout.long-answers")
async def test_a_late_parser_neither_stops_the_loop_nor_hangs() -> None:
    slow: Any = SlowParser()
    beats = 0
    quick = await AnswerParser(slow).parse("b" * 1_000, None, place="0")
    parser = AnswerParser(slow, parse_seconds=0.2)
    late = asyncio.ensure_future(parser.parse(HOSTILE, None, place="0"))
    while not late.done():
        await asyncio.sleep(0.001)
        beats += 1
    assert quick == ParsedAnswer("quick", rest="b" * 1_000)
    assert await late == ParsedAnswer(HOSTILE, failed=True, rest=HOSTILE)
    assert beats > 10  # of about 200


def test_calls_that_cannot_be_parsed_are_noticed_after_vllm_has_started(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Its start resets the loggers of vLLM, which drops handlers that others had added."""
    pytest.importorskip("vllm")
    parser = ToolCallParser("hermes", tiny_tokenizer)
    engine_environment(VllmSetup("m", log_file=str(tmp_path / "engine.log"), on_cpu=True))
    configure_logging(str(tmp_path / ".engine.log.json"))
    broken = "<tool_call>{not json</tool_call>"
    assert parser.parse(broken, None) == ParsedAnswer(broken, failed=True)


@pytest.mark.spec("rollout.tool-calls")
def test_parser_of_vllm(tiny_tokenizer: Any) -> None:
    pytest.importorskip("vllm")
    parser = ToolCallParser("hermes", tiny_tokenizer)
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>'
    assert parser.parse(f"I look.{call}", [tool("look")]) == ParsedAnswer("I look.", [CALL])
    twice = parser.parse(call + call, None)
    assert twice == ParsedAnswer("", [CALL, CALL])
    assert parser.parse("plain", None) == ParsedAnswer("plain")
    for broken in ("<tool_call>{not json</tool_call>", '<tool_call>{"name": 3}</tool_call>'):
        assert parser.parse(broken, None) == ParsedAnswer(broken, failed=True)
    with pytest.raises(
        ValueError,
        match=r"generator\.tool_parser: expected null or one .*, got 'hermez' \(did you mean 'her",
    ):
        ToolCallParser.find_class("hermez")
    with pytest.raises(ValueError, match=r"generator\.tool_parser: mistral refuses the tokenizer"):
        ToolCallParser("mistral", tiny_tokenizer)


@pytest.mark.spec("rollout.tool-call-ids")
def test_an_id_that_the_model_wrote_is_kept(tiny_tokenizer: Any) -> None:
    pytest.importorskip("vllm")
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:3"
        '<|tool_call_argument_begin|>{"at": "door"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    parser = ToolCallParser("kimi_k2", tiny_tokenizer)
    (called,) = parser.parse(text, [tool("look")]).tool_calls
    assert called == {**CALL, "id": "functions.look:3"}


@pytest.mark.spec("rollout.parser-stubs")
@pytest.mark.parametrize("name", ["openai", "cohere_command3"])
def test_parsers_that_read_no_text_are_refused(name: str, tiny_tokenizer: Any) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ValueError, match=rf"generator\.tool_parser: .*'{name}'"):
        ToolCallParser(name, tiny_tokenizer)
    name = name.replace("openai", "openai_gptoss")
    with pytest.raises(ValueError, match=rf"generator\.reasoning_parser: .*'{name}'"):
        ReasoningParser(name, tiny_tokenizer)


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
    calls = pythonic.parse('{"n": 3}', tools, forced="look").tool_calls
    assert calls == [{"type": "function", "function": {"name": "look", "arguments": {"n": 3}}}]
    both = '[{"name": "go", "parameters": {}}, {"name": "look", "parameters": {"n": 1}}]'
    called = [c["function"] for c in pythonic.parse(both, tools, forced="required").tool_calls]
    assert [(c["name"], c["arguments"]) for c in called] == [("go", {}), ("look", {"n": 1})]
    assert pythonic.parse('{"n": ', tools, forced="look") == ParsedAnswer('{"n": ', failed=True)


@pytest.mark.vllm
def test_parsers_are_found_without_a_warning_about_triton() -> None:
    """In a process of its own: vLLM warns when it is imported."""
    code = (
        "from skyrl_fast.rollout.tool_calls import ToolCallParser\n"
        "print(ToolCallParser.find_class('hermes').__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Triton" not in done.stdout + done.stderr
