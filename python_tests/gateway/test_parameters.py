"""Parameters of requests: honoured, refused, or ignored and named once in the log."""

import json
from typing import Any

import httpx
import pytest
from _families import family
from _gateway import MODEL, USER, played
from _gateway import uncompiled_forms as uncompiled_forms  # a fixture
from _tools import LOOK
from fake_envs import says
from hypothesis import given
from hypothesis import strategies as st

from scripts.gateway_parameters import DIALECTS, PAGE, page
from skyrl_fast.config import SamplingParams
from skyrl_fast.gateway.dialects.anthropic_messages import AnthropicMessages
from skyrl_fast.gateway.dialects.openai_chat import OpenAIChat
from skyrl_fast.gateway.dialects.openai_completions import OpenAICompletions
from skyrl_fast.gateway.dialects.openai_responses import OpenAIResponses
from skyrl_fast.gateway.dialects.parameters import IGNORED, REFUSED
from skyrl_fast.gateway.messages import ApiError, Call
from skyrl_fast.gateway.request_body import RequestBodies
from skyrl_fast.rollout.tool_calls import ToolCallParser

REQUESTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat completions": (OpenAIChat(), {"model": MODEL, "messages": [USER]}),
    "completions": (OpenAICompletions(), {"model": MODEL, "prompt": "a"}),
    "responses": (OpenAIResponses(), {"model": MODEL, "input": "a"}),
    "Anthropic messages": (
        AnthropicMessages(),
        {"model": MODEL, "max_tokens": 9, "messages": [USER]},
    ),
}


def call_of(name: str, **more: Any) -> Call:
    dialect, request = REQUESTS[name]
    body = json.dumps({**request, **more}).encode()
    return dialect.parse(body, RequestBodies(), {}).call


def test_the_page_has_the_table_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text


@pytest.mark.spec("gateway.unsupported")
@pytest.mark.parametrize("name", DIALECTS)
def test_each_parameter_is_refused_or_named(name: str) -> None:
    model, table = DIALECTS[name]
    honoured = {field.alias or name for name, field in model.model_fields.items()}
    assert not honoured & table.keys()
    for parameter, known in table.items():
        for value in known.plain:
            assert call_of(name, **{parameter: value}).ignored == {}
        assert call_of(name, **{parameter: None}).ignored == {}
        if known.kind == REFUSED:
            with pytest.raises(ApiError, match=f"^{parameter}: ") as refused:
                call_of(name, **{parameter: {"other": 1}})
            assert refused.value.status == 400
        else:
            assert known.kind == IGNORED
            assert call_of(name, **{parameter: {"other": 1}}).ignored == {parameter: known.note}


@given(
    st.sampled_from(sorted(DIALECTS)),
    st.text(min_size=1),
    st.integers() | st.text() | st.booleans(),
)
def test_no_other_parameter_is_silent(name: str, parameter: str, value: Any) -> None:
    model, table = DIALECTS[name]
    fields = {*model.model_fields, *(f.alias for f in model.model_fields.values())}
    if parameter in fields | table.keys():
        return
    assert parameter in call_of(name, **{parameter: value}).ignored


FORMS = [
    ({"structured_outputs": {"json": {"type": "object"}}}, {"json": {"type": "object"}}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"guided_json": {"type": "object"}}, {"json": {"type": "object"}}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ["a"]}),
    ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
]


@pytest.mark.spec("gateway.structured")
@pytest.mark.parametrize(("options", "form"), FORMS)
@pytest.mark.parametrize("name", ["chat completions", "completions"])
def test_forms_by_names_of_vllm(name: str, options: dict[str, Any], form: dict[str, Any]) -> None:
    assert call_of(name, **options).structured == form
    with pytest.raises(ApiError, match="more than once"):
        call_of(name, **{**options, "guided_json": {}, "guided_regex": "b"})
    for wrong in ({"json": {}, "regex": "a"}, {"whitespace_pattern": " "}, {"other": 1}):
        with pytest.raises(ApiError, match="structured_outputs: expected one of json"):
            call_of(name, structured_outputs=wrong)


