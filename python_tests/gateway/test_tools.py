"""Tools through the gateway: offered to the chat template, found in answers, returned to it."""

import json
from typing import Any

import pytest
from _gateway import MODEL, USER, chat, played
from _tools import CALL, LOOK, TEMPLATE, CallParser, answer_of
from fake_envs import says

openai = pytest.importorskip("openai")


async def follow(task: Any, stream: bool) -> float:
    messages: list[Any] = [USER]
    if stream:
        events = await chat(task, messages, tools=[LOOK], stream=True)
        deltas = [event.choices[0] async for event in events]
        text = "".join(d.delta.content or "" for d in deltas)
        (call,) = [c for d in deltas for c in d.delta.tool_calls or []]
        finish = deltas[-1].finish_reason
    else:
        choice = (await chat(task, messages, tools=[LOOK])).choices[0]
        text, finish = choice.message.content, choice.finish_reason
        (call,) = choice.message.tool_calls
    assert (text, finish) == ("I look.", "tool_calls")
    assert (call.type, call.function.name) == ("function", "look")
    assert json.loads(call.function.arguments) == {"at": "door"}
    function = {"name": call.function.name, "arguments": call.function.arguments}
    called = {"id": call.id, "type": "function", "function": function}
    messages.append({"role": "assistant", "content": text, "tool_calls": [called]})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "a door"})
    last = await chat(task, messages, tools=[LOOK])
    assert last.choices[0].message.content == "done"
    assert last.choices[0].message.tool_calls is None
    return 1.0


@pytest.mark.spec("gateway.tools")
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_go_out_and_their_tokens_come_back(stream: bool, tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        return await follow(task, stream)

    options = {"chat_template": TEMPLATE, "tool_parser": CallParser()}
    out = played(agent, tiny_tokenizer, answer=answer_of(tiny_tokenizer), **options)
    first, second = out.only.steps
    together = first.prompt_token_ids + first.response_ids
    assert second.prompt_token_ids[: len(together)] == together
    assert tiny_tokenizer.decode(second.prompt_token_ids) == (
        f"<tool>look</tool><|im_start|>user\ntask<|im_end|>\n<|im_start|>assistant\nI look.{CALL}"
        "<|im_end|>\n<|im_start|>tool\na door<|im_end|>\n<|im_start|>assistant\n"
    )
    metrics = out.only.env_metrics
    assert (metrics["continued_prompts"], metrics["answers_with_tool_calls"]) == (1, 1)


@pytest.mark.parametrize("writes", [False, True])
def test_tools_that_the_template_leaves_out_are_said_once(
    writes: bool, tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(task: Any) -> float:
        for text in ("one", "two"):
            await chat(task, [{"role": "user", "content": text}], tools=[LOOK])
        return 1.0

    options: dict[str, Any] = {"tool_parser": CallParser()}
    if writes:
        options["chat_template"] = TEMPLATE
    played(agent, tiny_tokenizer, **options)
    said = [r for r in caplog.records if "which the chat template leaves out" in r.getMessage()]
    assert len(said) == (0 if writes else 1)


@pytest.mark.parametrize("between", ["", "\n", "\n\n"])
def test_white_space_between_text_and_calls_makes_no_fork(
    between: str, tiny_tokenizer: Any
) -> None:
    """The template writes a line break before each call, as many do; the parser keeps it."""
    template = TEMPLATE.replace("<call>", "{{ '\n' }}<call>")

    async def agent(task: Any) -> float:
        first = (await chat(task, [USER], tools=[LOOK])).choices[0].message
        messages = [USER, first.model_dump(exclude_none=True)]
        call = first.tool_calls[0]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "a door"})
        await chat(task, messages, tools=[LOOK])
        return 1.0

    out = played(
        agent, tiny_tokenizer, chat_template=template, tool_parser=CallParser(),
        answer=lambda call, n: says(tiny_tokenizer, f"I look.{between}{CALL}" if n == 0 else "a"),
    )  # fmt: skip
    first, second = out.only.steps
    together = first.prompt_token_ids + first.response_ids
    is_continued = second.prompt_token_ids[: len(together)] == together
    assert is_continued == bool(between)
    kind = "continued_prompts" if is_continued else "forked_prompts"
    assert out.only.env_metrics[kind] == 1


