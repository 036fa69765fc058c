"""Whatever an agent does to its history: every sampled token is in one step, once, unaltered."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from _gateway import MODEL, USER, chat, played
from fake_envs import says
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._tokenizer import byte_level_tokenizer
from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.chat_template import BREAK, ChatTemplate, Message
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.trajectory import Trajectory

pytest.importorskip("pydantic")

from skyrl_fast.gateway.messages import Call
from skyrl_fast.gateway.policy import ServedPolicy
from skyrl_fast.gateway.prompt_ids import PromptIds
from skyrl_fast.gateway.session import Session

FRAGMENTS = [
    *(
        "a",
        "b",
        "c",
        "ab",
        "abc",
        "aa",
        " ",
        "  ",
        "\n",
        "\t",
        "é",
        "\u4e2d",
        "\U0001f600",
        "\ufffd",
    ),
    *("<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<|", "|>", "<", "im_end|>", "assistant\n"),
    *(BREAK, "<|im_start|>assistant\nab<|im_end|>"),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)
roles = st.sampled_from(["user", "assistant", "tool", "system"])
places = st.integers(0, 30)
operations = st.one_of(
    st.tuples(st.just("call"), st.just(0), st.just("")),
    st.tuples(st.just("call"), st.just(0), st.just("")),
    st.tuples(st.just("twice"), st.just(0), st.just("")),
    st.tuples(st.just("add"), roles, texts),
    st.tuples(st.just("drop"), places, st.just("")),
    st.tuples(st.just("swap"), places, st.just("")),
    st.tuples(st.just("repeat"), places, st.just("")),
    st.tuples(st.just("edit"), places, texts),
    st.tuples(st.just("strip"), places, st.just("")),
    st.tuples(st.just("restart"), st.just(0), texts),
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Bytes and a few merges, so that most texts have several spellings in tokens."""
    space = "\u0120"
    merges = [("a", "b"), ("ab", "c"), ("a", "a"), (space, space), (space, "a")]
    return byte_level_tokenizer(merges, use_regex=False)


class RandomModel:
    """Samples the tokens that it is given, one answer after the other."""

    def __init__(self, answers: Iterator[list[int]]) -> None:
        self._answers = answers
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def generate(self, prompt: Any, sampling: Any, **_: Any) -> Generation:
        ids = next(self._answers)
        self.sampled.append((tuple(prompt), tuple(ids)))
        return Generation(ids, [-0.1 * (n + 1) for n in range(len(ids))], "stop")


async def act(session: Session, history: list[dict[str, str]], operation: Any) -> None:
    """Do one thing to the history, or call the model with it."""
    what, place, text = operation
    index = place % len(history) if isinstance(place, int) and history else None
    if what in ("call", "twice"):
        messages = history or [{"role": "user", "content": "a"}]
        calls = [
            await answer(session, [dict(m) for m in messages], number)
            for number in range(1 if what == "call" else 2)
        ]
        history[:] = [*messages, {"role": "assistant", "content": calls[-1]}]
    elif what == "add":
        history.append({"role": place, "content": text})
    elif what == "restart":
        history[:] = [{"role": "user", "content": text}]
    elif index is None:
        return
    elif what == "drop":
        del history[index]
    elif what == "swap":
        history.insert(0, history.pop(index))
    elif what == "repeat":
        history.append(dict(history[index]))
    elif what == "edit":
        history[index]["content"] += text
    elif what == "strip":
        history[index]["content"] = history[index]["content"].strip()


BODIES = itertools.count()  # a body that was sent before would be a repeated call


async def answer(session: Session, messages: list[dict[str, str]], number: int) -> str:
    call = Call(model=MODEL, messages=messages)
    prompt = await session.prompt(call)
    body = f"{next(BODIES)}".encode()
    running = session.start(call, prompt, "/", body, is_retry=False, span=None)
    with session.waiting(running, 10.0):
        await running.task
        return session.deliver(running).choices[0].text


