"""Thoughts apart from the answer's text, and back in the history without a fork."""

from typing import Any

import pytest
from _gateway import MODEL, USER, chat, played, skip_without_anthropic
from _tools import CALL, LOOK, TEMPLATE, CallParser
from fake_envs import says

from skyrl_fast.rollout.reasoning import ReasoningParser

skip_without_anthropic()
pytest.importorskip("openai")

THOUGHTS = "<think>\nhm, a door\n</think>\n\n"


class ThinkParser:
    """Stands in for vLLM's parsers: what is between the tags, with its white space."""

    def divide(self, text: str, template_kwargs: Any) -> tuple[str, str]:
        before, found, rest = text.partition("</think>")
        return (before.removeprefix("<think>"), rest) if found else ("", text)


def thinking(tokenizer: Any) -> dict[str, Any]:
    """Return options of `played`: an answer with thoughts and a tool call, then one of thoughts."""
    answers = [f"{THOUGHTS}I look.{CALL}", f"{THOUGHTS}done"]
    return {
        "answer": lambda call, n: says(tokenizer, answers[n]),
        "chat_template": TEMPLATE,
        "tool_parser": CallParser(),
        "reasoning_parser": ThinkParser(),
    }


def check_continued(out: Any) -> None:
    first, second = out.only.steps
    together = first.prompt_token_ids + first.response_ids
    assert second.prompt_token_ids[: len(together)] == together
    assert first.text == f"{THOUGHTS}I look.{CALL}"
    metrics = out.only.env_metrics
    assert (metrics["continued_prompts"], metrics["answers_with_thoughts"]) == (1, 2)


@pytest.mark.spec("gateway.thoughts")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_chat_messages(stream: bool, name: str, tiny_tokenizer: Any) -> None:
    async def ask(task: Any, messages: list[Any]) -> tuple[str, str, list[Any]]:
        answer = await chat(task, messages, tools=[LOOK], stream=stream)
        if not stream:
            message = answer.choices[0].message
            return getattr(message, name), message.content or "", message.tool_calls or []
        deltas = [event.choices[0].delta async for event in answer]
        thoughts = "".join(getattr(delta, name, None) or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        return thoughts, "".join(delta.content or "" for delta in deltas), calls

    async def agent(task: Any) -> float:
        thoughts, text, (call,) = await ask(task, [USER])
        assert (thoughts, text) == ("hm, a door", "I look.")
        function = {"name": call.function.name, "arguments": call.function.arguments}
        called = [{"id": call.id, "type": "function", "function": function}]
        answer = {"role": "assistant", "content": text, name: thoughts, "tool_calls": called}
        result = {"role": "tool", "tool_call_id": call.id, "content": "a door"}
        thoughts, text, calls = await ask(task, [USER, answer, result])
        assert (thoughts, text, calls) == ("hm, a door", "done", [])
        return 1.0

    check_continued(played(agent, tiny_tokenizer, **thinking(tiny_tokenizer)))


@pytest.mark.spec("gateway.anthropic")
@pytest.mark.parametrize("stream", [False, True])
def test_blocks_of_messages(stream: bool, tiny_tokenizer: Any) -> None:
    tool = {"name": "look", "input_schema": LOOK["function"]["parameters"]}

    async def agent(task: Any) -> float:
        options = {
            **{"model": MODEL, "max_tokens": 2000, "tools": [tool]},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        create = task.async_anthropic.messages

        async def ask(messages: list[Any]) -> Any:
            if not stream:
                return await create.create(messages=messages, **options)
            async with create.stream(messages=messages, **options) as events:
                return await events.get_final_message()

        first = await ask([USER])
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert (first.content[0].thinking, first.content[1].text) == ("hm, a door", "I look.")
        assert first.content[0].signature
        call = first.content[2]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a door"}
        answer = {"role": "assistant", "content": first.content}
        last = await ask([USER, answer, {"role": "user", "content": [result]}])
        assert [block.type for block in last.content] == ["thinking", "text"]
        return 1.0

    check_continued(played(agent, tiny_tokenizer, **thinking(tiny_tokenizer)))


@pytest.mark.spec("gateway.responses")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_items_of_responses(stream: bool, by_id: bool, tiny_tokenizer: Any) -> None:
    function = LOOK["function"]
    tool = {"type": "function", "name": "look", "parameters": function["parameters"]}

    async def agent(task: Any) -> float:
        responses = task.async_openai.responses

        async def ask(**more: Any) -> Any:
            if not stream:
                return await responses.create(model=MODEL, tools=[tool], **more)
            async with responses.stream(model=MODEL, tools=[tool], **more) as events:
                return await events.get_final_response()

        first = await ask(input="task")
        thoughts, message, call = first.output
        assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "hm, a door")
        assert (message.type, first.output_text) == ("message", "I look.")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "a door"}
        if by_id:
            last = await ask(input=[result], previous_response_id=first.id)
        else:
            items = [item.model_dump(exclude_none=True) for item in first.output]
            last = await ask(input=[{"role": "user", "content": "task"}, *items, result])
        assert [item.type for item in last.output] == ["reasoning", "message"]
        return 1.0

    check_continued(played(agent, tiny_tokenizer, **thinking(tiny_tokenizer)))


