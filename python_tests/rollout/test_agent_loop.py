"""The agent loop, rule by rule (docs/spec.md, section 3), on a scripted engine."""

import asyncio

import pytest
from fake_envs import (
    CountingEnv,
    FakePrompt,
    FlakyEnv,
    ScriptedEngine,
    loop_config,
    prompt_with,
    register_fakes,
    run,
    says,
)

from bench._tokenizer import byte_level_tokenizer
from skyrl_fast.adapters.generator_output import generator_output_from_trajectories
from skyrl_fast.batch import StepBatch
from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout import agent_loop
from skyrl_fast.rollout.engine.protocol import Generation

register_fakes()


@pytest.fixture(autouse=True)
def forget() -> None:
    CountingEnv.closed.clear()
    FlakyEnv.failures.clear()


def test_a_turn_does_the_same_work_after_any_number_of_turns(
    tiny_tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    monkeypatch.setattr(agent_loop, "LONG_TEXT", 1_000)  # characters; 50 for each of 40 turns
    monkeypatch.setattr(asyncio, "to_thread", lambda call: threads.append(call))
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, f"a{n}"))
    config = loop_config(max_turns=40, n_samples_per_prompt=2, max_input_length=10_000)
    found = run(tiny_tokenizer, [prompt_with(turns=40)], config, engine)
    assert [len(one.steps) for one in found] == [40, 40]
    assert not threads


@pytest.mark.spec("output.gen-only", "rollout.env-step", "rollout.env-done")
def test_three_turns_give_three_gen_only_steps_without_retokenization(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, f"a{n}"))
    (t,) = run(tiny_tokenizer, [prompt_with(turns=3)], loop_config(max_turns=5), engine)
    end = tiny_tokenizer.eos_token_id
    assert [s.text for s in t.steps] == ["a0", "a1", "a2"]
    assert [s.response_ids for s in t.steps] == [
        [*tiny_tokenizer.encode(f"a{n}"), end] for n in range(3)
    ]
    # an engine may keep the lists that it gets
    assert [call.prompt_token_ids for call in engine.calls] == [
        list(s.prompt_token_ids) for s in t.steps
    ]
    assert [s.reward for s in t.steps] == [1.0, 2.0, 3.0]
    assert [s.observation for s in t.steps] == ["obs1", "obs2", ""]
    assert [s.loss_mask for s in t.steps] == [[1, 1, 1]] * 3
    assert [s.policy_version for s in t.steps] == [7, 7, 7]
    assert (t.stop_reason, t.failure, t.env_metrics["turns"]) == ("stop", None, 3)
    for before, after in zip(t.steps, t.steps[1:], strict=False):
        kept = before.prompt_token_ids + before.response_ids
        assert after.prompt_token_ids[: len(kept)] == kept
    # The tokens equal those of the chat template for the same conversation.
    assert tiny_tokenizer.decode(t.steps[1].prompt_token_ids) == tiny_tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "task"},
            {"role": "assistant", "content": "a0"},
            {"role": "user", "content": "obs1"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert CountingEnv.closed == [""]


@pytest.mark.spec("rollout.prompt-limit", "rollout.prompt-too-long")
@pytest.mark.parametrize("context", ["append", "retemplate", "single"])
def test_no_prompt_exceeds_the_limit_and_the_last_step_ends_with_length(
    tiny_tokenizer, context
) -> None:
    limit = 120
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "x" * 9))
    config = loop_config(max_turns=50, max_input_length=limit, context=context)
    (t,) = run(tiny_tokenizer, [prompt_with(observation="o" * 10)], config, engine)
    lengths = [len(s.prompt_token_ids) for s in t.steps]
    growth = lengths[1] - lengths[0]
    legal = 1 + (limit - lengths[0]) // growth  # every turn adds the same number of tokens
    assert len(t.steps) == legal == len(engine.calls)
    assert max(lengths) <= limit < max(lengths) + growth
    assert [s.stop_reason for s in t.steps] == ["stop"] * (legal - 1) + ["length"]
    assert t.stop_reason == "length"
    assert t.failure is None