def test_older_names_of_anthropic_and_prefill() -> None:
    schema = {"type": "object"}
    call = call_of("Anthropic messages", output_format={"type": "json_schema", "schema": schema})
    assert call.structured == {"json": schema}
    with pytest.raises(ApiError, match="prefill is not supported"):
        call_of("Anthropic messages", messages=[USER, {"role": "assistant", "content": "{"}])


OTHER_TOOLS = [
    ("chat completions", LOOK, [{"type": "custom", "custom": {"name": "patch"}}], "custom"),
    (
        "responses",
        {"type": "function", **LOOK["function"]},
        [{"type": "web_search", "external_web_access": True}],
        "web_search",
    ),
    (
        "responses",
        {"type": "function", **LOOK["function"]},
        [{"type": "namespace", "name": "agents", "tools": []}],
        "namespace",
    ),
    (
        "Anthropic messages",
        {"name": "look", "input_schema": LOOK["function"]["parameters"]},
        [{"type": "web_search_20250305", "name": "web_search"}],
        "web_search_20250305",
    ),
]


@pytest.mark.spec("gateway.other-tools")
@pytest.mark.parametrize(("name", "function", "others", "kind"), OTHER_TOOLS)
def test_tools_of_other_types_are_left_out(
    name: str, function: dict[str, Any], others: list[dict[str, Any]], kind: str
) -> None:
    call = call_of(name, tools=[function, *others])
    assert call.tools == [LOOK]
    assert list(call.ignored) == [f"a tool of type {kind}"]
    assert call_of(name, tools=others).tools is None


@pytest.mark.spec("gateway.form-or-calls")
@pytest.mark.usefixtures("uncompiled_forms")
def test_requests_of_codex_and_others_at_the_gateway(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = family("qwen25")
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    async def agent(task: Any) -> float:
        headers = {"authorization": f"Bearer {task.api_key}"}
        options = {"headers": headers, "timeout": 60.0}
        async with httpx.AsyncClient(base_url=task.base_url, **options) as client:

            async def post(path: str, status: int = 200, **body: Any) -> Any:
                answer = await client.post(path, json={"model": task.model, **body})
                assert answer.status_code == status, answer.text
                return answer.json()

            chat = {"messages": [USER], "tools": [LOOK]}
            message = await post("/chat/completions", **chat, parallel_tool_calls=False)
            assert len(message["choices"][0]["message"]["tool_calls"]) == 1
            message = await post("/chat/completions", **chat, stop_token_ids=[5])
            assert len(message["choices"][0]["message"]["tool_calls"]) == 2
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            await post("/chat/completions", **chat, response_format=form)
            user = {"role": "user", "content": "hi"}
            first = await post("/responses", input=[user], include=["reasoning.encrypted_content"])
            reference = {"type": "item_reference", "id": first["output"][0]["id"]}
            await post("/responses", input=[user, reference, user])
            error = await post("/responses", 404, input=[{"type": "item_reference", "id": "msg_1"}])
            assert "msg_1" in error["error"]["message"]
        return 1.0

    out = played(
        agent, tokenizer, tool_parser=ToolCallParser("hermes", tokenizer),
        answer=lambda one, n: says(tokenizer, f"{call}\n{call}"),
        sampling_params=SamplingParams(max_generate_length=256, max_kept_tokens=64, top_k=50),
        max_input_length=4096,
    )  # fmt: skip
    assert out.only.failure is None
    assert out.only.env_metrics["left_out_tool_calls"] == 1
    extras = [one.sampling.additional_kwargs for one in out.engine.calls]
    assert extras[1] == {"stop_token_ids": [5]}
    either = json.loads(extras[2]["structured_outputs"]["structural_tag"])["format"]
    assert either["elements"][0] == {"type": "json_schema", "json_schema": schema}
    texts = [r.getMessage() for r in caplog.records]
    assert sum("include: reasoning.encrypted_content" in text for text in texts) == 1
    last = tokenizer.decode(list(out.only.steps[-1].prompt_token_ids))
    assert last.count("user\nhi<|im_end|>") == 2 and last.count("<tool_call>") == 2