@pytest.mark.spec("gateway.thoughts")
@pytest.mark.parametrize("call", [CALL, ""])
def test_an_answer_of_white_space_is_no_pattern_for_one_with_text(
    call: str, tiny_tokenizer: Any
) -> None:
    async def agent(task: Any) -> float:
        messages, texts = [USER], []
        for _ in range(2):
            message = (await chat(task, messages, tools=[LOOK])).choices[0].message
            texts.append(message.content or "")
            messages += [message.model_dump(exclude_none=True), USER]
        assert texts == ["", "I look."]
        return 1.0

    options = thinking(tiny_tokenizer)
    answers = [f"{THOUGHTS}{call}", f"{THOUGHTS}I look.{call}"]
    options["answer"] = lambda _, n: says(tiny_tokenizer, answers[n])
    out = played(agent, tiny_tokenizer, **options).only
    assert (out.failure, out.env_metrics["continued_prompts"]) == (None, 1)


@pytest.mark.spec("gateway.thoughts")
def test_without_a_parser_thoughts_are_text(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        message = (await chat(task, [USER])).choices[0].message
        assert message.content == f"{THOUGHTS}a"
        assert not hasattr(message, "reasoning")
        return 1.0

    answer = lambda call, n: says(tiny_tokenizer, f"{THOUGHTS}a")  # noqa: E731
    assert played(agent, tiny_tokenizer, answer=answer).only.failure is None


def test_parsers_of_vllm(tiny_tokenizer: Any) -> None:
    pytest.importorskip("vllm")
    tokenizer = with_think_tokens(tiny_tokenizer)
    parser = ReasoningParser("deepseek_r1", tokenizer)
    assert parser.divide("<think>hm</think>yes", {}) == ("hm", "yes")
    assert parser.divide("hm</think>", {}) == ("hm", "")
    with pytest.raises(ValueError, match=r"generator\.reasoning_parser: deepseek_r1 refuses"):
        ReasoningParser("deepseek_r1", tiny_tokenizer)
    with pytest.raises(ValueError, match=r"generator\.reasoning_parser: expected null or one of"):
        ReasoningParser.find_class("qwen33")


def with_think_tokens(tokenizer: Any) -> Any:
    import copy

    changed = copy.deepcopy(tokenizer)
    changed.add_tokens(["<think>", "</think>"])
    return changed


def test_thoughts_that_the_template_drops_are_forks(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some answers that it never writes as they were sampled, no other forms are tried."""
    from skyrl_fast.gateway.prompt_ids import PromptIds

    tried: list[int] = []
    continuing = PromptIds.continuing

    def counted(self: PromptIds, *arguments: Any, **options: Any) -> int | None:
        tried.append(1)
        return continuing(self, *arguments, **options)

    monkeypatch.setattr(PromptIds, "continuing", counted)

    async def agent(task: Any) -> float:
        messages = [USER]
        for _ in range(6):
            message = (await chat(task, messages)).choices[0].message
            assert (message.reasoning, message.content) == ("\nhm, a door\n", "\n\na")
            messages += [message.model_dump(exclude_none=True), USER]
        return 1.0

    options = thinking(tiny_tokenizer) | {
        "chat_template": TEMPLATE.replace("m.reasoning_content", "false"),
        "answer": lambda call, n: says(tiny_tokenizer, f"{THOUGHTS}a"),
    }
    out = played(agent, tiny_tokenizer, **options)
    metrics = out.only.env_metrics
    assert (metrics["first_prompts"], metrics["continued_prompts"]) == (1, 0)
    assert len(tried) == 3
    assert all("hm" not in tiny_tokenizer.decode(s.prompt_token_ids) for s in out.only.steps)
