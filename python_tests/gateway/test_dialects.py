"""The other dialects, by their official clients: the same steps, in each API's form."""

import json
from typing import Any

import httpx
import pytest
from _gateway import MODEL, USER, played, skip_without_anthropic
from _tools import CALL, LOOK, TEMPLATE, CallParser, answer_of
from fake_envs import says

skip_without_anthropic()
openai = pytest.importorskip("openai")

SCHEMA = LOOK["function"]["parameters"]
TOOL = {"name": "look", "description": "Look at it.", "input_schema": SCHEMA}
TOOLS = {"chat_template": TEMPLATE, "tool_parser": CallParser()}


def check_continued(out: Any, tokenizer: Any) -> None:
    """A tool's call and result continue the first call token by token."""
    first, second = out.only.steps
    together = first.prompt_token_ids + first.response_ids
    assert second.prompt_token_ids[: len(together)] == together
    assert tokenizer.decode(second.prompt_token_ids).endswith(
        f"I look.{CALL}<|im_end|>\n<|im_start|>tool\na door<|im_end|>\n<|im_start|>assistant\n"
    )
    assert out.only.env_metrics["continued_prompts"] == 1


@pytest.mark.spec("gateway.anthropic")
@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_agent_with_tools(stream: bool, tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        options = {"model": task.model, "max_tokens": 60, "tools": [TOOL], "system": "be brief"}
        create = task.async_anthropic.messages

        async def ask(messages: list[Any]) -> Any:
            if not stream:
                return await create.create(messages=messages, **options)
            async with create.stream(messages=messages, **options) as events:
                return await events.get_final_message()

        messages: list[Any] = [USER]
        first = await ask(messages)
        assert (first.stop_reason, first.role) == ("tool_use", "assistant")
        text, call = first.content
        assert (text.text, call.name, call.input) == ("I look.", "look", {"at": "door"})
        messages.append({"role": "assistant", "content": first.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a door"}
        messages.append({"role": "user", "content": [result]})
        count = await create.count_tokens(
            model=task.model, messages=messages, tools=[TOOL], system="be brief"
        )
        last = await ask(messages)
        assert (last.content[0].text, last.stop_reason) == ("done", "end_turn")
        assert last.usage.input_tokens == count.input_tokens
        assert last.usage.output_tokens == 5
        return 1.0

    out = played(agent, tiny_tokenizer, answer=answer_of(tiny_tokenizer), **TOOLS)
    check_continued(out, tiny_tokenizer)
    prompt = tiny_tokenizer.decode(out.only.steps[0].prompt_token_ids)
    assert prompt.startswith("<tool>look</tool><|im_start|>system\nbe brief<|im_end|>")
    assert out.only.env_metrics["calls"] == 2


def test_anthropic_errors_and_stops(tiny_tokenizer: Any) -> None:
    import anthropic

    async def agent(task: Any) -> float:
        client = task.async_anthropic.with_options(max_retries=0)
        create = client.messages.create
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await create(model="claude", max_tokens=9, messages=[USER])
        long = {"role": "user", "content": "x" * 600}
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as error:
            await create(model=MODEL, max_tokens=9, messages=[long])
        assert error.value.body["error"]["type"] == "invalid_request_error"
        other = client.with_options(api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError):
            await other.messages.create(model=MODEL, max_tokens=9, messages=[USER])
        answer = await create(model=MODEL, max_tokens=9, messages=[USER], stop_sequences=[";"])
        assert answer.content[0].text == "one"
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ";")
        return 1.0

    def answer(call: Any, n: int) -> Any:
        return says(tiny_tokenizer, "one;", end=False, stop=";")

    out = played(agent, tiny_tokenizer, answer=answer)
    assert out.only.failure is None
    assert out.only.steps[0].text == "one;"


@pytest.mark.spec("gateway.responses")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_responses_with_tools(stream: bool, by_id: bool, tiny_tokenizer: Any) -> None:
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}

    async def agent(task: Any) -> float:
        options = {"model": task.model, "tools": [tool], "instructions": "be brief"}
        responses = task.async_openai.responses

        async def ask(**more: Any) -> Any:
            if not stream:
                return await responses.create(**options, **more)
            async with responses.stream(**options, **more) as events:
                return await events.get_final_response()

        first = await ask(input="task")
        message, call = first.output
        assert (first.status, first.output_text, message.type) == (
            "completed",
            "I look.",
            "message",
        )
        assert (call.type, call.name) == ("function_call", "look")
        assert json.loads(call.arguments) == {"at": "door"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "a door"}
        if by_id:
            last = await ask(input=[result], previous_response_id=first.id)
        else:
            items = [item.model_dump(exclude_none=True) for item in first.output]
            last = await ask(input=[{"role": "user", "content": "task"}, *items, result])
        assert (last.output_text, last.usage.output_tokens) == ("done", 5)
        return 1.0

    out = played(agent, tiny_tokenizer, answer=answer_of(tiny_tokenizer), **TOOLS)
    check_continued(out, tiny_tokenizer)


@pytest.mark.spec("gateway.unsupported")
def test_responses_errors(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        create = task.async_openai.with_options(max_retries=0).responses.create
        with pytest.raises(openai.NotFoundError, match="resp_1"):
            await create(model=MODEL, input="a", previous_response_id="resp_1")
        with pytest.raises(openai.BadRequestError, match="background"):
            await create(model=MODEL, input="a", background=True)
        cut = await create(model=MODEL, input="a", max_output_tokens=16)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        return 1.0

    def answer(call: Any, n: int) -> Any:
        ids = tiny_tokenizer.encode("x" * call.sampling.max_generate_length)
        return Generation(ids, [-0.5] * len(ids), "length")

    from skyrl_fast.rollout.engine.protocol import Generation

    out = played(agent, tiny_tokenizer, answer=answer)
    assert (out.only.stop_reason, len(out.only.steps[0].response_ids)) == ("length", 16)


@pytest.mark.spec("gateway.completions", "gateway.special-tokens")
@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_text_and_tokens(stream: bool, tiny_tokenizer: Any) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n"

    async def agent(task: Any) -> float:
        create = task.async_openai.completions.create
        for prompt in (text, tiny_tokenizer.encode(text), [text]):
            answer = await create(
                model=task.model, prompt=prompt, max_tokens=9, logprobs=0, stream=stream
            )
            if stream:
                (answer,) = [event async for event in answer]
            (choice,) = answer.choices
            assert (choice.text[0], choice.finish_reason) == ("a", "stop")
            assert choice.logprobs.token_logprobs == [-0.5] * 3
        with pytest.raises(openai.BadRequestError, match="one prompt"):
            await create(model=task.model, prompt=["a", "b"])
        return 1.0

    out = played(agent, tiny_tokenizer)
    ids = tiny_tokenizer.encode(text)
    assert [s.prompt_token_ids for s in out.only.steps] == [ids] * 3
    assert [s.text for s in out.only.steps] == ["a0", "a1", "a2"]


@pytest.mark.spec("gateway.errors")
def test_lone_surrogates_in_fields_that_answers_repeat(tiny_tokenizer: Any) -> None:
    lone = "\ud800"

    async def agent(task: Any) -> float:
        async def post(path: str, **body: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {task.api_key}"}
            content = json.dumps({"model": MODEL, **body})
            url = f"{task.base_url}/{path}"
            headers["content-type"] = "application/json"
            return await client.post(url, content=content, headers=headers)

        message = {"role": "user", "content": "a"}
        async with httpx.AsyncClient() as client:
            for path, body in (
                ("responses", {"input": "a", "previous_response_id": lone}),
                ("chat/completions", {"messages": [message], "model": lone}),
                ("messages", {"messages": [message], "max_tokens": 4, "model": lone}),
            ):
                answer = await post(path, **body)
                assert answer.status_code == 404 and r"\ud800" in answer.text, answer.text
            assert (await post("responses", input="a")).status_code == 200
        return 1.0

    out = played(agent, tiny_tokenizer)
    assert out.only.failure is None
