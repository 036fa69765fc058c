"""Chat formats of model families: five rounds with tools and thoughts, by each door.

A prompt has the tokens of one complete render of the conversation. Where a family's template
rewrites its history, the difference is named here.
"""

import json
from typing import Any

import pytest
from _families import FOLDER, byte_tokenizer, family, sentencepiece_tokenizer
from _gateway import chat, played
from fake_envs import FakePrompt, ScriptedEngine, loop_config, make_context, run

from skyrl_fast.config import SamplingParams, as_config
from skyrl_fast.rollout.context import ContextError, render_answer
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.env.protocol import Env, EnvStep
from skyrl_fast.rollout.loop_settings import loop_settings
from skyrl_fast.rollout.reasoning import ReasoningParser
from skyrl_fast.rollout.tool_calls import ToolCallParser
from skyrl_fast.train.data.demonstrations import build_demonstration

ROUNDS = 5
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
CHATML_TEMPLATE = (FOLDER / "chatml.jinja").read_text()
CHATML = "answer {n}<|im_end|>"
HERMES = '<tool_call>\n{{"name": "look", "arguments": {{"at": "{n}"}}}}\n</tool_call><|im_end|>'
GLM = (
    "\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>{n}</arg_value>\n</tool_call>"
    "<|observation|>"
)
GLMS = ("glm45", "glm45v")
GEMMA4 = '<|tool_call>call:look{{at:<|"|>{n}<|"|>}}<tool_call|><|tool_response>'
MISTRAL3 = '[TOOL_CALLS]look[ARGS]{{"at": "{n}"}}</s>'
OSS = ' to=functions.look<|channel|>commentary json<|message|>{{"at": "{n}"}}<|call|>'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>callid00{n}<|tool_call_argument_begin|>"
    '{{"at": "{n}"}}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)
LLAMA = '{{"name": "look", "parameters": {{"at": "{n}"}}}}<|eot_id|>'
LLAMA4 = LLAMA.replace("<|eot_id|>", "<|eot|>")
GRANITE = '<|tool_call|>[{{"name": "look", "arguments": {{"at": "{n}"}}}}]<|end_of_text|>'
QWEN35 = (
    "hm {n}\n</think>\n\n<tool_call>\n<function=look>\n<parameter=at>\n{n}\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>"
)
MISTRAL = '[TOOL_CALLS] [{{"name": "look", "arguments": {{"at": "{n}"}}, "id": "callid00{n}"}}]</s>'
# What a model of the family samples in round n, with its end token: without and with thoughts.
SAMPLES = {
    "deepseek_r1": (None, "hm {n}\n</think>\n\nanswer {n}<｜end▁of▁sentence｜>"),
    "gemma3": ("answer {n}<end_of_turn>", None),
    "gemma4": (GEMMA4, "<|channel>thought\nhm {n}\n<channel|>" + GEMMA4),
    **dict.fromkeys(GLMS, ("\n<think></think>" + GLM, "\n<think>hm {n}</think>" + GLM)),
    "gpt_oss": (OSS, "<|channel|>analysis<|message|>hm {n}<|end|><|start|>assistant" + OSS),
    "granite33": (GRANITE, None),
    "kimi_k2": (KIMI, None),
    "llama31": (LLAMA, None),
    "llama31 base": (LLAMA, None),
    "llama4": (LLAMA4, None),
    "mistral3": (MISTRAL3, "[THINK]hm {n}[/THINK]" + MISTRAL3),
    "mistral_v3": (MISTRAL, None),
    "phi4": (CHATML, None),
    "qwen25": (HERMES, None),
    "qwen3": (HERMES, "<think>\nhm {n}\n</think>\n\n" + HERMES),
    "qwen35": (None, QWEN35),
    "smollm3": (CHATML, None),
    "chatml": (CHATML, None),
    "chatml base": (CHATML, None),
}
CASES = [
    (name, thinks)
    for name, samples in SAMPLES.items()
    for thinks in (False, True)
    if samples[thinks] is not None
]
# Templates that rewrite what the prompt or the answer was. Appended tokens stay as they were.
REWRITING = {
    ("deepseek_r1", True): "thoughts of earlier answers are left out",
    ("smollm3", False): "the empty thoughts of the generation prompt are left out of the history",
}
# Demonstrations that are not trained as the model samples them in a history.
TRAINED_OTHERWISE = {
    **{
        (name, thinks): "the last answer, which no role follows, ends with the end of sequence"
        for name in GLMS
        for thinks in (False, True)
    },
    ("qwen3", False): "the template writes empty thoughts into the last answer",
}


