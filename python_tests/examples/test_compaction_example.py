"""The compaction example: its environment, its demonstrations, and (slow) that summaries learn."""

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_envs import Call, FakePrompt, ScriptedEngine, run, says

from examples.compaction import make_data, warm_start
from examples.compaction.route import (
    ACKNOWLEDGED,
    ASKS,
    LONGEST_PROMPT,
    TOWNS,
    Route,
    drop_history,
    leg_text,
)
from examples.tiny_model.jsonl import read_jsonl, write_jsonl
from examples.tiny_model.model import make_tokenizer
from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.config.loading import load_config
from skyrl_fast.rollout.contexts import context_numbers
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.train.algorithm.advantages import compute_advantages

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/compaction"
ROW = {"towns": ["Rome", "Oslo", "Bonn"], "asked": "Rome"}


def test_the_environment_shows_all_legs_and_asks_for_one() -> None:
    env = Route(ROW)
    shown = [env.step(ACKNOWLEDGED) for _ in range(3)]
    assert [step.observations for step in shown] == ["Rome Oslo", "Oslo Bonn", "After Rome ?"]
    assert not any(step.done for step in shown)
    right = env.step("Rome Oslo")
    assert (right.reward, right.done) == (1.0, True)


@pytest.mark.parametrize("said", ["Oslo", "Rome Bonn", "", "Rome Oslo Bonn"])
def test_another_answer_is_wrong(said: str) -> None:
    env = Route(ROW)
    for _ in range(3):
        env.step(ACKNOWLEDGED)
    wrong = env.step(said)
    assert (wrong.reward, wrong.done) == (0.0, True)


def test_the_question_is_asked_again_and_not_for_ever() -> None:
    env = Route(ROW)
    steps = [env.step(ACKNOWLEDGED) for _ in range(2 + ASKS)]
    assert [step.observations for step in steps[2:]] == ["After Rome ?"] * ASKS
    assert not steps[-1].done
    assert env.step(ACKNOWLEDGED).done


def legs_in(text: str) -> dict[str, str]:
    """Return the legs of a text: each town with the town after it."""
    return {start: end for start, end in pairwise(text.split()) if {start, end} <= set(TOWNS)}


def route_from(start: str, legs: Mapping[str, str]) -> list[str]:
    towns = [start]
    while towns[-1] in legs:
        towns.append(legs[towns[-1]])
    return towns


@pytest.mark.parametrize("seed", range(20))
def test_demonstrations_answer_what_their_context_has(seed: int) -> None:
    *summarised, last = make_data.demonstrate(random.Random(seed))
    for chat in summarised:
        assert chat[-2]["content"].endswith(make_data.REQUEST)
        assert make_data.prompt_length(chat[:-1]) > LONGEST_PROMPT
        start = chat[0]["content"].split()[4]
        known = " ".join(f"{message['content']} ." for message in chat[:-1])
        summary = chat[-1]["content"].split()
        assert summary == route_from(start, legs_in(known))[: len(summary)]
    asked = [i for i, message in enumerate(last) if message["content"].startswith("After")]
    legs = legs_in(" ".join(f"{message['content']} ." for message in last[: asked[0]]))
    for i in asked[1:]:
        town = last[i]["content"].split()[1]
        assert last[i + 1]["content"] == leg_text(town, legs[town])
    assert len(asked) == 1 + min(len(legs), make_data.NUM_QUESTIONS)


def test_a_summary_has_room_for_the_route() -> None:
    towns = make_data.NUM_LEGS + 1
    assert towns < make_data.LONGEST_SUMMARY


def scripted_settings() -> Any:
    return load_config(EXAMPLE / "config.yaml", []).generator


def route_tokenizer() -> Any:
    rng = random.Random(0)
    chats = [chat for _ in range(8) for chat in make_data.demonstrate(rng)]
    texts = [message["content"] for chat in chats for message in chat]
    return make_tokenizer([*texts, *TOWNS], max_length=warm_start.MAX_LENGTH)


def careful_engine(tokenizer: Any, wrong: Sequence[int] = ()) -> ScriptedEngine:
    """Return an engine whose summaries have the route; answers of these numbers are wrong."""
    num_answers = 0

    def say(call: Call, number: int) -> Generation:
        nonlocal num_answers
        shown = tokenizer.decode(call.prompt_token_ids).replace("<|im_end|>", " . ")
        words = shown.split()
        start = words[words.index("from") + 1]
        last = shown.split("<|im_start|>")[-2].split()[:-1]
        legs = legs_in(shown)
        if last[-2:] == make_data.REQUEST.split():
            return says(tokenizer, " ".join(route_from(start, legs)))
        if last[-1] != "?":
            return says(tokenizer, ACKNOWLEDGED)
        town = last[-2]
        num_answers += 1
        is_wrong = num_answers - 1 in wrong
        end = town if is_wrong else legs.get(town, town)
        return says(tokenizer, leg_text(town, end))

    return ScriptedEngine(say)