@pytest.mark.spec("rollout.first-prompt-too-long", "rollout.failure-tolerance")
def test_first_prompt_too_long_gives_no_steps_and_a_masked_row(tiny_tokenizer, caplog) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    long = FakePrompt("long", messages=[{"role": "user", "content": "x" * 200}])
    fine = FakePrompt("fine", env_extras={"turns": 1})
    config = loop_config(max_input_length=100)
    got = run(tiny_tokenizer, [long, fine], config, engine)
    assert (got[0].steps, got[0].stop_reason, got[0].failure) == ([], "length", None)
    rows = generator_output_from_trajectories(got)
    assert rows["loss_masks"] == [[], [1, 1]]
    assert rows["rollout_metrics"]["generate/num_empty_trajectories"] == 1.0
    assert "first prompt of 1 trajectories is longer than max_input_length" in caplog.text
    assert caplog.text.count("a masked placeholder row: long") == 1
    assert rows["stop_reasons"][0] == "length"


@pytest.mark.spec("rollout.step-row")
@pytest.mark.parametrize("context", ["append", "retemplate"])
def test_appended_end_token_is_not_trained(tiny_tokenizer, context: str) -> None:
    end = tiny_tokenizer.eos_token_id
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "<q>", end=False, stop="<q>"))
    config = loop_config(max_turns=2, context=context)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=2)], config, engine)
    for step in t.steps:
        assert step.response_ids == [*tiny_tokenizer.encode("<q>"), end]
        assert step.loss_mask == [1, 1, 1, 0]
        assert step.rollout_logprobs == [-0.5, -0.5, -0.5, 0.0]
    text = tiny_tokenizer.decode(t.steps[1].prompt_token_ids)
    assert text.count("<|im_end|>") == 3  # user, answer, observation: no duplicate


def test_template_closes_the_turn_without_an_appended_end_token(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "<q>", end=False, stop="<q>"))
    config = loop_config(max_turns=2, append_eos_token_after_stop_str_in_multi_turn=False)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=2)], config, engine)
    assert t.steps[0].loss_mask == [1, 1, 1]
    assert "<q><|im_end|>\n<|im_start|>user\nobs1" in tiny_tokenizer.decode(
        t.steps[1].prompt_token_ids
    )


@pytest.mark.spec("rollout.single-context")
@pytest.mark.parametrize("max_turns", [2, 3])  # ended by the limit, ended by the environment
def test_single_conversation_appends_the_end_token_only_to_the_last_response(
    tiny_tokenizer, max_turns: int
) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "ab", end=False, stop="b"))
    config = loop_config(max_turns=max_turns, context="single")
    prompt = prompt_with(turns=2) if max_turns == 3 else prompt_with()
    (t,) = run(tiny_tokenizer, [prompt], config, engine)
    assert [s.loss_mask for s in t.steps] == [[1, 1], [1, 1, 0]]
    assert t.steps[1].rollout_logprobs == [-0.5, -0.5, 0.0]
    assert tiny_tokenizer.decode(t.steps[1].prompt_token_ids).endswith("assistant\nabobs1")


@pytest.mark.spec("rollout.end-token")
@pytest.mark.parametrize("context", ["append", "single"])
def test_no_end_token_is_appended_at_the_limit_or_to_a_truncated_response(
    tiny_tokenizer, context: str
) -> None:
    full = says(tiny_tokenizer, "<q>", end=False, stop="<q>")
    cut = Generation(full.token_ids, full.logprobs, "length", None)
    for answer, longest in ((full, 3), (cut, 4)):
        config = loop_config(
            context=context, sampling_params=SamplingParams(max_generate_length=longest)
        )
        engine = ScriptedEngine(lambda call, n, answer=answer: answer)
        (t,) = run(tiny_tokenizer, [prompt_with(turns=1)], config, engine)
        assert t.steps[0].loss_mask == [1, 1, 1]


