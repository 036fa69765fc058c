"""Contexts that a summary replaces (docs/spec.md, section 3), on a scripted engine."""

from collections.abc import Sequence
from typing import Any

import pytest
from fake_envs import (
    CountingEnv,
    FakePrompt,
    ScriptedEngine,
    loop_config,
    prompt_with,
    register_fakes,
    run,
    says,
)

from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.config.compaction import CompactionConfig
from skyrl_fast.rollout.chat_messages import with_text
from skyrl_fast.rollout.compaction import load_compaction_policy
from skyrl_fast.rollout.contexts import context_numbers, name_calls
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.trajectory import Step, Trajectory

register_fakes()

REQUEST = "sum up"
BUDGET = 100


@pytest.fixture(autouse=True)
def forget() -> None:
    CountingEnv.closed.clear()


def compact_config(*, compaction: dict[str, Any] | None = None, **changes: Any):
    settings = {"budget": BUDGET, "request": REQUEST} | (compaction or {})
    return loop_config(
        **{
            "context": "compact",
            "compaction": CompactionConfig(**settings),
            "max_turns": 6,
            "max_input_length": 400,
            **changes,
        }
    )


def answers(tokenizer: Any) -> ScriptedEngine:
    """Return an engine that says `facts <n>` where it is asked for a summary, else `a<n>`."""

    def answer(call: Any, number: int) -> Generation:
        asked = tokenizer.decode(call.prompt_token_ids).rstrip().endswith("assistant")
        text = tokenizer.decode(call.prompt_token_ids)
        is_summary = REQUEST in text and asked
        return says(tokenizer, f"facts {number}" if is_summary else f"a{number}")

    return ScriptedEngine(answer)


def rendered(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@pytest.mark.spec("compaction.replace", "compaction.request", "compaction.no-turn")
def test_a_context_over_its_budget_is_replaced_by_a_summary(tiny_tokenizer) -> None:
    engine = answers(tiny_tokenizer)
    config = compact_config(max_turns=4)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=4, observation="o" * 20)], config, engine)
    kinds = ["act", "act", "summarise", "act", "summarise", "act"]
    assert [step.kind for step in t.steps] == kinds
    assert [step.text for step in t.steps] == ["a0", "a1", "facts 2", "a3", "facts 4", "a5"]
    assert [step.parent for step in t.steps] == [None, 0, 1, None, 3, None]
    assert [step.number for step in t.steps] == [0, 1, 2, 3, 4, 5]
    assert context_numbers(t) == [0, 0, 0, 1, 1, 2]
    # A summary is no turn: the environment has seen four actions, and its rewards count those.
    assert [step.reward for step in t.steps] == [1.0, 2.0, 0.0, 3.0, 0.0, 4.0]
    assert t.stop_reason == "stop"
    observation = "o" * 20
    history = [
        {"role": "user", "content": "task"},
        {"role": "assistant", "content": "a0"},
        {"role": "user", "content": observation},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": f"{observation}\n\n{REQUEST}"},
    ]
    assert tiny_tokenizer.decode(t.steps[2].prompt_token_ids) == rendered(tiny_tokenizer, history)
    again = [
        {
            "role": "user",
            "content": "task\n\nSummary of the conversation so far:\nfacts 2",
        }
    ]
    assert tiny_tokenizer.decode(t.steps[3].prompt_token_ids) == rendered(tiny_tokenizer, again)
    # What was sampled is what is trained.
    for call, step in zip(engine.calls, t.steps, strict=True):
        assert call.prompt_token_ids == list(step.prompt_token_ids)
    assert len({call.seed for call in engine.calls}) == len(engine.calls)
    assert [step.state for step in t.steps] == ["task", *[observation] * 5]


@pytest.mark.spec("compaction.merge")
def test_rows_of_one_context_are_merged_with_its_summary(tiny_tokenizer) -> None:
    config = compact_config(max_turns=4)
    prompt = prompt_with(turns=4, observation="o" * 20)
    trajectories = run(tiny_tokenizer, [prompt], config, answers(tiny_tokenizer))
    merged = batch_from_trajectories(trajectories).merged()
    assert merged.num_rows == 3
    assert merged.is_last_step.tolist() == [False, False, True]
    trained = [sum(step.loss_mask) for step in trajectories[0].steps]
    counts = [int(row.sum()) for row in merged.loss_mask.split(merged.response_lengths.tolist())]
    assert counts == [sum(trained[:3]), sum(trained[3:5]), trained[5]]