def session_of(tokenizer: Any, model: Any) -> Session:
    from skyrl_fast.config import GeneratorConfig

    config = GeneratorConfig(
        max_input_length=100_000,
        max_turns=10_000,
        context="append",
        sampling_params=SamplingParams(max_generate_length=64),
    )
    board = ActivityBoard()
    template = ChatTemplate(tokenizer, max_length=100_000)
    policy = ServedPolicy(
        PolicyCalls(model, WeightGate(), tokenizer, 0), config, template, board, MODEL
    )
    trajectory = Trajectory("p", 0, [], "stop", "agent", {}, 0.0)
    return Session(policy, trajectory, board.enter("p", 0), policy_version=0)


def check_history(tokenizer: Any, answers: list[list[int]], done: list[Any]) -> None:
    model = RandomModel(iter(answers + [[0]] * len(done) * 2))
    names = tokenizer.all_special_ids

    async def go() -> Session:
        session = session_of(tokenizer, model)
        history: list[dict[str, str]] = []
        for operation in done:
            await act(session, history, operation)
        return session

    session = asyncio.run(go())
    steps = session.trajectory.steps
    assert Counter(
        (tuple(s.prompt_token_ids), tuple(s.response_ids[: sum(s.loss_mask)])) for s in steps
    ) == Counter(model.sampled)
    assert all(
        s.rollout_logprobs[: sum(s.loss_mask)] == [-0.1 * (n + 1) for n in range(sum(s.loss_mask))]
        for s in steps
    )
    inner = any(set(ids[:-1]) & set(names) for _, ids in model.sampled)
    if not inner:  # then a special token in a prompt is the template's
        for step in steps:
            text = tokenizer.decode(step.prompt_token_ids)
            pieces = [t for t in step.prompt_token_ids if t in names]
            assert pieces[-1] == tokenizer.convert_tokens_to_ids("<|im_start|>")
            turns = pieces[:-1]
            start, end = pieces[-1], tokenizer.eos_token_id
            assert turns == [start, end] * (len(turns) // 2)
            assert text.endswith("<|im_start|>assistant\n")


tokens = st.integers(0, 263)  # with the special ones
answers_of = st.lists(
    st.tuples(st.lists(tokens, min_size=1, max_size=8), st.booleans()), max_size=12
)


def as_ids(answers: list[tuple[list[int], bool]], end: int) -> list[list[int]]:
    return [[*ids, end] if ended else ids for ids, ended in answers]


@pytest.mark.spec("gateway.step-per-call")
@given(answers=answers_of, done=st.lists(operations, max_size=14))
def test_every_sampled_token_is_in_one_step(tokenizer: Any, answers: Any, done: Any) -> None:
    check_history(tokenizer, as_ids(answers, tokenizer.eos_token_id), done)


@pytest.mark.slow
@given(answers=answers_of, done=st.lists(operations, max_size=40))
@settings(max_examples=10_000)
def test_every_sampled_token_is_in_one_step_of_ten_thousand_histories(
    tokenizer: Any, answers: Any, done: Any
) -> None:
    check_history(tokenizer, as_ids(answers, tokenizer.eos_token_id), done)


@pytest.mark.spec("gateway.continuity")
@given(answers=answers_of, said=st.lists(texts, min_size=12, max_size=12))
def test_a_conversation_that_only_grows_is_continued_token_by_token(
    tokenizer: Any, answers: Any, said: list[str]
) -> None:
    """With any spelling of the answers, also bytes that are no text."""
    special = set(tokenizer.all_special_ids)
    plain = [[t for t in ids if t not in special] or [0] for ids, _ in answers]
    model = RandomModel(iter([[*ids, tokenizer.eos_token_id] for ids in plain]))

    async def go() -> Session:
        session = session_of(tokenizer, model)
        history: list[dict[str, str]] = []
        for text in said[: len(plain)]:
            history.append({"role": "user", "content": text})
            await act(session, history, ("call", 0, ""))
        return session

    session = asyncio.run(go())
    steps = session.trajectory.steps
    for before, after in itertools.pairwise(steps):
        together = before.prompt_token_ids + before.response_ids
        assert after.prompt_token_ids[: len(together)] == together
    assert session.counts["continued_prompts"] == max(0, len(steps) - 1)


@given(said=st.lists(st.tuples(roles, texts), min_size=1, max_size=6))
def test_a_first_prompt_has_the_templates_tokens(tokenizer: Any, said: Any) -> None:
    messages = [{"role": role, "content": text} for role, text in said]
    if any(part in text for _, text in said for part in ("<", "|>", "im_end", "end|", BREAK)):
        return  # names of special tokens, and parts of them

    async def go() -> list[int]:
        session = session_of(tokenizer, RandomModel(iter([])))
        return (await session.prompt(Call(model=MODEL, messages=messages))).token_ids

    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert asyncio.run(go()) == expected


@given(prompts=st.lists(texts, min_size=1, max_size=8))
def test_text_prompts_have_the_tokenizers_tokens(tokenizer: Any, prompts: list[str]) -> None:
    """Whatever beginnings they share."""
    prompts = [
        text.replace(BREAK, "a") for text in [*prompts, prompts[0] + "<|im_end|>", prompts[0] + "a"]
    ]

    async def go() -> list[list[int]]:
        session = session_of(tokenizer, RandomModel(iter([])))
        calls = [Call(model=MODEL, prompt=text) for text in prompts if text]
        return [(await session.prompt(call)).token_ids for call in calls]

    assert asyncio.run(go()) == [tokenizer.encode(text) for text in prompts if text]


async def test_a_text_that_continues_within_a_word(tokenizer: Any) -> None:
    prompts = ["<|im_start|>a<|im_end|>", "<|im_start|>aa<|im_end|>"]

    session = session_of(tokenizer, RandomModel(iter([])))
    assert [(await session.prompt(Call(model=MODEL, prompt=t))).token_ids for t in prompts] == [
        tokenizer.encode(text) for text in prompts
    ]


def test_a_conversation_that_grows_is_one_list_of_ids(tokenizer: Any) -> None:
    """A prompt takes the list of the one before it, unless that may still be read."""
    prompts = PromptIds(ChatTemplate(tokenizer, max_length=100_000))
    chat: list[Message] = [{"role": "user", "content": "first"}]
    first = prompts.chat(chat, None, {})
    other = prompts.chat(chat, None, {})  # in parallel: nothing was released
    assert other.token_ids == first.token_ids
    assert other.token_ids is not first.token_ids
    lists, texts = [other.token_ids], []
    previous = other
    for turn in range(3):
        prompts.add_response(previous, tokenizer.encode(f"answer {turn}"))
        prompts.release(previous)
        chat += [
            {"role": "assistant", "content": f"answer {turn}"},
            {"role": "user", "content": f"and {turn}"},
        ]
        previous = prompts.chat(chat, None, {})
        lists.append(previous.token_ids)
        texts.append(tokenizer.decode(previous.token_ids))
        assert list(previous.kept) == previous.token_ids
        assert texts[-1] == ChatTemplate(tokenizer).text(chat)
    assert all(one is lists[0] for one in lists)
    shorter = prompts.chat(chat[:3], None, {})  # a fork while the last call runs
    assert shorter.token_ids is not lists[0]
    assert tokenizer.decode(previous.token_ids) == texts[-1]
    assert tokenizer.decode(shorter.token_ids) == texts[0]


def test_a_later_answer_that_came_back_changed_is_a_fork(tiny_tokenizer: Any) -> None:
    async def agent(task: Any) -> float:
        messages = [USER]
        for turn in range(5):
            text = (await chat(task, messages)).choices[0].message.content
            text = text if turn == 0 else text.strip()
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go"}]
        return 1.0

    out = played(agent, tiny_tokenizer, answer=lambda call, n: says(tiny_tokenizer, f" answer {n}"))
    metrics = out.only.env_metrics
    assert [metrics[f"{kind}_prompts"] for kind in ("first", "continued", "forked")] == [1, 1, 3]
