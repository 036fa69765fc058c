"""Several sources of prompts: their shares, the curriculum, and resumed runs."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from _training import Recorder, dies_at, dying, settings, steady, train
from _training import folder as folder  # a fixture

from skyrl_fast.config import ConfigError
from skyrl_fast.train import SetupError
from skyrl_fast.train.data.mixture import CurriculumError, MixtureSampler, make_sampler
from skyrl_fast.train.data.prompts import PromptSampler, load_prompts
from skyrl_fast.train.output.loggers import read_metrics

SOURCES = {"easy": [0, 1, 2], "hard": list(range(3, 13))}
CURRICULUM = """
def harder(step, statistics):
    assert set(statistics) <= {"easy", "hard"}
    assert all(one["num_groups"] > 0 for one in statistics.values())
    return {"easy": 3, "hard": step}

def wrong(step, statistics):
    return {"easy": -1.0}

def broken(step, statistics):
    return 1 / 0

def keep(step, statistics):
    return None
"""


def sampler(weights: Mapping[str, float], seed: int = 0) -> MixtureSampler:
    return MixtureSampler(SOURCES, weights, batch_size=4, seed=seed)


def drawn(source: PromptSampler, number: int) -> list[int]:
    return [source.next_prompt() for _ in range(number)]


# --- order --------------------------------------------------------------------------------------


@pytest.mark.spec("data.mixture")
def test_every_batch_has_the_sources_by_their_weights() -> None:
    mixed = sampler({"easy": 1, "hard": 3})
    for _ in range(30):
        batch = mixed.next_batch()
        assert sum(number < 3 for number in batch) == 1


@pytest.mark.spec("data.mixture")
def test_all_prompts_of_a_source_come_before_one_comes_again() -> None:
    order = drawn(sampler({"easy": 1, "hard": 1}), 120)
    easy = [number for number in order if number < 3]
    hard = [number for number in order if number >= 3]
    assert len(easy) == len(hard) == 60
    for start in range(0, 60, 3):
        assert sorted(easy[start : start + 3]) == [0, 1, 2]
    for start in range(0, 60, 10):
        assert sorted(hard[start : start + 10]) == SOURCES["hard"]
    assert len({tuple(hard[start : start + 10]) for start in range(0, 60, 10)}) > 1


def test_the_order_is_a_function_of_the_seed() -> None:
    weights = {"easy": 0.3, "hard": 0.7}
    assert drawn(sampler(weights), 50) == drawn(sampler(weights), 50)
    assert drawn(sampler(weights), 50) != drawn(sampler(weights, seed=1), 50)


def test_a_source_of_weight_0_is_not_drawn() -> None:
    assert min(drawn(sampler({"hard": 2.0}), 40)) == 3


def test_an_epoch_draws_as_many_prompts_as_there_are() -> None:
    mixed = sampler({"easy": 1, "hard": 1})
    drawn(mixed, 12)
    assert (mixed.epoch, mixed.position) == (1, 0)


@pytest.mark.spec("data.mixture-resume")
def test_a_state_continues_with_the_same_prompts_and_weights() -> None:
    mixed = sampler({"easy": 1, "hard": 1})
    drawn(mixed, 9)
    mixed.follow(lambda step, statistics: {"easy": 1, "hard": 9}, 1, {})
    state = json.loads(json.dumps(mixed.state()))  # as a checkpoint stores it
    following = drawn(mixed, 40)
    other = sampler({"easy": 1, "hard": 1})
    other.restore(state)
    assert drawn(other, 40) == following
    assert 3 <= sum(number < 3 for number in following) <= 5


@pytest.mark.spec("data.mixture-resume")
def test_other_weights_apply_from_where_a_run_resumes(caplog: pytest.LogCaptureFixture) -> None:
    mixed = sampler({"easy": 1, "hard": 1})
    before = drawn(mixed, 8)
    other = sampler({"hard": 1})
    other.restore(mixed.state())
    assert "data.mixture differs from the checkpoint's" in caplog.text
    assert min(drawn(other, 20)) == 3
    assert sum(number < 3 for number in before) == 4
    # And once more, with the same weights: they are no change.
    again = sampler({"hard": 1})
    caplog.clear()
    again.restore(json.loads(json.dumps(other.state())))
    assert not caplog.text
    assert again.mixture.changes == other.mixture.changes
    assert drawn(again, 10) == drawn(other, 10)


@pytest.mark.spec("data.mixture-resume")
def test_a_change_of_the_setting_is_made_once_and_the_curriculum_keeps_its_weights() -> None:
    mixed = sampler({"easy": 1, "hard": 1})
    drawn(mixed, 8)
    changed = sampler({"easy": 1, "hard": 3})
    changed.restore(mixed.state())
    drawn(changed, 6)
    changed.follow(lambda step, statistics: {"easy": 1}, 1, {})
    killed = sampler({"easy": 1, "hard": 3})
    killed.restore(json.loads(json.dumps(changed.state())))
    assert killed.weights == {"easy": 1.0, "hard": 0.0}
    assert drawn(killed, 40) == drawn(changed, 40)


def test_other_sources_and_none_are_refused() -> None:
    state = sampler({"easy": 1}).state()
    other = MixtureSampler(
        {"new": SOURCES["easy"], "hard": SOURCES["hard"]}, {"new": 1}, batch_size=4, seed=0
    )
    with pytest.raises(
        ValueError, match="made with the sources easy, hard, this run has hard, new"
    ):
        other.restore(state)
    plain = PromptSampler(13, batch_size=4, seed=0).state()
    with pytest.raises(ValueError, match=r"made without data\.mixture"):
        sampler({"easy": 1}).restore(plain)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"medium": 1}, "sources easy, hard, got one of 'medium'"),
        ({"easy": -1}, "easy: expected a finite weight of at least 0, got -1"),
        ({"easy": float("nan")}, "easy: expected a finite weight"),
        ({"easy": True}, "easy: expected a finite weight"),
        ({"easy": 0, "hard": 0}, "expected a weight above 0, got none"),
        ([1, 2], "expected a weight for each source"),
    ],
)
def test_weights_that_are_none(weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(weights)


def test_rows_name_their_source_or_the_file_does(tmp_path: Path) -> None:
    rows = {"math": {"prompt": "a"}, "code": {"prompt": "b", "data_source": "python"}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    paths = [str(tmp_path / f"{name}.jsonl") for name in rows]
    named = load_prompts(paths, default_env_class="env", names_sources=True)
    assert [prompt.data_source for prompt in named] == ["math", "python"]
    assert [prompt.uid for prompt in named] == ["0", "1"]
    plain = load_prompts(paths, default_env_class="env")
    assert [prompt.data_source for prompt in plain] == [None, "python"]
    assert isinstance(make_sampler(plain, {}, batch_size=1, seed=0), PromptSampler)
    with pytest.raises(ValueError, match="got none for prompt 0"):
        make_sampler(plain, {"python": 1}, batch_size=1, seed=0)


# --- runs ---------------------------------------------------------------------------------------


def two_files(folder: Path) -> list[str]:
    """Divide the prompts of a run into two files; return the settings of a mixture."""
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "easy.jsonl").write_text("".join(lines[:2]))
    (folder / "hard.jsonl").write_text("".join(lines[2:]))
    (folder / "curricula.py").write_text(CURRICULUM)
    return [
        f"data.train_data=[{folder}/easy.jsonl, {folder}/hard.jsonl]",
        "data.mixture={easy: 3, hard: 1}",
    ]


def shares(path: Path) -> list[tuple[float, float]]:
    return [
        (row["data/easy/num_groups"], row["data/hard/num_groups"])
        for row in read_metrics(path)
        if "data/easy/num_groups" in row
    ]


def test_a_run_has_the_sources_by_weight_and_metrics_of_each(folder: Path) -> None:
    result = train(settings(folder, "run", *two_files(folder)))
    assert shares(result.metrics) == [(3, 1)] * 6
    row = read_metrics(result.metrics)[1]
    assert row["data/easy/weight"] == 0.75
    assert 0 <= row["data/easy/zero_variance_share"] <= 1
    groups = 3 * row["data/easy/avg_raw_reward"] + row["data/hard/avg_raw_reward"]
    assert groups / 4 == pytest.approx(row["reward/avg_raw_reward"])


@pytest.mark.spec("data.curriculum", "data.mixture-resume")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_curriculum_changes_the_weights_and_a_killed_run_goes_on_the_same(
    folder: Path, asynchronous: bool
) -> None:
    mixture = [*two_files(folder), f"data.curriculum={folder}/curricula.py:harder"]
    if asynchronous:
        mixture += ["trainer.fully_async.enabled=true", "trainer.fully_async.max_staleness_steps=1"]
    whole = train(settings(folder, "whole", *mixture))
    rows = read_metrics(whole.metrics)[1:]
    assert [row["data/hard/weight"] for row in rows] == [s / (3 + s) for s in range(1, 7)]
    counts = Counter()
    for easy, hard in shares(whole.metrics):
        counts.update(easy=easy, hard=hard)
    assert counts["hard"] > 24 / 4  # more than the first weights alone would give
    if asynchronous:
        return  # which groups start before a step ends depends on the clock
    with dying():
        train(settings(folder, "killed", *mixture), Recorder(dies_at(4)))
    resumed = train(settings(folder, "killed", *mixture, "trainer.resume_mode=latest"))
    assert steady(resumed.metrics) == steady(whole.metrics)


@pytest.mark.spec("data.curriculum")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("wrong", "after step 1: easy: expected a finite weight of at least 0, got -1.0"),
        ("broken", "raised ZeroDivisionError after step 1: division by zero"),
    ],
)
def test_a_curriculum_that_fails_ends_the_run_by_name(
    folder: Path, function: str, message: str
) -> None:
    mixture = [*two_files(folder), f"data.curriculum={folder}/curricula.py:{function}"]
    with pytest.raises(CurriculumError, match=message):
        train(settings(folder, "run", *mixture))


def test_a_curriculum_that_returns_none_keeps_the_weights(folder: Path) -> None:
    mixture = two_files(folder)
    plain = train(settings(folder, "plain", *mixture))
    kept = train(settings(folder, "kept", *mixture, f"data.curriculum={folder}/curricula.py:keep"))
    assert steady(kept.metrics) == steady(plain.metrics)


def test_mistakes_are_named_before_the_engine_starts(folder: Path) -> None:
    mixture = two_files(folder)
    recorder = Recorder()
    with pytest.raises(SetupError, match=r"data\.mixture: expected weights of the sources easy"):
        train(settings(folder, "run", mixture[0], "data.mixture={medium: 1}"), recorder)
    with pytest.raises(SetupError, match=r"data\.curriculum: .* has no 'nothing'"):
        name = f"data.curriculum={folder}/curricula.py:nothing"
        train(settings(folder, "run", *mixture, name), recorder)
    with pytest.raises(ConfigError, match=r"data\.mixture: expected weights of the sources with"):
        settings(folder, "run", f"data.curriculum={folder}/curricula.py:harder")
    assert not recorder.rollouts
