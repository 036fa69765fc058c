"""Groups of trajectories: order, phases, seeds, settings (docs/spec.md, section 3)."""

import pytest
from fake_envs import (
    FakePrompt,
    ScriptedEngine,
    loop_config,
    prompt_with,
    register_fakes,
    run,
    says,
)

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.turn import request_seed

register_fakes()


@pytest.mark.spec("rollout.group-order")
def test_groups_are_ordered_by_prompt_then_repetition(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    prompts = [FakePrompt(f"p{i}", env_extras={"turns": 3 - i}) for i in range(3)]
    config = loop_config(n_samples_per_prompt=2, max_turns=4)
    got = run(tiny_tokenizer, prompts, config, engine)
    assert [(t.uid, t.repetition_id) for t in got] == [
        (f"p{i}", r) for i in range(3) for r in (0, 1)
    ]


@pytest.mark.spec("rollout.one-sample")
def test_phase_selects_samples_and_sampling_parameters(tiny_tokenizer) -> None:
    config = loop_config(
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


@pytest.mark.spec("rollout.group-order")
def test_concurrency_is_limited(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    config = loop_config(n_samples_per_prompt=20, max_concurrent_trajectories=3)
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
        loop_config(n_samples_per_prompt=2, max_turns=2, max_concurrent_trajectories=2),
        engine,
        **options,
    )
    return {f"{c.session_id}/{len(c.prompt_token_ids)}": c.seed for c in engine.calls}


@pytest.mark.spec("rollout.request-seed")
def test_seeds_depend_only_on_the_position_in_the_run(tiny_tokenizer) -> None:
    one = seeds(tiny_tokenizer)
    assert one == seeds(tiny_tokenizer, reverse=True)
    assert len(set(one.values())) == len(one) == 12
    assert not set(one.values()) & set(seeds(tiny_tokenizer, seed=2).values())
    assert all(0 <= s < 2**63 for s in one.values())
    assert request_seed(1, "train-7-p0-0", 0, 0) == 1714389556219091143


def test_evaluation_seeds_are_the_same_at_every_version(tiny_tokenizer) -> None:
    def values(phase: str, version: int) -> list[int]:
        return sorted(seeds(tiny_tokenizer, phase=phase, policy_version=version).values())

    assert values("eval", 3) == values("eval", 4)
    assert not set(values("train", 3)) & set(values("train", 4))
    assert not set(values("train", 3)) & set(values("eval", 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_turns": 0}, "generator.max_turns: expected at least 1, got 0"),
        ({"context": "other"}, "generator.context: expected one of"),
        ({"max_retries": -1}, "generator.max_retries: expected at least 0, got -1"),
    ],
)
def test_invalid_config_is_refused(change: dict, message: str, tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    with pytest.raises(ValueError, match=message):
        run(tiny_tokenizer, [FakePrompt("a")], loop_config(**change), engine)


def test_arguments_are_validated(tiny_tokenizer) -> None:
    engine = ScriptedEngine(lambda call, n: says(tiny_tokenizer, "a"))
    with pytest.raises(ValueError, match="phase: expected one of"):
        run(tiny_tokenizer, [FakePrompt("a")], loop_config(), engine, phase="test")
    with pytest.raises(ValueError, match="same uid"):
        run(tiny_tokenizer, [FakePrompt("a"), FakePrompt("a")], loop_config(), engine)