@pytest.mark.spec("compaction.limit")
def test_the_last_context_grows_to_the_longest_prompt(tiny_tokenizer) -> None:
    config = compact_config(compaction={"max_summaries": 1}, max_turns=50, max_input_length=160)
    prompt = prompt_with(observation="o" * 20)
    (t,) = run(tiny_tokenizer, [prompt], config, answers(tiny_tokenizer))
    assert [step.kind for step in t.steps].count("summarise") == 1
    assert t.stop_reason == "length"
    assert max(len(step.prompt_token_ids) for step in t.steps) > BUDGET


@pytest.mark.spec("compaction.last-reward")
def test_a_summary_that_ends_the_trajectory_has_the_last_turns_reward(tiny_tokenizer) -> None:
    def answer(call: Any, number: int) -> Generation:
        is_summary = REQUEST in tiny_tokenizer.decode(call.prompt_token_ids)
        return says(tiny_tokenizer, "s" * 150 if is_summary else "a")

    config = compact_config(max_input_length=150, max_turns=9)
    prompt = prompt_with(observation="o" * 20)
    (t,) = run(tiny_tokenizer, [prompt], config, ScriptedEngine(answer))
    assert [step.kind for step in t.steps] == ["act", "act", "summarise"]
    assert [step.reward for step in t.steps] == [1.0, 0.0, 2.0]
    assert (t.outcome(), t.outcome(sums_rewards=True)) == (2.0, 3.0)
    assert (t.stop_reason, t.steps[-1].stop_reason) == ("length", "length")


def test_a_prompt_without_room_for_the_request_goes_on(tiny_tokenizer) -> None:
    config = compact_config(compaction={"request": "x" * 200}, max_input_length=160, max_turns=3)
    prompt = prompt_with(turns=3, observation="o" * 20)
    (t,) = run(tiny_tokenizer, [prompt], config, answers(tiny_tokenizer))
    assert [step.kind for step in t.steps] == ["act"] * 3


@pytest.mark.spec("compaction.thoughts")
def test_thoughts_of_a_summary_and_control_tokens_stay_behind(tiny_tokenizer) -> None:
    end = tiny_tokenizer.eos_token

    def answer(call: Any, number: int) -> Generation:
        is_summary = REQUEST in tiny_tokenizer.decode(call.prompt_token_ids)
        return says(tiny_tokenizer, f"<think>hm</think>key 7{end}" if is_summary else "a")

    prompt = prompt_with(turns=3, observation="o" * 20)
    (t,) = run(tiny_tokenizer, [prompt], compact_config(), ScriptedEngine(answer))
    text = tiny_tokenizer.decode(t.steps[-1].prompt_token_ids)
    assert "key 7" in text
    assert "hm" not in text


def keep_the_last(messages: Sequence[dict[str, Any]], num_tokens: int) -> Any:
    """Begin again with the first message and the last exchange."""
    if num_tokens <= BUDGET:
        return None
    return [messages[0], *messages[-2:]]


async def ask_late(messages: Sequence[dict[str, Any]], num_tokens: int) -> Any:
    return f"{REQUEST}: {len(messages)}" if len(messages) == 5 else None


def returns_a_number(messages: Sequence[dict[str, Any]], num_tokens: int) -> Any:
    return 7


def raises(messages: Sequence[dict[str, Any]], num_tokens: int) -> Any:
    messages.clear()  # its own copy
    raise KeyError("lost")


def by_function(function: Any) -> dict[str, str]:
    return {"policy": f"{__file__}:{function.__name__}"}


