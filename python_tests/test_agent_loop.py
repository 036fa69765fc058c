"""The agent loop, rule by rule (docs/spec.md, section 3), on a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from fake_envs import Call, CountingEnv, FakePrompt, FlakyEnv, ScriptedEngine, register_fakes

from skyrl_fast.generator_output import generator_output_from_trajectories
from skyrl_fast.rollout.agent_loop import RolloutConfig, RolloutError, rollout
from skyrl_fast.rollout.engine import EngineDeadError, EngineError, Generation, SamplingParams
from skyrl_fast.rollout.env import EnvConfig, EnvFactory
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.rollout.turn import request_seed

register_fakes()


@pytest.fixture(autouse=True)
def forget() -> None:
    CountingEnv.closed.clear()
    FlakyEnv.failures.clear()


def says(tokenizer, text: str, *, end: bool = True, stop: str | None = None) -> Generation:
    ids = tokenizer.encode(text) + ([tokenizer.eos_token_id] if end else [])
    return Generation(ids, [-0.5] * len(ids), "stop", stop)


def run(
    tokenizer,
    prompts: list[FakePrompt],
    config: RolloutConfig,
    engine: ScriptedEngine,
    *,
    phase: str = "train",
    timeout: float = 20.0,
    workers: int = 8,
    seed: int = 1,
    policy_version: int = 7,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    async def go() -> list[Trajectory]:
        factory = EnvFactory(EnvConfig(timeout_seconds=timeout, max_env_workers=workers))
        try:
            return await rollout(
                prompts,
                engine,
                tokenizer,
                factory,
                config,
                phase=phase,
                policy_version=policy_version,
                seed=seed,
                on_trajectory=on_trajectory,
            )
        finally:
            await factory.close()

    return asyncio.run(go())


def prompt_with(**extras) -> FakePrompt:
    return FakePrompt("p", env_extras=extras)


# --- one trajectory ----------------------------------------------------------------------------


@pytest.mark.spec("1.3", "3.1", "3.5", "3.6")
def test_three_turns_give_three_gen_only_steps_and_token_in_token_out(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, f"a{n}"))
    (t,) = run(tiny_tokenizer, [prompt_with(turns=3)], RolloutConfig(max_turns=5), engine)
    end = tiny_tokenizer.eos_token_id
    assert [s.text for s in t.steps] == ["a0", "a1", "a2"]
    assert [s.response_ids for s in t.steps] == [
        [*tiny_tokenizer.encode(f"a{n}"), end] for n in range(3)
    ]
    assert [s.reward for s in t.steps] == [1.0, 2.0, 3.0]
    assert [s.observation for s in t.steps] == ["obs1", "obs2", ""]
    assert [s.loss_mask for s in t.steps] == [[1, 1, 1]] * 3
    assert [s.policy_version for s in t.steps] == [7, 7, 7]
    assert (t.stop_reason, t.failure, t.env_metrics["turns"]) == ("stop", None, 3)
    for before, after in zip(t.steps, t.steps[1:], strict=False):
        kept = before.prompt_token_ids + before.response_ids
        assert after.prompt_token_ids[: len(kept)] == kept
    # The whole equals what the chat template makes of the same conversation.
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


@pytest.mark.spec("3.2", "3.8")
@pytest.mark.parametrize("context", ["append", "retemplate", "single"])
def test_no_prompt_exceeds_the_limit_and_the_last_step_says_length(tiny_tokenizer, context) -> None:
    limit = 120
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "x" * 9))
    config = RolloutConfig(max_turns=50, max_input_length=limit, context=context)
    (t,) = run(tiny_tokenizer, [prompt_with(observation="o" * 10)], config, engine)
    lengths = [len(s.prompt_token_ids) for s in t.steps]
    growth = lengths[1] - lengths[0]
    legal = 1 + (limit - lengths[0]) // growth  # every turn adds the same number of tokens
    assert len(t.steps) == legal == len(engine.calls)
    assert max(lengths) <= limit < max(lengths) + growth
    assert [s.stop_reason for s in t.steps] == ["stop"] * (legal - 1) + ["length"]
    assert t.stop_reason == "length"
    assert t.failure is None


@pytest.mark.spec("3.9", "3.11")
def test_first_prompt_too_long_gives_no_steps_and_a_masked_row(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    long = FakePrompt("long", messages=[{"role": "user", "content": "x" * 200}])
    fine = FakePrompt("fine", env_extras={"turns": 1})
    config = RolloutConfig(max_input_length=100)
    got = run(tiny_tokenizer, [long, fine], config, engine)
    assert (got[0].steps, got[0].stop_reason, got[0].failure) == ([], "length", None)
    rows = generator_output_from_trajectories(got)
    assert rows["loss_masks"] == [[], [1, 1]]
    assert rows["stop_reasons"][0] == "length"


@pytest.mark.spec("3.4", "3.6")
def test_appended_end_token_is_not_trained(tiny_tokenizer) -> None:
    end = tiny_tokenizer.eos_token_id
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "<q>", end=False, stop="<q>"))
    (t,) = run(tiny_tokenizer, [prompt_with(turns=2)], RolloutConfig(max_turns=2), engine)
    for step in t.steps:
        assert step.response_ids == [*tiny_tokenizer.encode("<q>"), end]
        assert step.loss_mask == [1, 1, 1, 0]
        assert step.rollout_logprobs == [-0.5, -0.5, -0.5, 0.0]
    text = tiny_tokenizer.decode(t.steps[1].prompt_token_ids)
    assert text.count("<|im_end|>") == 3  # user, answer, observation: no second one


def test_without_the_appended_end_token_the_template_closes_the_turn(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "<q>", end=False, stop="<q>"))
    config = RolloutConfig(max_turns=2, append_eos_after_stop_string=False)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=2)], config, engine)
    assert t.steps[0].loss_mask == [1, 1, 1]
    assert "<q><|im_end|>\n<|im_start|>user\nobs1" in tiny_tokenizer.decode(
        t.steps[1].prompt_token_ids
    )


@pytest.mark.spec("3.4")
def test_single_conversation_appends_the_end_only_to_the_last_response(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "ab", end=False, stop="b"))
    config = RolloutConfig(max_turns=3, context="single")
    (t,) = run(tiny_tokenizer, [prompt_with(turns=2)], config, engine)
    assert [s.loss_mask for s in t.steps] == [[1, 1], [1, 1, 0]]
    assert tiny_tokenizer.decode(t.steps[1].prompt_token_ids).endswith("assistant\nabobs1")


def test_text_after_the_stop_string_does_not_reach_the_environment(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "<a>!!", end=False, stop="<a>"))
    (t,) = run(tiny_tokenizer, [prompt_with(turns=1)], RolloutConfig(), engine)
    assert t.env_metrics["last_action"] == "<a>"
    assert t.steps[0].text == "<a>"


@pytest.mark.spec("3.7", "3.8")
def test_max_turns_is_recorded_on_the_last_step(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    (t,) = run(tiny_tokenizer, [prompt_with()], RolloutConfig(max_turns=2), engine)
    assert [s.stop_reason for s in t.steps] == ["stop", "max_turns"]
    assert t.stop_reason == "max_turns"


@pytest.mark.spec("3.7")
def test_response_cut_by_length_is_recorded(tiny_tokenizer) -> None:
    cut = Generation([1, 2], [-1.0, -1.0], "length", None)
    engine = ScriptedEngine(lambda call, n: cut)
    (t,) = run(tiny_tokenizer, [prompt_with(turns=1)], RolloutConfig(), engine)
    assert (t.stop_reason, t.steps[0].stop_reason) == ("length", "length")


@pytest.mark.spec("3.1")
def test_retemplated_history_takes_the_environments_rewriting(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "<think>long</think>short"))
    config = RolloutConfig(max_turns=2, context="retemplate")
    (t,) = run(tiny_tokenizer, [prompt_with(turns=2, rewrite="short")], config, engine)
    second = tiny_tokenizer.decode(t.steps[1].prompt_token_ids)
    assert "assistant\nshort<|im_end|>" in second
    assert "think" not in second
    assert "think" in tiny_tokenizer.decode(t.steps[0].response_ids)  # trained as sampled


# --- many trajectories -------------------------------------------------------------------------


def test_groups_are_ordered_by_prompt_then_repetition(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    prompts = [FakePrompt(f"p{i}", env_extras={"turns": 3 - i}) for i in range(3)]
    seen: list[Trajectory] = []
    config = RolloutConfig(n_samples_per_prompt=2, max_turns=4)
    got = run(tiny_tokenizer, prompts, config, engine, on_trajectory=seen.append)
    assert [(t.uid, t.repetition_id) for t in got] == [
        (f"p{i}", r) for i in range(3) for r in (0, 1)
    ]
    assert sorted(map(id, seen)) == sorted(map(id, got))


@pytest.mark.spec("3.3")
def test_phase_chooses_samples_and_sampling_parameters(tiny_tokenizer) -> None:
    config = RolloutConfig(
        n_samples_per_prompt=3,
        sampling_params=SamplingParams(temperature=1.0),
        eval_sampling_params=SamplingParams(temperature=0.0, max_generate_length=9),
    )
    for phase, number, temperature in (("train", 3, 1.0), ("eval", 1, 0.0)):
        engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
        got = run(tiny_tokenizer, [prompt_with(turns=1)], config, engine, phase=phase)
        assert len(got) == number
        assert {t.phase for t in got} == {phase}
        assert {c.sampling.temperature for c in engine.calls} == {temperature}


def test_at_most_so_many_at_once(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    config = RolloutConfig(n_samples_per_prompt=20, max_concurrent_trajectories=3)
    run(tiny_tokenizer, [prompt_with(turns=1)], config, engine)
    assert 1 <= engine.most_running <= 3


def seeds(tiny_tokenizer, **options) -> dict[str, int]:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    prompts = [FakePrompt(f"p{i}", env_extras={"turns": 2}) for i in range(3)]
    if options.pop("reverse", False):
        prompts.reverse()
    run(
        tiny_tokenizer,
        prompts,
        RolloutConfig(n_samples_per_prompt=2, max_turns=2, max_concurrent_trajectories=2),
        engine,
        **options,
    )
    return {f"{c.session_id}/{len(c.prompt_token_ids)}": c.sampling.seed for c in engine.calls}


def test_seeds_depend_on_the_place_in_the_run_alone(tiny_tokenizer) -> None:
    one = seeds(tiny_tokenizer)
    assert one == seeds(tiny_tokenizer, reverse=True)
    assert len(set(one.values())) == len(one) == 12
    assert not set(one.values()) & set(seeds(tiny_tokenizer, seed=2).values())
    assert all(0 <= s < 2**63 for s in one.values())
    assert request_seed(1, "train-7-p0-0", 0, 0) == 1714389556219091143


def test_evaluations_draw_the_same_numbers_at_every_version(tiny_tokenizer) -> None:
    def values(phase: str, version: int) -> list[int]:
        return sorted(seeds(tiny_tokenizer, phase=phase, policy_version=version).values())

    assert values("eval", 3) == values("eval", 4)
    assert not set(values("train", 3)) & set(values("train", 4))
    assert not set(values("train", 3)) & set(values("eval", 3))


# --- failures ----------------------------------------------------------------------------------


@pytest.mark.spec("3.10")
def test_flaky_environment_is_tried_again(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    flaky = FakePrompt(
        "f", env_class="flaky", env_extras={"name": "f", "fail_times": 1, "turns": 1}
    )
    (t,) = run(tiny_tokenizer, [flaky], RolloutConfig(max_retries=1), engine)
    assert (t.failure, len(t.steps)) == (None, 1)
    assert len({c.sampling.seed for c in engine.calls}) == 2  # another attempt, another sample


@pytest.mark.spec("3.10", "3.11")
def test_one_broken_environment_of_64_does_not_stop_the_step(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    prompts = [
        FakePrompt(f"p{i}", env_extras={"turns": 2, **({"raise_at": 2} if i == 17 else {})})
        for i in range(64)
    ]
    got = run(tiny_tokenizer, prompts, RolloutConfig(max_turns=2, max_retries=2), engine)
    failed = [t for t in got if t.failure]
    assert [t.uid for t in failed] == ["p17"]
    assert "counting: step raised RuntimeError: the database is locked" in failed[0].failure
    assert failed[0].stop_reason == failed[0].steps[-1].stop_reason == "env_error"
    rows = generator_output_from_trajectories(got)
    assert len(rows["rewards"]) == 63 * 2 + 1  # the failed one is one masked stub row
    assert rows["loss_masks"][17 * 2] == []
    assert rows["rollout_metrics"]["generate/num_failed_trajectories"] == 1.0
    assert len(CountingEnv.closed) == 64 + 2  # each attempt's environment was closed


@pytest.mark.spec("3.10", "3.11")
def test_hanging_environment_times_out_and_the_others_finish(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    hanging = FakePrompt("h", env_extras={"turns": 2, "hang_at": 1, "hang_seconds": 1.5})
    prompts = [hanging, *[FakePrompt(f"p{i}", env_extras={"turns": 1}) for i in range(6)]]
    config = RolloutConfig(max_turns=2, max_retries=1)
    got = run(tiny_tokenizer, prompts, config, engine, timeout=0.1, workers=2)
    assert (got[0].stop_reason, got[0].steps) == ("timeout", [])
    assert "step did not return within 0.1 s" in got[0].failure
    assert all(t.failure is None for t in got[1:])


@pytest.mark.spec("3.7", "3.8")
def test_deadline_of_a_trajectory_names_the_turn(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    slow = FakePrompt("slow", env_extras={"turns": 9, "hang_at": 2, "hang_seconds": 1.0})
    fast = FakePrompt("fast", env_extras={"turns": 1})
    config = RolloutConfig(max_turns=9, max_retries=0, trajectory_timeout_seconds=0.2)
    got = run(tiny_tokenizer, [slow, fast], config, engine)
    assert got[0].stop_reason == got[0].steps[-1].stop_reason == "timeout"
    assert "turn 2 was not over after 0.2 s" in got[0].failure
    assert got[1].failure is None


@pytest.mark.spec("3.10")
def test_failed_request_fails_its_trajectory_only(tiny_tokenizer) -> None:
    def answer(call: Call, n: int) -> Generation | Exception:
        return EngineError("refused") if "-bad-" in call.session_id else says(tiny_tokenizer, "a")

    got = run(
        tiny_tokenizer,
        [FakePrompt(uid, env_extras={"turns": 1}) for uid in ("good", "bad")],
        RolloutConfig(),
        ScriptedEngine(answer),
    )
    assert [t.stop_reason for t in got] == ["stop", "engine_error"]


def test_dead_engine_ends_the_rollout(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        run(tiny_tokenizer, [FakePrompt("a"), FakePrompt("b")], RolloutConfig(), engine)


def test_nothing_but_failures_is_an_error_that_quotes_the_first(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    with pytest.raises(
        RolloutError, match=r"all 2 trajectories failed.*no environment of this name"
    ):
        run(
            tiny_tokenizer,
            [FakePrompt("a", env_class="typo"), FakePrompt("b", env_class="typo")],
            RolloutConfig(),
            engine,
        )


def test_logprobs_of_another_length_are_an_engine_error(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: Generation([1, 2], [-1.0], "stop"))
    with pytest.raises(RolloutError, match="2 tokens but 1 logprobs"):
        run(tiny_tokenizer, [prompt_with(turns=1)], RolloutConfig(), engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_turns": 0}, "max_turns: wanted >= 1, got 0"),
        ({"context": "other"}, "context: wanted one of"),
        ({"max_retries": -1}, "max_retries >= 0"),
    ],
)
def test_config_refuses_what_cannot_work(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RolloutConfig(), **change)


def test_arguments_are_checked(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    with pytest.raises(ValueError, match="phase: wanted one of"):
        run(tiny_tokenizer, [FakePrompt("a")], RolloutConfig(), engine, phase="test")
    with pytest.raises(ValueError, match="same uid"):
        run(tiny_tokenizer, [FakePrompt("a"), FakePrompt("a")], RolloutConfig(), engine)