@pytest.mark.spec("rollout.end-token-reward")
def test_the_reward_is_on_an_appended_end_token(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "<q>", end=False, stop="<q>"))
    got = run(tiny_tokenizer, [prompt_with(turns=1)], loop_config(), engine)
    batch = StepBatch.from_generator_output(generator_output_from_trajectories(got))
    assert batch.loss_mask.tolist() == [1, 1, 1, 0]
    assert batch.rewards.tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.spec("rollout.step-row")
@pytest.mark.parametrize("context", ["append", "retemplate", "single"])
def test_response_contains_only_sampled_tokens_for_any_observation(tiny_tokenizer, context) -> None:
    answers = [says(tiny_tokenizer, "ab"), says(tiny_tokenizer, "<q>", end=False, stop="<q>")]
    engine = ScriptedEngine(lambda call, n: answers[n % 2])
    config = loop_config(max_turns=4, max_input_length=4096, context=context)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=4, observation="o" * 300)], config, engine)
    for number, step in enumerate(t.steps):
        sampled = answers[number % 2].token_ids
        extra = len(step.response_ids) - len(sampled)
        assert step.response_ids[: len(sampled)] == sampled
        assert extra == step.loss_mask.count(0) <= 1
        assert len(step.loss_mask) == len(step.rollout_logprobs) == len(step.response_ids)


@pytest.mark.parametrize(
    ("sampled", "stop", "text"),
    [("<a>!!", "<a>", "<a>"), ("one. two..", ".", "one. two."), ("é..", ".", "é.")],
)
def test_text_after_the_stop_string_does_not_reach_the_environment(
    sampled: str, stop: str, text: str
) -> None:
    tokenizer = byte_level_tokenizer([(".", ".")])  # its last token may have two stop strings
    engine = ScriptedEngine(lambda call, n: says(tokenizer, sampled, end=False, stop=stop))
    (t,) = run(tokenizer, [prompt_with(turns=1)], loop_config(), engine)
    assert t.env_metrics["last_action"] == text
    assert t.steps[0].text == text


@pytest.mark.spec("rollout.max-turns", "rollout.reason-on-last-step")
def test_max_turns_is_recorded_on_the_last_step(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    (t,) = run(tiny_tokenizer, [prompt_with()], loop_config(max_turns=2), engine)
    assert [s.stop_reason for s in t.steps] == ["stop", "max_turns"]
    assert t.stop_reason == "max_turns"


@pytest.mark.spec("rollout.env-done", "rollout.max-turns")
@pytest.mark.parametrize("extras", [{"turns": 1}, {}])  # the environment is done, or the turns are
def test_truncated_response_is_recorded(tiny_tokenizer, extras: dict) -> None:
    cut = Generation([1, 2], [-1.0, -1.0], "length", None)
    engine = ScriptedEngine(lambda call, n: cut)
    (t,) = run(tiny_tokenizer, [prompt_with(**extras)], loop_config(), engine)
    assert (t.stop_reason, t.steps[0].stop_reason) == ("length", "length")


@pytest.mark.spec("rollout.postprocessed-action")
def test_retemplated_history_uses_messages_rewritten_by_the_environment(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "<think>long</think>short"))
    config = loop_config(max_turns=2, context="retemplate")
    (t,) = run(tiny_tokenizer, [prompt_with(turns=2, rewrite="short")], config, engine)
    second = tiny_tokenizer.decode(t.steps[1].prompt_token_ids)
    assert "assistant\nshort<|im_end|>" in second
    assert "think" not in second
    assert "think" in tiny_tokenizer.decode(t.steps[0].response_ids)  # trained as sampled


@pytest.mark.spec("rollout.reward-parts")
def test_parts_of_rewards_are_metrics_summed_over_the_turns(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, f"a{n}"))
    prompt = FakePrompt("parts", env_class="test_reward_parts:Parts")
    (t,) = run(tiny_tokenizer, [prompt], loop_config(max_turns=3), engine)
    assert [s.reward for s in t.steps] == [0.5, 0.5]
    assert t.env_metrics == {"format": 2.0, "length": 3.0}
