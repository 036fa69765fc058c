"""Dynamic sampling in full runs: batches filled, resumed, given up, without a signal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from _fakes import FakeRollouts, tiny_model
from _training import folder as folder  # a fixture
from _training import settings, steady

import skyrl_fast
from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.config import Config
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train import prepare_batch as training_batch
from skyrl_fast.train.algorithm.dynamic_sampling import DynamicSamplingError
from skyrl_fast.train.data.prompts import Prompt, PromptSampler
from skyrl_fast.train.output.loggers import read_metrics

FILTER = "trainer.algorithm.dynamic_sampling.type=filter"


def outcomes_by_uid(easy: Sequence[str]) -> Any:
    """Create rollouts in which these prompts always succeed, and others every second time."""

    class Scripted(FakeRollouts):
        async def generate(
            self, prompts: Sequence[Prompt], *, step: int, phase: str
        ) -> list[Trajectory]:
            trajectories = await super().generate(prompts, step=step, phase=phase)
            for one in trajectories:
                always = one.uid.partition("~")[0] in easy
                one.steps[-1].reward = 1.0 if always else float(one.repetition_id % 2)
            return trajectories

    made: list[Scripted] = []

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        made.append(Scripted(config, tiny_model()))
        return made[-1]

    make.made = made  # type: ignore[attr-defined]
    return make


def train_calls(make: Any) -> list[tuple[int, list[str]]]:
    return [(s, uids) for r in make.made for s, phase, uids in r.calls if phase == "train"]


@pytest.mark.spec("filter.dynamic-filter", "filter.complete-groups", "metrics.filtered-groups")
def test_dynamic_sampling_fills_the_batch_from_further_prompts(folder: Path) -> None:
    make = outcomes_by_uid(["0", "1", "2"])
    config = settings(folder, "run", FILTER, "trainer.epochs=4", "trainer.max_training_steps=2")
    outcome = skyrl_fast.train_agent(config, make_rollouts=make)
    assert outcome.step == 2
    order = PromptSampler(8, batch_size=4, seed=42)
    want = [[str(i) for i in order.next_batch()] for _ in range(len(train_calls(make)))]
    got = [[uid.partition("~")[0] for uid in uids] for _, uids in train_calls(make)]
    assert got == want  # data order, for any number of batches per step
    rows = read_metrics(outcome.metrics)[1:]
    sampled = [int(row["dynamic_sampling/num_batches"]) for row in rows]
    assert sampled == [sum(s == step for s, _ in train_calls(make)) for step in (0, 1)]
    assert max(sampled) > 1
    assert max(row["dynamic_sampling/avg_raw_reward"] for row in rows) > 0.5
    for number, row in enumerate(rows, start=1):
        assert row["reward/avg_raw_reward"] == 0.5  # only groups with two successes in four remain
        assert row["generate/num_trajectories"] == 16
        assert row["policy/optimizer_steps"] == 2
        lines = (outcome.trajectories / f"step_00000{number}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert len(records) == 16
        assert all(record["uid"].partition("~")[0] not in "012" for record in records)


def test_filtered_rows_are_not_rebuilt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counting(trajectories: Sequence[Trajectory]) -> Any:
        read.extend(f"{t.uid} {t.repetition_id}" for t in trajectories)
        return batch_from_trajectories(trajectories)

    monkeypatch.setattr(training_batch, "batch_from_trajectories", counting)
    make = outcomes_by_uid(["0", "1", "2"])
    config = settings(folder, "run", FILTER, "trainer.epochs=4", "trainer.max_training_steps=2")
    skyrl_fast.train_agent(config, make_rollouts=make)
    assert len(read) == 4 * sum(len(uids) for _, uids in train_calls(make))


@pytest.mark.spec("filter.data-position")
def test_dynamic_sampling_resumes_at_its_data_position(folder: Path) -> None:
    easy = ["0", "1", "2"]
    wanted = [FILTER, "trainer.epochs=6", "trainer.max_training_steps=4"]
    complete, first, second = (outcomes_by_uid(easy) for _ in range(3))
    expected = skyrl_fast.train_agent(settings(folder, "expected", *wanted), make_rollouts=complete)

    async def dying(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        rollouts = await first(config, tokenizer, model_path)

        async def until_second_batch_of_step_2(step: int, phase: str) -> None:
            if phase == "train" and [s for s, _ in train_calls(first)].count(2) == 2:
                raise RuntimeError("gone")

        rollouts.before_batch = until_second_batch_of_step_2  # type: ignore[method-assign]
        return rollouts

    with pytest.raises(RuntimeError, match="gone"):
        skyrl_fast.train_agent(settings(folder, "broken", *wanted), make_rollouts=dying)
    outcome = skyrl_fast.train_agent(
        settings(folder, "broken", *wanted, "trainer.resume_mode=latest"), make_rollouts=second
    )
    assert steady(outcome.metrics) == steady(expected.metrics)
    done = [call for call in train_calls(first) if call[0] < 2]
    assert done + train_calls(second) == train_calls(complete)


@pytest.mark.spec("filter.dynamic-limit")
def test_dynamic_sampling_fails_with_a_reason(folder: Path) -> None:
    make = outcomes_by_uid([str(i) for i in range(8)])
    config = settings(
        folder, "run", FILTER, "trainer.algorithm.dynamic_sampling.max_sample_batches=3"
    )
    with pytest.raises(DynamicSamplingError, match="after 3 batches of prompts 0 of 12 sampled"):
        skyrl_fast.train_agent(config, make_rollouts=make)
    assert len(train_calls(make)) == 3


@pytest.mark.spec("filter.dynamic-data-end")
def test_run_ends_if_prompts_run_out_before_the_batch_is_full(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = outcomes_by_uid(["0", "1", "2"])
    outcome = skyrl_fast.train_agent(
        settings(folder, "run", FILTER, "trainer.epochs=1"), make_rollouts=make
    )
    # Eight prompts, five of them informative: one batch of four, and one that is not filled.
    assert (outcome.step, outcome.total_steps, outcome.signal) == (1, 2, None)
    assert outcome.checkpoint is not None and outcome.checkpoint.name == "step_000001"
    assert outcome.after is not None
    again = skyrl_fast.train_agent(
        settings(folder, "run", FILTER, "trainer.epochs=1", "trainer.resume_mode=latest"),
        make_rollouts=outcomes_by_uid(["0", "1", "2"]),
    )
    assert again.step == 1


@pytest.mark.spec("filter.dynamic-data-end")
@pytest.mark.parametrize(
    "options",
    [
        (FILTER,),
        ("trainer.algorithm.dynamic_sampling.type=replace",),
        ("trainer.algorithm.dynamic_sampling.type=replace", "trainer.fully_async.enabled=true"),
    ],
)
def test_a_run_without_a_step_is_an_error(folder: Path, options: tuple[str, ...]) -> None:
    make = outcomes_by_uid([str(i) for i in range(8)])
    wanted = "without a training step: 0 of 8 sampled groups are informative, for a batch of 4"
    with pytest.raises(DynamicSamplingError, match=wanted):
        skyrl_fast.train_agent(
            settings(folder, "run", *options, "trainer.epochs=1"), make_rollouts=make
        )


@pytest.mark.spec("filter.dynamic-data-end", "metrics.reported-once")
def test_resume_after_prompts_ran_out_repeats_nothing(folder: Path) -> None:
    order = PromptSampler(8, batch_size=4, seed=42)
    order.next_batch()
    alike = [str(prompt) for prompt in order.next_batch()[:2]]  # of the second batch
    for epochs, wanted in ((1, 1), (1, 1), (2, 3)):  # again, then with more data
        config = settings(
            folder, "run", FILTER, f"trainer.epochs={epochs}", "trainer.resume_mode=latest"
        )
        outcome = skyrl_fast.train_agent(config, make_rollouts=outcomes_by_uid(alike))
        assert outcome.step == wanted
        steps = [row["step"] for row in read_metrics(outcome.metrics)]
        # The step could not tell that it was the last: its evaluation has a separate row.
        assert steps[:3] == [0, 1, 1] and steps[3:].count(1) == 0


@pytest.mark.spec("filter.dynamic-replace")
def test_replacement_keeps_the_number_of_groups_and_steps(folder: Path) -> None:
    make = outcomes_by_uid(["0", "1", "2", "3"])
    config = settings(
        folder, "run", "trainer.algorithm.dynamic_sampling.type=replace", "trainer.epochs=1",
        "trainer.algorithm.dynamic_sampling.min_replace_ratio=0",
    )  # fmt: skip
    outcome = skyrl_fast.train_agent(config, make_rollouts=make)
    rows = read_metrics(outcome.metrics)[1:]
    assert sum(row["dynamic_sampling/num_groups_replaced"] for row in rows) > 0
    for row in rows:
        assert row["reward/avg_raw_reward"] == 0.5
        assert row["policy/optimizer_steps"] == 2


@pytest.mark.spec("loss.all-masked-step")
def test_batch_without_informative_groups_changes_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(
        folder, "run", "trainer.algorithm.zero_variance_filter=true", "trainer.epochs=1"
    )
    make = outcomes_by_uid([str(i) for i in range(8)])
    outcome = skyrl_fast.train_agent(config, make_rollouts=make)
    assert "no token of the batch's 32 rows is trained" in caplog.text
    rows = read_metrics(outcome.metrics)[1:]
    assert outcome.step == 2
    assert all(row["policy/loss"] == 0.0 and row["policy/grad_norm"] == 0.0 for row in rows)
    assert all(row["reward/num_zero_variance_filtered"] == 4 for row in rows)
    assert all(row["reward/avg_raw_reward"] == 1.0 for row in rows)