@pytest.mark.spec("compaction.function")
def test_a_function_may_keep_messages_without_a_call(tiny_tokenizer) -> None:
    config = compact_config(compaction=by_function(keep_the_last), max_turns=5)
    prompt = prompt_with(turns=5, observation="o" * 20)
    (t,) = run(tiny_tokenizer, [prompt], config, answers(tiny_tokenizer))
    assert [step.kind for step in t.steps] == ["act"] * 5
    assert context_numbers(t) == [0, 0, 1, 2, 3]
    messages = [
        {"role": "user", "content": "task"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "o" * 20},
    ]
    assert tiny_tokenizer.decode(t.steps[2].prompt_token_ids) == rendered(tiny_tokenizer, messages)


@pytest.mark.spec("compaction.function")
def test_a_coroutine_may_ask_for_a_summary(tiny_tokenizer) -> None:
    config = compact_config(compaction=by_function(ask_late), max_turns=4)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=4)], config, answers(tiny_tokenizer))
    assert [step.kind for step in t.steps] == ["act", "act", "summarise", "act", "act"]
    assert f"{REQUEST}: 5" in tiny_tokenizer.decode(t.steps[2].prompt_token_ids)


@pytest.mark.parametrize(
    ("function", "words"),
    [(returns_a_number, "messages or None, got 7"), (raises, "KeyError: 'lost'")],
)
def test_a_function_that_fails_is_named(tiny_tokenizer, function: Any, words: str) -> None:
    config = compact_config(compaction=by_function(function), max_turns=4, max_retries=0)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=4)], config, answers(tiny_tokenizer))
    assert t.failure is not None
    assert t.failure.startswith("generator.compaction.policy: ")
    assert words in t.failure


def test_a_missing_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r"generator\.compaction\.policy"):
        load_compaction_policy("nowhere_at_all:function")
    with pytest.raises(ValueError, match="expected a function"):
        load_compaction_policy(f"{__file__}:BUDGET")
    assert load_compaction_policy(None) is None


def test_a_text_is_added_to_the_users_message_or_becomes_one() -> None:
    assert with_text([], "b") == [{"role": "user", "content": "b"}]
    tool = {"role": "tool", "content": "5"}
    assert with_text([tool], "b") == [tool, {"role": "user", "content": "b"}]
    assert with_text([{"role": "user", "content": "a"}], "b") == [
        {"role": "user", "content": "a\n\nb"}
    ]


def test_rollouts_of_many_samples_count_once_each(tiny_tokenizer) -> None:
    config = compact_config(max_turns=4, n_samples_per_prompt=3)
    prompts = [FakePrompt(name, env_extras={"turns": 4, "observation": "o" * 20}) for name in "ab"]
    found = run(tiny_tokenizer, prompts, config, answers(tiny_tokenizer))
    batch = batch_from_trajectories(found)
    assert int(batch.is_last_step.sum()) == len(found) == 6
    assert batch.num_rows == 6 * len(found)


# An agent's calls at the gateway: each is (text of the prompt, answer, parent).


def agent_calls(calls: Sequence[tuple[str, str, int | None]]) -> Trajectory:
    """Return a trajectory of an agent whose tokens are characters."""
    steps = []
    for number, (prompt, text, parent) in enumerate(calls):
        steps.append(
            Step(
                prompt_token_ids=[ord(character) for character in prompt],
                response_ids=[ord(character) for character in text],
                loss_mask=[1] * len(text),
                rollout_logprobs=[-0.5] * len(text),
                reward=0.0,
                stop_reason="stop",
                policy_version=0,
                text=text,
                observation="",
                llm_seconds=0.0,
                env_seconds=0.0,
                number=number,
                parent=parent,
                state=prompt if parent is None else "",
            )
        )
    return Trajectory("p", 0, steps)