def prompts_of(count: int) -> list[FakePrompt]:
    rng = random.Random(5)
    rows = [make_data.make_row(rng) for _ in range(count)]
    return [
        FakePrompt(str(i), messages=row["prompt"], env_extras=row)  # type: ignore[arg-type]
        for i, row in enumerate(rows)
    ]


def test_twelve_calls_in_three_contexts_count_once() -> None:
    tokenizer = route_tokenizer()
    config = scripted_settings()
    config.n_samples_per_prompt = 2
    engine = careful_engine(tokenizer, wrong=[1])
    trajectories = run(tokenizer, prompts_of(1), config, engine, make_env=Route)
    for trajectory in trajectories:
        assert len(trajectory.steps) == 12
        assert context_numbers(trajectory) == [0] * 5 + [1] * 4 + [2] * 3
    assert sorted(trajectory.outcome() for trajectory in trajectories) == [0.0, 1.0]
    # The rows have the ids that the engine was asked with.
    asked = sorted(call.prompt_token_ids for call in engine.calls)
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    assert sorted(list(step.prompt_token_ids) for step in steps) == asked
    longest = config.max_input_length + config.sampling_params.max_generate_length
    assert all(len(step.prompt_token_ids) <= longest for step in steps)
    # Rewards 1 and 0 of a group of two: the mean is a half, however many rows there are.
    batch = compute_advantages(batch_from_trajectories(trajectories), estimator="dr_grpo")
    assert batch.advantages is not None
    assert set(batch.advantages.tolist()) == {0.5, -0.5}


def test_a_careful_summary_suffices_and_the_controls_do_not() -> None:
    tokenizer = route_tokenizer()
    prompts = prompts_of(16)

    def rewards(**changes: Any) -> list[float]:
        config = scripted_settings()
        config.n_samples_per_prompt = 1
        for name, value in changes.items():
            setattr(config, name, value)
        engine = careful_engine(tokenizer)
        trajectories = run(tokenizer, prompts, config, engine, make_env=Route)
        reasons.update(trajectory.stop_reason for trajectory in trajectories)
        return [trajectory.outcome() for trajectory in trajectories]

    reasons: set[str] = set()
    assert rewards() == [1.0] * len(prompts)
    assert rewards(max_input_length=512, context="append") == [1.0] * len(prompts)
    reasons.clear()
    # Without compaction the route exceeds the engine's longest context.
    assert rewards(context="append") == [0.0] * len(prompts)
    assert reasons == {"length"}
    compaction = scripted_settings().compaction
    compaction.policy = "examples.compaction.route:drop_history"
    assert rewards(compaction=compaction) == [0.0] * len(prompts)


def test_settings_agree() -> None:
    generator = scripted_settings()
    assert generator.compaction.request == make_data.REQUEST
    assert generator.compaction_budget == LONGEST_PROMPT
    assert generator.sampling_params.max_generate_length == make_data.LONGEST_SUMMARY


def test_the_control_keeps_nothing() -> None:
    messages = [{"role": "user", "content": "task"}, {"role": "assistant", "content": "ok"}]
    assert drop_history(messages, LONGEST_PROMPT) is None
    assert drop_history(messages, LONGEST_PROMPT + 1) == messages[:1]


def test_the_warm_start_writes_a_model_that_the_engine_loads(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rng = random.Random(0)
    chats = [chat for _ in range(4) for chat in make_data.demonstrate(rng)]
    write_jsonl(data / "demonstrations.jsonl", chats)
    loss = warm_start.warm_start(data, tmp_path / "model", num_steps=2, batch_size=4)
    assert 0 < loss < 10
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["sliding_window"] == warm_start.WINDOW


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_trained_summaries_raise_the_reward_and_masked_ones_do_not(tmp_path: Path) -> None:
    """Three seeds went from 0.39 to 0.76 when trained; after ten masked steps they had 0.31."""

    def scores(name: str, *settings: str) -> list[float]:
        run_path = f"trainer.run_path=compaction/{name}"
        command = [sys.executable, str(EXAMPLE / "run.py"), "--base", str(tmp_path), run_path]
        subprocess.run([*command, *settings], check=True, cwd=ROOT)
        rows = read_jsonl(tmp_path / "compaction" / name / "metrics.jsonl")
        return [row["eval/all/avg_score"] for row in rows if "eval/all/avg_score" in row]

    trained = scores("trained")
    masked = scores("masked", "trainer.algorithm.summary_weight=0", "trainer.max_training_steps=10")
    assert trained[-1] > trained[0] + 0.2
    assert masked[-1] < masked[0] + 0.1