def test_without_tools_or_with_tool_choice_none_a_call_is_text(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        for options in ({}, {"tools": [LOOK], "tool_choice": "none"}):
            message = (await chat(task, [USER], **options)).choices[0].message
            assert (message.content, message.tool_calls) == (f"I look.{CALL}", None)
        return 1.0

    out = played(
        agent, tiny_tokenizer, chat_template=TEMPLATE, tool_parser=CallParser(),
        answer=lambda call, n: says(tiny_tokenizer, f"I look.{CALL}"),
    )  # fmt: skip
    assert len(out.only.steps) == 2


def test_keyword_arguments_of_the_template(tiny_tokenizer: Any) -> None:
    template = "{{ style }}" + TEMPLATE

    async def agent(task: Any) -> float:
        for style in ("short", "<|im_end|>"):
            await chat(task, [USER], extra_body={"chat_template_kwargs": {"style": style}})
        with pytest.raises(openai.BadRequestError):
            await chat(task, [USER], extra_body={"chat_template_kwargs": {"tokenize": True}})
        await chat(task, [{"role": "user", "content": "more"}])
        return 1.0

    steps = played(agent, tiny_tokenizer, chat_template=template).only.steps
    texts = [tiny_tokenizer.decode(step.prompt_token_ids) for step in steps]
    assert [text.partition("<|im_start|>")[0] for text in texts] == ["short", "<|im_end|>", ""]
    assert steps[1].prompt_token_ids.count(tiny_tokenizer.eos_token_id) == 1


@pytest.mark.spec("gateway.untrained")
def test_calls_of_other_names_are_sampled_but_not_trained(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        await chat(task, [USER])
        judge = await task.async_openai.chat.completions.create(model="judge", messages=[USER])
        assert (judge.model, judge.choices[0].message.content) == ("judge", "a1")
        return 1.0

    out = played(agent, tiny_tokenizer, untrained_models=("judge",))
    assert [(s.text, s.reward) for s in out.only.steps] == [("a0", 1.0)]
    assert out.only.env_metrics["untrained_calls"] == 1


@pytest.mark.spec("gateway.rewards")
def test_rewards_by_post_for_calls_spans_and_the_trajectory(tiny_tokenizer: Any) -> None:
    import httpx

    def agent(task: Any) -> None:  # a synchronous one, which returns nothing
        first = task.openai.chat.completions.create(model=MODEL, messages=[USER])
        for text in ("b", "c"):
            task.openai.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": text}],
                extra_headers={"x-span": "search"},
            )
        task.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "d"}]
        )
        headers = {"authorization": f"Bearer {task.api_key}"}
        with httpx.Client(base_url=task.base_url, headers=headers) as client:
            for body in ({"reward": 0.5, "id": first.id}, {"reward": 2, "span": "search"}):
                assert client.post("/rewards", json=body).status_code == 200
            assert client.post("/rewards", json={"reward": 1}).status_code == 200
            assert client.post("/rewards", json={"reward": 1, "id": "x"}).status_code == 404
            assert client.post("/rewards", json={"reward": "much"}).status_code == 400

    out = played(agent, tiny_tokenizer)
    assert [s.reward for s in out.only.steps] == [0.5, 0.0, 2.0, 1.0]

    async def cheats(task: Any) -> float:
        await chat(task, [USER])
        headers = {"authorization": f"Bearer {task.api_key}"}
        async with httpx.AsyncClient(base_url=task.base_url, headers=headers) as client:
            assert (await client.post("/rewards", json={"reward": 9})).status_code == 403
        return 0.0

    out = played(cheats, tiny_tokenizer, takes_rewards=False)
    assert [s.reward for s in out.only.steps] == [0.0]