def characters(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


SUMMARY = "the key is under the third stone by the well"
ACTS = ("look around the garden", "lift all of the stones", "go down into the well")
THOUGHT = "<think>which of them is the best one?</think>"
PLAN = "first the garden, then the well"
CONVERSATION = [f"task|{ACTS[0]}|stones", f"task|{ACTS[0]}|stones|{ACTS[1]}|a key"]
LEAVE = "take the key and leave"
TITLE = "lift the heavy stones"


@pytest.mark.spec("compaction.agents", "compaction.other-calls")
@pytest.mark.parametrize(
    ("calls", "contexts", "kinds"),
    [
        pytest.param(
            [
                ("task", "look around the garden", None),
                ("task|look around|stones", "lift the stones", 0),
                ("task|look around|stones|lift|sum up", f"<analysis>x</analysis>{SUMMARY}", 1),
                (f"task, continued: {SUMMARY}", "go to the well now", None),
                (f"task, continued: {SUMMARY}|go|here", "take the key and leave", 3),
            ],
            [0, 0, 0, 1, 1],
            ["act", "act", "summarise", "act", "act"],
            id="a client that compacts",
        ),
        pytest.param(
            [
                ("task", "look around the garden", None),
                ("task|look|stones", "lift all of the stones", 0),
                ("history: look around the garden, lift: sum up", SUMMARY, None),
                (f"{SUMMARY}|go on", "go to the well now", None),
            ],
            [0, 0, 1, 2],
            ["act", "act", "summarise", "act"],
            id="a summary of the history as a text",
        ),
        pytest.param(
            [
                ("task", ACTS[0], None),
                (CONVERSATION[0], ACTS[1], 0),
                (CONVERSATION[1], ACTS[2], 1),
                (f"{CONVERSATION[1]}|sum up", SUMMARY, 1),
                (f"task, continued: {SUMMARY}|{ACTS[2]}|dark", LEAVE, None),
            ],
            [0, 0, 0, 0, 1],
            ["act", "act", "act", "summarise", "act"],
            id="the last answer stays",
        ),
        pytest.param(
            [
                ("task", ACTS[0], None),
                (f"{CONVERSATION[0]}|sum up", SUMMARY, 0),
                (CONVERSATION[0], ACTS[1], 0),
                (CONVERSATION[1], ACTS[2], 2),
                (f"task, continued: {SUMMARY}|{ACTS[1]}|a key|{ACTS[2]}|dark", LEAVE, None),
            ],
            [0, 0, 0, 0, 1],
            ["act", "summarise", "act", "act", "act"],
            id="a summary in advance",
        ),
        pytest.param(
            [
                ("tools|task", ACTS[0], None),
                (f"tools|{CONVERSATION[0]}", ACTS[1], 0),
                (f"{CONVERSATION[1]}|sum up", SUMMARY, None),
                (f"tools|task|summary: {SUMMARY}", LEAVE, None),
            ],
            [0, 0, 1, 2],
            ["act", "act", "summarise", "act"],
            id="a summary of the whole history without tools",
        ),
        pytest.param(
            [
                ("task", ACTS[0], None),
                (f"task|{ACTS[0]}|sum up", SUMMARY, 0),
                (f"task, continued: {SUMMARY}", ACTS[1], None),
                (f"task, continued: {SUMMARY}|{ACTS[1]}|sum up", SUMMARY, 2),
                (f"task, continued: {SUMMARY}", LEAVE, None),
            ],
            [0, 0, 1, 1, 2],
            ["act", "summarise", "act", "summarise", "act"],
            id="the same summary twice",
        ),
        pytest.param(
            [
                ("task", ACTS[0], None),
                (f"task|{ACTS[0]}|sum up", SUMMARY, 0),
                (f"task, continued: {SUMMARY}", ACTS[1], None),
                (f"task, continued: {SUMMARY}|{ACTS[1]}|sum up", ACTS[2], 2),
                (f"task, continued: {SUMMARY}, then {ACTS[2]}", LEAVE, None),
            ],
            [0, 0, 1, 1, 2],
            ["act", "summarise", "act", "summarise", "act"],
            id="one summary after the other",
        ),
        pytest.param(
            [
                ("task", THOUGHT + ACTS[0], None),
                (f"task|{THOUGHT}{ACTS[0]}|stones", THOUGHT + ACTS[1], 0),
                (f"{CONVERSATION[1]}|the user: go on", ACTS[2], None),
            ],
            [0, 0, 1],
            ["act", "act", "act"],
            id="thoughts that are dropped",
        ),
        pytest.param(
            [
                ("plan the task", PLAN, None),
                (f"{PLAN}|task", ACTS[0], None),
                (f"{PLAN}|{CONVERSATION[0]}|sum up", SUMMARY, 1),
                (f"{PLAN}|task, continued: {SUMMARY}", LEAVE, None),
            ],
            [0, 1, 1, 2],
            ["act", "act", "summarise", "act"],
            id="a plan in each context",
        ),
        pytest.param(
            [
                (f"name this conversation: {TITLE}", TITLE, None),
                (TITLE, ACTS[0], None),
                (f"{TITLE}|{ACTS[0]}|stones", ACTS[1], 1),
            ],
            [0, 1, 1],
            ["other", "act", "act"],
            id="a title that repeats the task",
        ),
        pytest.param(
            [
                ("name this conversation", "A walk in the garden", None),
                ("task", "look around the garden", None),
                ("task|look|stones", "lift all of the stones", 1),
            ],
            [0, 1, 1],
            ["other", "act", "act"],
            id="a title",
        ),
        pytest.param(
            [
                ("task", "ask a helper about stones", None),
                ("helper: which stone?", "It is the third stone of all", None),
                ("task|ask|the helper says: It is the third stone of all", "lift it", 0),
            ],
            [0, 1, 0],
            ["act", "act", "act"],
            id="a sub-agent",
        ),
        pytest.param(
            [
                ("task", "look around the garden", None),
                ("task|look around the garden|stones", "lift all of the stones", 0),
                ("task|lift all", "go to the well now", 1),
            ],
            [0, 0, 1],
            ["act", "act", "act"],
            id="dropped history",
        ),
    ],
)
def test_contexts_and_calls_of_agents_are_named(calls, contexts, kinds) -> None:
    trajectory = agent_calls(calls)
    name_calls(trajectory, characters)
    if calls[2][2] == 0 and kinds[1] == "act" and contexts == [0, 1, 0]:
        # The helper's answer is shown by what the environment said next.
        trajectory.steps[2].state = calls[2][0]
        for step in trajectory.steps:
            step.kind = "act"
        name_calls(trajectory, characters)
    assert context_numbers(trajectory) == contexts
    assert [step.kind for step in trajectory.steps] == kinds


@pytest.mark.spec("compaction.agents")
def test_a_call_whose_tool_had_a_result_is_no_summary() -> None:
    calls = [
        ("task", ACTS[0], None),
        (CONVERSATION[0], ACTS[1], 0),
        (CONVERSATION[1], ACTS[2], 1),
        (f"task|{ACTS[2]}|dark", LEAVE, None),  # older exchanges are dropped
    ]
    trajectory = agent_calls(calls)
    name_calls(trajectory, characters, acted={0, 1, 2})
    assert context_numbers(trajectory) == [0, 0, 0, 1]
    assert {step.kind for step in trajectory.steps} == {"act"}
    # Of texts alone, an answer with which a context begins in place of others is a summary.
    name_calls(trajectory, characters)
    assert [step.kind for step in trajectory.steps] == ["act", "act", "summarise", "act"]


def test_one_conversation_is_one_context_of_acts() -> None:
    trajectory = agent_calls([("t", "a" * 20, None), ("t|aaa|o", "b" * 20, 0)])
    name_calls(trajectory, characters)
    assert context_numbers(trajectory) == [0, 0]
    assert {step.kind for step in trajectory.steps} == {"act"}
    assert context_numbers(Trajectory("p", 0)) == []


@pytest.mark.spec("compaction.contexts-of-policies")
def test_calls_of_a_policy_continue_its_own_context_over_those_of_others() -> None:
    trajectory = agent_calls(
        [
            ("task", "white opens", None),
            ("task|white opens", "black answers", 0),
            ("task|white opens|black answers", "white goes on", 1),
            ("task|white opens|black answers|white goes on", "black resigns", 2),
            ("summary", "white writes the moves down", None),
        ]
    )
    white = Trajectory("p", 0, trajectory.steps[::2])
    black = Trajectory("p", 0, trajectory.steps[1::2])
    assert context_numbers(trajectory) == [0, 0, 0, 0, 1]
    assert context_numbers(white) == [0, 0, 1]
    assert context_numbers(black) == [0, 0]