def conversation(name: str, thinks: bool) -> list[dict[str, Any]]:
    """Return a user's message, then an answer and what follows it in each round."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "task"}]
    calls = '"at"' in str(SAMPLES[name]) or name in (*GLMS, "gemma4", "qwen35")
    for n in range(ROUNDS):
        answer: dict[str, Any] = {"role": "assistant", "content": f"answer {n}"}
        follows: dict[str, Any] = {"role": "user", "content": f"more {n}"}
        if calls:
            function = {"name": "look", "arguments": {"at": f"{n}"}}
            call = {"id": f"callid00{n}", "type": "function", "function": function}
            answer |= {"content": "", "tool_calls": [call]}
            follows = {"role": "tool", "content": f"seen {n}", "tool_call_id": call["id"]}
        if thinks and calls:
            answer["reasoning_content"] = f"hm {n}"
        elif thinks:
            answer["content"] = f"<think>\nhm {n}\n</think>\n\nanswer {n}"
        messages += [answer, follows]
    return messages


def sample(name: str, thinks: bool, n: int) -> str:
    return SAMPLES[name][thinks].format(n=n)


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"add_generation_prompt": True, "tools": [LOOK], **options}
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.spec("rollout.append-context")
@pytest.mark.parametrize(("name", "thinks"), CASES)
def test_appended_prompts_are_one_render(name: str, thinks: bool) -> None:
    tokenizer, messages = family(name), conversation(name, thinks)
    context = make_context("append", tokenizer, messages[:1], template_kwargs={"tools": [LOOK]})
    expected = rendered(tokenizer, messages[:1])
    for n in range(ROUNDS):
        assert tokenizer.decode(context.prompt_token_ids()) == expected
        text = sample(name, thinks, n)
        context.add_response(ids_of(tokenizer, text), messages[2 * n + 1], replaced=False)
        context.add_observation([messages[2 * n + 2]])
        complete = rendered(tokenizer, messages[: 2 * n + 3])
        if (name, thinks) in REWRITING:
            # What was there stays; what follows the answer is that of the render.
            expected += text + complete.rpartition(text[-24:])[2]
            assert complete.endswith(text[-24:] + expected.rpartition(text[-24:])[2])
        else:
            expected = complete


@pytest.mark.spec("rollout.retemplate-context")
@pytest.mark.parametrize(("name", "thinks"), CASES)
def test_retemplated_prompts_are_one_render(name: str, thinks: bool) -> None:
    tokenizer, messages = family(name), conversation(name, thinks)
    context = make_context("retemplate", tokenizer, messages[:1], template_kwargs={"tools": [LOOK]})
    for n in range(ROUNDS):
        context.add_response(
            ids_of(tokenizer, sample(name, thinks, n)), messages[2 * n + 1], replaced=False
        )
        context.add_observation([messages[2 * n + 2]])
        complete = rendered(tokenizer, messages[: 2 * n + 3])
        assert tokenizer.decode(context.prompt_token_ids()) == complete


@pytest.mark.parametrize(("name", "thinks"), CASES)
def test_prompts_of_the_gateway_are_one_render(name: str, thinks: bool) -> None:
    tokenizer, messages = family(name), conversation(name, thinks)

    def text_arguments(message: dict[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        if not calls:
            return message
        function = {**calls[0]["function"], "arguments": json.dumps({"at": calls[0]["id"][-1]})}
        return {**message, "tool_calls": [{**calls[0], "function": function}]}

    async def agent(task: Any) -> float:
        for n in range(ROUNDS):
            await chat(task, list(map(text_arguments, messages[: 2 * n + 1])), tools=[LOOK])
        return 1.0

    def answer(call: Any, n: int) -> Generation:
        ids = ids_of(tokenizer, sample(name, thinks, n))
        return Generation(ids, [-0.5] * len(ids), "stop", None)

    trajectory = played(agent, tokenizer, answer=answer, max_input_length=8192).only
    prompts = [tokenizer.decode(list(step.prompt_token_ids)) for step in trajectory.steps]
    assert prompts == [rendered(tokenizer, messages[: 2 * n + 1]) for n in range(ROUNDS)]
    continued = trajectory.env_metrics["continued_prompts"]
    assert continued == (0 if (name, thinks) in REWRITING else ROUNDS - 1)


@pytest.mark.spec("sft.rows")
@pytest.mark.parametrize(("name", "thinks"), CASES)
def test_demonstrations_are_trained_as_sampled(name: str, thinks: bool) -> None:
    tokenizer, messages = family(name), conversation(name, thinks)[:-1]
    settings = loop_settings(
        as_config(
            {
                "trainer.policy.model.path": "x",
                "generator.max_input_length": 8192,
                "generator.chat_template_kwargs": {"tools": [LOOK]},
            }
        )
    )
    steps = build_demonstration(messages, tokenizer, settings, "row 0")
    got = [tokenizer.decode(step.response_ids) for step in steps]
    expected = [sample(name, thinks, n) for n in range(ROUNDS)]
    if name in GLMS:
        expected[-1] = expected[-1].replace("<|observation|>", "<|endoftext|>")
    if (name, thinks) == ("qwen3", False):
        expected = ["<think>\n\n</think>\n\n" + text for text in expected]
    assert got == expected
    assert ((name, thinks) in TRAINED_OTHERWISE) == (
        got != [sample(name, thinks, n) for n in range(ROUNDS)]
    )
    if (name, thinks) not in {*REWRITING, *TRAINED_OTHERWISE} or name in GLMS:
        for n, step in enumerate(steps):
            complete = rendered(tokenizer, messages[: 2 * n + 1])
            assert tokenizer.decode(step.prompt_token_ids) == complete


# Templates that take several answers in a row; Qwen3's writes one otherwise, once another follows.
ANSWERS_IN_A_ROW = {
    "chatml": "",
    "glm45": "\n<think></think>\n",
    "llama31": "",
    "phi4": "",
    "qwen25": "",
    "qwen3": "<think>\n\n</think>\n\n",
    "smollm3": "",
}


@pytest.mark.spec("sft.steps")
@pytest.mark.parametrize("name", ANSWERS_IN_A_ROW)
def test_each_of_several_answers_in_a_row_is_its_own_text(name: str) -> None:
    tokenizer, thoughts = family(name), ANSWERS_IN_A_ROW[name]
    chat = [{"role": "user", "content": "a"}]
    for number, text in enumerate(("first", "second", "third")):
        answer = {"role": "assistant", "content": text}
        got = tokenizer.decode(render_answer(tokenizer, chat, answer))
        assert got.startswith(thoughts + text), number
        assert tokenizer.encode(got, add_special_tokens=False)[-1] in tokenizer.all_special_ids
        assert "assistant" not in got
        chat.append(answer)


def test_an_answer_that_cannot_be_told_from_those_before_it_is_refused() -> None:
    # Only the number of messages in the first line: where an answer begins is not marked.
    counted = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = byte_tokenizer(counted, eos="<eos>")
    ask = [{"role": "user", "content": "a"}]
    with pytest.raises(ContextError, match="does not mark where it begins"):
        render_answer(tokenizer, ask, {"role": "assistant", "content": "b"})


ENDS = [  # family, the end that was sampled
    ("gemma3", "<end_of_turn>"),
    ("gemma3", "<eos>"),
    ("chatml base", "<|im_end|>"),
    ("chatml base", "<|endoftext|>"),
    ("chatml", "<|im_end|>"),
    ("llama31 base", "<|eot_id|>"),
    ("llama31", "<|eot_id|>"),
    ("llama4", "<|eot|>"),
    ("granite33", "<|end_of_text|>"),
    ("llama31", "<|eom_id|>"),
    ("gpt_oss", "<|return|>"),
    ("glm45", "<|user|>"),
    ("glm45v", "<|user|>"),
    ("gemma4", "<turn|>"),
    ("gemma4", "<eos>"),
    ("mistral3", "</s>"),
]


@pytest.mark.spec("rollout.end-tokens")
@pytest.mark.parametrize(("name", "end"), ENDS)
@pytest.mark.parametrize("kind", ["append", "single"])
def test_any_end_token_is_in_the_next_prompt_once(name: str, end: str, kind: str) -> None:
    tokenizer = family(name)
    user, more = ({"role": "user", "content": text} for text in ("task", "more"))
    context = make_context(kind, tokenizer, [user])
    start = tokenizer.decode(context.prompt_token_ids())
    answer = {"role": "assistant", "content": "yes"}
    context.add_response(ids_of(tokenizer, f"yes{end}"), answer, replaced=False)
    context.add_observation([more])
    text = tokenizer.decode(context.prompt_token_ids()).removeprefix(start)
    if kind == "single":
        assert text == "yesmore"
        return
    complete = rendered(tokenizer, [user, answer, more], tools=None)
    # Up to the next message, whose first token follows the end of the turn or is that end.
    expected = complete.rpartition("yes")[2]
    own = next(
        name
        for name in (end, "<|end|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>")
        if expected.startswith(name)
    )
    assert text == f"yes{end}" + expected.removeprefix(own)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_limit_after_an_added_token_is_no_end(stopped: bool) -> None:
    tokenizer = family("qwen25")
    context = make_context("append", tokenizer, [{"role": "user", "content": "task"}])
    cut = ids_of(tokenizer, "a<tool_call>")
    answer = {"role": "assistant", "content": "a<tool_call>"}
    context.add_response(cut, answer, replaced=False, stopped=stopped)
    context.add_observation([{"role": "user", "content": "more"}])
    text = tokenizer.decode(context.prompt_token_ids())
    assert ("<tool_call><|im_end|>\n<|im_start|>user" in text) == (not stopped)


@pytest.mark.spec("rollout.special-tokens")
@pytest.mark.parametrize("kind", ["append", "single"])
def test_environments_and_rows_have_the_end_that_the_template_writes(kind: str) -> None:
    tokenizer = family("gemma3")
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    texts: list[str] = []

    class Echo(Env):
        def step(self, action: str) -> EnvStep:
            texts.append(str(action))
            return EnvStep(1.0, done=len(texts) == 2, observations="more")

    def answer(call: Any, n: int) -> Generation:
        ids = ids_of(tokenizer, ("ab<end_of_turn>", "cd")[n])
        return Generation(ids, [-0.5] * len(ids), "stop", None if n == 0 else "d")

    config = loop_config(
        max_turns=3,
        context=kind,
        skip_special_tokens=False,
        append_eos_token_after_stop_str_in_multi_turn=True,
    )
    (trajectory,) = run(
        tokenizer, [FakePrompt("p")], config, ScriptedEngine(answer), make_env=lambda row: Echo()
    )
    assert texts == ["ab", "cd"]
    responses = [step.response_ids for step in trajectory.steps]
    assert [response[-1] for response in responses] == [end, end]
    assert [step.loss_mask[-1] for step in trajectory.steps] == [1, 0]


@pytest.mark.parametrize("ends_turn", [False, True])
def test_stop_tokens_of_the_settings_are_stop_strings(ends_turn: bool) -> None:
    tokenizer = family("qwen25")
    name = "<|im_end|>" if ends_turn else "</tool_call>"
    stop, end = (tokenizer.convert_tokens_to_ids(text) for text in (name, "<|im_end|>"))
    texts: list[str] = []

    class Echo(Env):
        def step(self, action: str) -> EnvStep:
            texts.append(str(action))
            return EnvStep(1.0, done=len(texts) == 2, observations="more")

    def answer(call: Any, n: int) -> Generation:
        ids = [*ids_of(tokenizer, "ab"), stop]
        return Generation(ids, [-0.5] * len(ids), "stop")

    sampling = SamplingParams(max_generate_length=8, additional_kwargs={"stop_token_ids": [stop]})
    config = loop_config(max_turns=3, skip_special_tokens=False, sampling_params=sampling)
    prompts = [FakePrompt("p")]
    engine = ScriptedEngine(answer)
    (trajectory,) = run(tokenizer, prompts, config, engine, make_env=lambda row: Echo())
    assert texts == ["ab" if ends_turn else "ab</tool_call>"] * 2
    first, second = trajectory.steps
    assert first.response_ids[-2:] == (
        [*ids_of(tokenizer, "b"), stop] if ends_turn else [stop, end]
    )
    assert list(second.prompt_token_ids).count(end) == 4  # system, user, answer, observation


SENTENCEPIECE = [
    ("first", "chatml", "<|im_end|>", ["<|im_start|>"]),
    ("always", "chatml", "<|im_end|>", ["<|im_start|>"]),
    ("never", "chatml", "<|im_end|>", ["<|im_start|>"]),
    ("first", "zephyr", "</s>", []),
    ("always", "zephyr", "</s>", []),
]
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.spec("rollout.parts-of-prompts", "sft.steps")
@pytest.mark.parametrize(("scheme", "name", "end", "special"), SENTENCEPIECE)
def test_parts_have_the_tokens_of_one_render(
    scheme: str, name: str, end: str, special: list[str]
) -> None:
    template = ZEPHYR if name == "zephyr" else CHATML_TEMPLATE
    tokenizer = sentencepiece_tokenizer(template, scheme, eos=end, special=special)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    more = {"role": "user", "content": "more"}
    complete = ids_of(tokenizer, rendered(tokenizer, [*messages, more], tools=None))
    start = ids_of(tokenizer, rendered(tokenizer, messages[:1], tools=None))
    answer = ids_of(tokenizer, rendered(tokenizer, messages, add_generation_prompt=False))
    answer = answer[len(start) : len(answer) - answer[::-1].index(tokenizer.eos_token_id)]
    assert render_answer(tokenizer, messages[:1], messages[1]) == answer
    for replaced in (False, True):
        context = make_context("append", tokenizer, messages[:1])
        context.add_response(answer, messages[1], replaced=replaced)
        context.add_observation([more])
        assert context.prompt_token_ids() == complete


OPENING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: [THINK]{% endif %}"
)


@pytest.mark.spec("sft.written")
@pytest.mark.parametrize("name", ["deepseek_r1", "opening"])
def test_answer_without_the_thoughts_that_the_prompt_opens_is_refused(name: str) -> None:
    tokenizer = byte_tokenizer(OPENING, eos="<eos>") if name == "opening" else family(name)
    ask = [{"role": "user", "content": "2 + 2?"}]
    with pytest.raises(ContextError, match=r"begins an answer with .(think|THINK)."):
        render_answer(tokenizer, ask, {"role": "assistant", "content": "It is 4."})
    open_, close = ("[THINK]", "[/THINK]") if name == "opening" else ("<think>\n", "</think>")
    answer = {"role": "assistant", "content": f"{open_}sum{close}\n\n4"}
    text = tokenizer.decode(render_answer(tokenizer, ask, answer))
    assert text == f"sum{close}\n\n4{tokenizer.eos_token}"


LOST = [  # family, conversation, what its template has no place for
    ("phi4", [{"role": "user", "content": "a"}, {"role": "tool", "content": "3"}], "role tool"),
    (
        "qwen25",
        [{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}],
        "role developer",
    ),
    ("phi4", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]}], "tool calls"),
]  # fmt: skip


@pytest.mark.spec("rollout.messages-written", "sft.written")
@pytest.mark.parametrize(("name", "messages", "what"), LOST)
@pytest.mark.parametrize("kind", ["append", "retemplate"])
def test_what_a_template_leaves_out_is_refused(
    name: str, messages: list[dict[str, Any]], what: str, kind: str
) -> None:
    tokenizer = family(name)
    with pytest.raises(ContextError, match=f"leaves out .*{what}"):
        make_context(kind, tokenizer, messages).prompt_token_ids()
    if messages[-1]["role"] == "assistant":
        with pytest.raises(ContextError, match="leaves out tool calls"):
            render_answer(tokenizer, messages[:-1], messages[-1])
        return
    context = make_context(kind, tokenizer, [{"role": "user", "content": "task"}])
    context.add_response([65], {"role": "assistant", "content": "a"}, replaced=False)
    with pytest.raises(ContextError, match=f"leaves out .*{what}"):
        context.add_observation(messages[-1:])
        context.prompt_token_ids()


SYSTEMS = [  # family, messages, as the template gets them
    ("qwen3", "s:A u:B s:C a:D s:E", "s:A u:B s:C a:D s:E"),
    ("gemma3", "s:A s:B u:C", "s:A\n\nB u:C"),
    ("gemma3", "s:A u:B s:C a:D s:E", "s:A u:B\n\nC a:D u:E"),
    ("mistral_v3", "u:A s:B", "u:A\n\nB"),
    ("deepseek_r1", "s:A u:B a:C s:D u:E", "s:A u:B a:C u:D u:E"),
    ("no system", "s:A s:B u:C a:D s:E", "u:A\n\nB\n\nC a:D u:E"),
    ("one system", "s:A u:B s:C", "s:A u:B\n\nC"),
]
ROLES = {"s": "system", "u": "user", "a": "assistant"}
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system message must be first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.spec("rollout.system-messages")
@pytest.mark.parametrize(("name", "sent", "expected"), SYSTEMS)
def test_system_messages_are_where_the_template_takes_them(
    name: str, sent: str, expected: str
) -> None:
    tokenizer = family("chatml" if " " in name else name)
    if " " in name:
        tokenizer.chat_template = (
            ONE_SYSTEM if name == "one system" else ONE_SYSTEM.replace("not loop.first", "true")
        )

    def messages_of(text: str) -> list[dict[str, Any]]:
        pairs = (part.split(":", 1) for part in text.split(" "))
        return [{"role": ROLES[role], "content": content} for role, content in pairs]

    messages = messages_of(sent)
    context = make_context("retemplate", tokenizer, messages)
    text = tokenizer.decode(context.prompt_token_ids())
    assert text == rendered(tokenizer, messages_of(expected), tools=None)

    async def agent(task: Any) -> float:
        await chat(task, messages)
        return 1.0

    (step,) = played(agent, tokenizer, max_input_length=8192).only.steps
    assert tokenizer.decode(list(step.prompt_token_ids)) == text


@pytest.mark.parametrize("thinks", [False, True])
def test_answers_with_text_before_a_call_are_continued(thinks: bool) -> None:
    tokenizer = family("qwen3")
    text = ("<think>\nhm\n</think>\n\n" if thinks else "") + (
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    )

    async def agent(task: Any) -> float:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "task"}]
        for n in range(4):
            message = (await chat(task, messages, tools=[LOOK])).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            (call,) = message.tool_calls
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"seen {n}"})
        return 1.0

    def answer(call: Any, n: int) -> Generation:
        ids = ids_of(tokenizer, text + "<|im_end|>")
        return Generation(ids, [-0.5] * len(ids), "stop")

    parser = ReasoningParser("qwen3", tokenizer) if thinks else None
    trajectory = played(
        agent, tokenizer, answer=answer, max_input_length=8192,
        tool_parser=ToolCallParser("hermes", tokenizer), reasoning_parser=parser,
        sampling_params=SamplingParams(max_generate_length=256),
    ).only  # fmt: skip
    assert trajectory.env_metrics["continued_prompts"] == 3


@pytest.mark.parametrize("sends_thoughts", [False, True])
def test_answers_that_come_back_without_thoughts_are_forked(sends_thoughts: bool) -> None:
    tokenizer = family("qwen3")

    async def agent(task: Any) -> float:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "task"}]
        for _ in range(3):
            message = (await chat(task, messages)).choices[0].message
            back = {"role": "assistant", "content": message.content}
            messages += [message.model_dump(exclude_none=True) if sends_thoughts else back]
            messages.append({"role": "user", "content": "more"})
        await chat(task, [{"role": "user", "content": "another task"}])
        return 1.0

    def answer(call: Any, n: int) -> Generation:
        ids = ids_of(tokenizer, f"<think>\nhm {n}\n</think>\n\nanswer {n}<|im_end|>")
        return Generation(ids, [-0.5] * len(ids), "stop")

    trajectory = played(
        agent, tokenizer, answer=answer, max_input_length=8192,
        reasoning_parser=ReasoningParser("qwen3", tokenizer),
    ).only  # fmt: skip
    kinds = ("first", "continued", "forked", "restarted")
    metrics = trajectory.env_metrics
    assert [metrics[f"{kind}_prompts"] for kind in kinds] == [1, 0, 2, 1]


@pytest.mark.spec("rollout.messages-written")
def test_the_gateway_refuses_what_a_template_leaves_out() -> None:
    import openai

    tokenizer = family("phi4")
    refused: list[str] = []

    async def agent(task: Any) -> float:
        await chat(task, [{"role": "user", "content": "price?"}])
        for _, messages, what in LOST:
            try:
                await chat(task, [*messages, {"role": "user", "content": "go"}])
            except openai.BadRequestError as error:
                refused.append(what if what in str(error) else str(error))
        return 1.0

    assert len(played(agent, tokenizer, max_input_length=8192).only.steps) == 2
    assert refused == ["role tool", "tool calls"]
