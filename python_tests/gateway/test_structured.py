"""Answers whose form the request sets: JSON, a JSON schema, a call of a tool."""

import json
from typing import Any

import numpy as np
import pytest
from _gateway import MODEL, USER, chat, played, skip_without_anthropic
from _gateway import uncompiled_forms as uncompiled_forms  # a fixture
from _hostile_forms import names, nested, strings
from _tools import CALL, LOOK, TEMPLATE, CallParser
from fake_envs import Call, says

from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.config import SamplingParams
from skyrl_fast.gateway.form_limits import FormError, check_form
from skyrl_fast.rollout.engine.protocol import Generation, RefusedRequestError

skip_without_anthropic()
openai = pytest.importorskip("openai")

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
NAMED = {"name": "answer", "schema": SCHEMA}


def structured(call: Call) -> Any:
    return call.sampling.additional_kwargs.get("structured_outputs")


def with_sets(tokenizer: Any, text: str) -> Generation:
    answer = says(tokenizer, text)
    sets = [np.array([token], np.int32) for token in answer.token_ids]
    return Generation(answer.token_ids, answer.logprobs, "stop", kept_ids=sets)


@pytest.mark.spec("gateway.structured")
def test_the_engine_gets_the_form_of_each_dialect(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        formats = [{"type": "text"}, {"type": "json_object"}]
        for form in [*formats, {"type": "json_schema", "json_schema": NAMED}]:
            await chat(task, [USER], response_format=form)
        responses = task.async_openai.responses
        for form in [*formats, {"type": "json_schema", **NAMED}]:
            await responses.create(model=MODEL, input="a", text={"format": form})
        await task.async_anthropic.messages.create(
            model=MODEL, max_tokens=60, messages=[USER],
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        )  # fmt: skip
        return 1.0

    def answer(call: Call, n: int) -> Any:
        return (with_sets if structured(call) else says)(tiny_tokenizer, "{}")

    out = played(agent, tiny_tokenizer, answer=answer)
    forms = [None, {"json_object": True}, {"json": SCHEMA}]
    assert [structured(call) for call in out.engine.calls] == [*forms, *forms, {"json": SCHEMA}]
    recorded = [call.sampling.num_kept_tokens for call in out.engine.calls]
    assert recorded == [None, 256, 256, None, 256, 256, 256]
    batch = batch_from_trajectories([out.only])  # rows with and without sets
    assert batch.num_kept.tolist() == [k for n in (0, 1, 1, 0, 1, 1, 1) for k in [n] * 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("uncompiled_forms")
def test_what_the_engine_refuses_is_an_error_of_the_request(
    stream: bool, tiny_tokenizer: Any
) -> None:
    import anthropic

    async def agent(task: Any) -> float:
        client = task.async_openai.with_options(max_retries=0)
        other = task.async_anthropic.with_options(max_retries=0)
        form = {"type": "json_schema", "json_schema": NAMED}
        with pytest.raises(openai.APIError, match="unsupported schema") as error:
            answer = await client.chat.completions.create(
                model=MODEL, messages=[USER], response_format=form, stream=stream
            )
            assert [event async for event in answer]
        assert error.value.code == "invalid_value"
        if not stream:
            assert isinstance(error.value, openai.BadRequestError)
            config = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
            with pytest.raises(anthropic.BadRequestError, match="unsupported schema") as refused:
                await other.messages.create(
                    model=MODEL, max_tokens=9, messages=[USER], extra_body=config
                )
            assert refused.value.body["error"]["type"] == "invalid_request_error"
        await chat(task, [USER])
        return 1.0

    def answer(call: Call, n: int) -> Any:
        if structured(call):
            return RefusedRequestError("unsupported schema")
        return says(tiny_tokenizer, "a")

    out = played(agent, tiny_tokenizer, answer=answer)
    assert (out.only.failure, [s.text for s in out.only.steps]) == (None, ["a"])


def test_invalid_forms_are_named(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        with pytest.raises(openai.BadRequestError, match="response_format: expected a JSON schema"):
            await chat(task, [USER], response_format={"type": "json_schema"})
        with pytest.raises(openai.BadRequestError, match=r"text\.format: expected text"):
            await task.async_openai.responses.create(
                model=MODEL, input="a", text={"format": {"type": "grammar"}}
            )
        with pytest.raises(openai.BadRequestError, match="max_kept_tokens, got null"):
            await chat(task, [USER], response_format={"type": "json_object"})
        await chat(task, [USER])
        return 1.0

    sampling = SamplingParams(max_generate_length=64, max_kept_tokens=None)
    out = played(agent, tiny_tokenizer, sampling_params=sampling)
    assert (out.only.failure, len(out.only.steps)) == (None, 1)


@pytest.mark.spec("gateway.tools")
@pytest.mark.usefixtures("uncompiled_forms")
def test_forced_tools(tiny_tokenizer: Any) -> None:
    function = LOOK["function"]

    async def agent(task: Any) -> float:
        named = {"type": "function", "function": {"name": "look"}}
        for choice in ("required", named):
            answer = await chat(task, [USER], tools=[LOOK], tool_choice=choice)
            assert answer.choices[0].message.tool_calls[0].function.name == "look"
        tool = {"type": "function", "name": "look", "parameters": function["parameters"]}
        for choice in ("required", {"type": "function", "name": "look"}):
            await task.async_openai.responses.create(
                model=MODEL, input="a", tools=[tool], tool_choice=choice
            )
        tool = {"name": "look", "input_schema": function["parameters"]}
        for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
            answer = await task.async_anthropic.messages.create(
                model=MODEL, max_tokens=60, messages=[USER], tools=[tool], tool_choice=choice
            )
            assert answer.stop_reason == "tool_use"
        for choice in ({"type": "function", "function": {"name": "other"}}, {"type": "custom"}):
            with pytest.raises(openai.BadRequestError, match="tool_choice: "):
                await chat(task, [USER], tools=[LOOK], tool_choice=choice)
        with pytest.raises(openai.BadRequestError, match="tool_choice: expected tools"):
            await chat(task, [USER], tool_choice="required")
        return 1.0

    out = played(
        agent, tiny_tokenizer, chat_template=TEMPLATE, tool_parser=CallParser(),
        answer=lambda call, n: with_sets(tiny_tokenizer, CALL),
    )  # fmt: skip
    wanted = [{"grammar": f'root ::= "call {name}"'} for name in ("required", "look")]
    assert [structured(call) for call in out.engine.calls] == wanted * 3
    assert out.only.env_metrics["answers_with_tool_calls"] == 6

    async def without(task: Any) -> float:
        with pytest.raises(openai.BadRequestError, match=r"only with generator\.tool_parser"):
            await chat(task, [USER], tools=[LOOK], tool_choice="required")
        await chat(task, [USER])
        return 1.0

    assert played(without, tiny_tokenizer, chat_template=TEMPLATE).only.failure is None


def test_calls_that_do_not_parse_are_text_and_counted(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        for text in ("<call>{", "a"):
            message = (await chat(task, [USER], tools=[LOOK])).choices[0].message
            assert (message.content, message.tool_calls) == (text, None)
        return 1.0

    out = played(
        agent, tiny_tokenizer, chat_template=TEMPLATE, tool_parser=CallParser(),
        answer=lambda call, n: says(tiny_tokenizer, ["<call>{", "a"][n]),
    )  # fmt: skip
    metrics = out.only.env_metrics
    assert (metrics["unparsed_tool_calls"], metrics["answers_with_tool_calls"]) == (1, 0)


@pytest.mark.spec("gateway.form-limits")
@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"json": {"enum": names(20_000)}}, "json: expected at most 100,000 characters, got more"),
        ({"choice": ["x" * 100_000]}, "choice: expected at most 100,000 characters"),
        ({"json": nested(49)}, r"json\.items.*: expected at most 48 levels, got more"),
        ({"json": strings(maxLength=10_001)}, "a.maxLength: expected at most 10,000, got 10,001"),
        ({"json": strings(minLength=float("inf"))}, "minLength: expected at most 10,000, got inf"),
        ({"json": {"type": "array", "minItems": -1}}, "json.minItems: expected at most 10,000"),
        ({"json": strings(pattern="a{1,10001}")}, "a.pattern: expected at most 10,000"),
        ({"regex": "a{99999999999}"}, "regex: expected at most 10,000, got 99,999,999,999"),
        ({"grammar": 'root ::= "a"{0,10001}'}, "grammar: expected at most 10,000, got 10,001"),
        ({"json": strings(pattern="^(?=.*a).+$")}, "properties.a.pattern: .* without look-around"),
        ({"json": {"patternProperties": {"(?<!a)": {}}}}, "patternProperties: .* look-around"),
        ({"json": {"$ref": "http://a/b.json"}}, r"json.\$ref: expected a place in the schema"),
        ({"json": {"const": 1 << 63}}, "json.const: expected an integer of 64 bits, got one of 64"),
        ({"json": "[" * 10**5}, "json: expected JSON"),
        ({"structural_tag": json.dumps({"format": nested(48)})}, "48 levels"),
        ({"grammar": 7}, "grammar: expected text, got int"),
        ({"json": nested(47)}, None),
        ({"json": strings(pattern=r"^\d{4}-\d{2}T(Z|\+\d\d)?$", maxLength=10_000)}, None),
        ({"json": {"properties": {"pattern": {"enum": ["(?=a)"]}, "maxLength": {}}}}, None),
        ({"json": {"const": {"pattern": "(?=a)", "minLength": -1, "$ref": "x"}}}, None),
        ({"regex": r"f\(?=0"}, None),  # a parenthesis, or none
        ({"json_object": True}, None),
    ],
)
def test_forms_beyond_the_limits_are_refused_by_their_place(
    form: dict[str, Any], wanted: str | None
) -> None:
    if wanted is None:
        check_form(form)
    else:
        with pytest.raises(FormError, match=wanted):
            check_form(form)


@pytest.mark.spec("gateway.form-limits")
def test_a_refused_form_is_an_error_of_its_request(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(49)}}
        with pytest.raises(
            openai.BadRequestError, match=r"the form of an answer: json[.a-z]*: expected"
        ):
            await chat(task, [USER], response_format=form)
        await chat(task, [USER])
        return 1.0

    out = played(agent, tiny_tokenizer, max_retries=0)
    assert out.only.failure is None and len(out.only.steps) == 1
