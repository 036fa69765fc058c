"""Dynamic sampling: groups are judged by outcomes, kept as a unit, or replaced by copies."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _rows import Row, batch_of
from _training import RESUME, Recorder, settings, steady, train
from _training import folder as folder
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.batch import StepBatch, batch_from_trajectories
from skyrl_fast.batch.split import mini_batch_boundaries
from skyrl_fast.config import DynamicSamplingConfig
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train import Callback, CallbackError, train_agent
from skyrl_fast.train import prepare_batch as training_batch
from skyrl_fast.train.algorithm.dynamic_sampling import (
    DynamicSamplingError,
    GroupSampling,
    informative_groups,
    replacement_groups,
)
from skyrl_fast.train.algorithm.sequence_scope import sequences
from skyrl_fast.train.data.prompts import PromptSampler
from skyrl_fast.train.output.loggers import read_metrics


def trajectory(uid: str, repetition: int, rewards: list[float], failure: str | None = None):
    return Trajectory(
        uid=uid,
        repetition_id=repetition,
        steps=[
            Step(
                prompt_token_ids=[1, 2],
                response_ids=[3, 4],
                loss_mask=[1, 1],
                rollout_logprobs=[-1.0, -1.0],
                reward=reward,
                stop_reason="stop",
                policy_version=0,
                text="",
                observation="",
                llm_seconds=0.0,
                env_seconds=0.0,
            )
            for reward in rewards
        ],
        stop_reason="stop",
        env_class="fake",
        env_metrics={},
        seconds=0.0,
        failure=failure,
    )


def group(uid: str, *outcomes: float, turns: int = 2) -> list[Trajectory]:
    return [
        trajectory(uid, i, [0.0] * (turns - 1) + [outcome]) for i, outcome in enumerate(outcomes)
    ]


def sampling(kind: str | None, wanted: int, **settings: float) -> GroupSampling:
    config = DynamicSamplingConfig(type=kind, **settings)  # type: ignore[arg-type]
    return GroupSampling(config, wanted, np.random.default_rng(0))


def uids_of(trajectories: list[Trajectory]) -> list[str]:
    return [uid for uid, _ in groupby(trajectories, key=lambda t: t.uid)]


def informative(batch: StepBatch, scope: str = "trajectory", tolerance: float = 0.0) -> list[bool]:
    return informative_groups(sequences(batch, scope), tolerance=tolerance).tolist()


# --- informative groups --------------------------------------------------------------------------


@pytest.mark.spec("filter.informative-group")
def test_two_successes_of_three_turns_are_not_informative() -> None:
    turns = [Row("a", 0, 0.0), Row("a", 0, 0.0), Row("a", 0, 1.0)]
    turns += [Row("a", 1, 0.0), Row("a", 1, 0.0), Row("a", 1, 1.0)]
    assert informative(batch_of(*turns)) == [False]
    # If all steps counted, the zeros of the first turns would look like failures.
    assert informative(batch_of(*turns), "row") == [True]


def test_informative_groups() -> None:
    rows = [
        Row("differ", 0, 1.0),
        Row("differ", 1, 0.0),
        Row("alone", 0, 0.0),
        Row("failures", 0, 0.0),
        Row("failures", 1, 0.0),
        Row("success next to a placeholder", 0, 1.0),
        Row("success next to a placeholder", 1, 0.0, "env_error", ""),
        Row("two of three", 0, 1.0),
        Row("two of three", 1, 0.0),
        Row("two of three", 2, 0.0, "env_error", ""),
        Row("tokens", 0, 0.5),
        Row("tokens", 1, 0.25),
    ]
    batch = batch_of(*rows)
    got = dict(zip(batch.uids, informative(batch), strict=True))
    assert got == {
        "differ": True,
        "alone": True,
        "failures": False,
        "success next to a placeholder": False,
        "two of three": True,
        "tokens": True,
    }
    assert informative(batch, tolerance=0.25)[-1] is False


# --- replacing -----------------------------------------------------------------------------------


@pytest.mark.spec("filter.dynamic-replace")
@given(st.lists(st.booleans(), min_size=1, max_size=12).filter(any), st.integers(0, 99))
def test_replacements_are_informative_and_evenly_drawn(informative: list[bool], seed: int) -> None:
    chosen = replacement_groups(np.array(informative), random=np.random.default_rng(seed))
    assert all(informative[source] for source in chosen)
    assert all(source == place for place, source in enumerate(chosen) if informative[place])
    copies = np.bincount(chosen, minlength=len(informative))[informative]
    assert copies.max() - copies.min() <= 1


@pytest.mark.spec("filter.dynamic-sampling")
def test_replace_keeps_groups_distinct_and_complete() -> None:
    groups = sampling("replace", 3)
    trajectories = group("a", 1.0, 0.0) + group("b", 1.0, 1.0) + group("c", 0.0, 0.0)
    assert groups.add(trajectories, {"a"})
    assert uids_of(groups.trajectories()) == ["a", "a+1", "a+2"]
    assert [t.repetition_id for t in groups.trajectories()] == [0, 1] * 3
    assert [t.uid for t in trajectories] == ["a", "a", "b", "b", "c", "c"]  # not changed
    metrics = groups.metrics()
    assert metrics["dynamic_sampling/num_groups_replaced"] == 2
    assert metrics["dynamic_sampling/num_groups_uninformative"] == 2
    assert metrics["dynamic_sampling/avg_raw_reward"] == 0.5
    batch = batch_from_trajectories(groups.trajectories())
    assert mini_batch_boundaries(batch.row_uids, 1) == [(0, 4), (4, 8), (8, 12)]


def test_replace_requires_enough_informative_groups() -> None:
    good, bad = group("a", 1.0, 0.0), group("b", 1.0, 1.0)
    assert not sampling("replace", 2, min_replace_ratio=0.5).add(good + bad, {"a"})
    assert sampling("replace", 2, min_replace_ratio=0.49).add(good + bad, {"a"})
    groups = sampling("replace", 2, min_replace_ratio=0.5, max_sample_batches=2)
    groups.add(good + bad, {"a"})
    with pytest.raises(DynamicSamplingError, match=r"after 2 batches.*1 of 4.*more than 0.5"):
        groups.add(group("c", 1.0, 1.0) + group("d", 1.0, 1.0), set())


def test_no_replacement_if_all_groups_are_informative() -> None:
    groups = sampling("replace", 2)
    assert groups.add(group("a", 1.0, 0.0) + group("b", 1.0, 0.0), {"a", "b"})
    assert uids_of(groups.trajectories()) == ["a", "b"]
    assert groups.metrics()["dynamic_sampling/num_groups_replaced"] == 0


# --- filtering -----------------------------------------------------------------------------------


@pytest.mark.spec("filter.dynamic-filter", "filter.dynamic-sampling")
def test_filter_collects_over_batches_and_never_cuts_a_group() -> None:
    groups = sampling("filter", 2)
    assert not groups.add(group("a", 1.0, 1.0) + group("b", 1.0, 0.0, turns=3), {"b"})
    assert groups.add(
        group("c", 1.0, 0.0, turns=4) + group("d", 0.0, 1.0) + group("e", 0.0, 0.0), {"c", "d"}
    )
    kept = groups.trajectories()
    assert uids_of(kept) == ["b", "c"]
    assert [len(t.steps) for t in kept] == [3, 3, 4, 4]
    assert len(groups.sampled) == 10
    assert {k.removeprefix("dynamic_sampling/"): v for k, v in groups.metrics().items()} == {
        "generate/failed_trajectories": 0,
        "num_batches": 2,
        "num_groups_sampled": 5,
        "num_groups_uninformative": 2,
        "num_groups_unused": 1,
        "num_groups_replaced": 0,
        "avg_raw_reward": 0.5,
    }


@pytest.mark.spec("filter.dynamic-limit")
def test_filter_fails_after_its_limit() -> None:
    groups = sampling("filter", 2, max_sample_batches=2)
    groups.add(group("a", 1.0, 1.0) + group("b", 1.0, 1.0), set())
    groups.add(group("c", 1.0, 0.0), {"c"})  # a single missing group
    with pytest.raises(DynamicSamplingError, match=r"after 2 batches of prompts 1 of 4 sampled"):
        groups.add(group("d", 0.0, 0.0), set())


@pytest.mark.spec("filter.dynamic-limit")
def test_without_a_limit_it_continues() -> None:
    groups = sampling("filter", 1, max_sample_batches=-1)
    assert not any(groups.add(group(str(i), 1.0, 1.0), set()) for i in range(50))
    assert groups.add(group("last", 1.0, 0.0), {"last"})


def test_all_groups_are_kept_without_dynamic_sampling() -> None:
    groups = sampling(None, 2)
    failed = trajectory("b", 1, [1.0], failure="gone")
    assert groups.add([*group("a", 1.0, 1.0), *group("b", 1.0), failed], set())
    assert uids_of(groups.trajectories()) == ["a", "b"]
    assert groups.metrics() == {"generate/failed_trajectories": 1.0}


outcomes = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=3)


@given(
    st.lists(st.lists(st.tuples(outcomes, st.integers(1, 3)), min_size=1, max_size=3), max_size=6),
    st.integers(1, 4),
)
def test_filtered_batches_hold_complete_informative_groups(batches: list, wanted: int) -> None:
    groups = sampling("filter", wanted, max_sample_batches=-1)
    every: dict[str, list[Trajectory]] = {}
    enough = False
    for number, batch in enumerate(batches):
        made = {f"{number}-{i}": group(f"{number}-{i}", *o, turns=t) for i, (o, t) in
                enumerate(batch)}  # fmt: skip
        every |= made
        rows = [t for group in made.values() for t in group]
        step_batch = batch_from_trajectories(rows)
        good = informative(step_batch)
        enough = groups.add(rows, {u for u, g in zip(step_batch.uids, good, strict=True) if g})
        if enough:
            break
    wanted_uids = [
        uid for uid, group in every.items()
        if len(group) == 1 or len({t.steps[-1].reward for t in group}) > 1
    ]  # fmt: skip
    assert enough == (len(wanted_uids) >= wanted)
    kept = groups.trajectories()
    assert uids_of(kept) == wanted_uids[:wanted]
    assert kept == [t for uid in wanted_uids[:wanted] for t in every[uid]]


# --- dynamic sampling in full runs ---------------------------------------------------------------


FILTER = "trainer.algorithm.dynamic_sampling.type=filter"


def outcomes_by_uid(easy: Sequence[str]) -> Recorder:
    """Create rollouts in which these prompts always succeed, and others every second time."""

    def edit(rollouts: Any, trajectories: list[Trajectory], phase: str) -> None:
        for one in trajectories:
            always = one.uid.partition("~")[0] in easy
            one.steps[-1].reward = 1.0 if always else float(one.repetition_id % 2)

    return Recorder(edit=edit)


@pytest.mark.spec("filter.complete-groups", "metrics.filtered-groups")
def test_dynamic_sampling_fills_the_batch_from_further_prompts(folder: Path) -> None:
    make = outcomes_by_uid(["0", "1", "2"])
    config = settings(folder, "run", FILTER, "trainer.epochs=4", "trainer.max_training_steps=2")
    outcome = train(config, make)
    assert outcome.step == 2
    order = PromptSampler(8, batch_size=4, seed=42)
    want = [[str(i) for i in order.next_batch()] for _ in range(len(make.order))]
    got = [[uid.partition("~")[0] for uid in uids] for _, uids in make.order]
    assert got == want  # data order, for any number of batches per step
    rows = read_metrics(outcome.metrics)[1:]
    sampled = [int(row["dynamic_sampling/num_batches"]) for row in rows]
    assert sampled == [sum(s == step for s, _ in make.order) for step in (0, 1)]
    assert max(sampled) > 1
    assert max(row["dynamic_sampling/avg_raw_reward"] for row in rows) > 0.5
    for number, row in enumerate(rows, start=1):
        assert row["reward/avg_raw_reward"] == 0.5  # only groups with two successes in four remain
        assert row["generate/num_trajectories"] == 16
        assert row["policy/optimizer_steps"] == 2
        lines = (outcome.trajectories / f"step_00000{number}.jsonl").read_text().splitlines()
        uids = [json.loads(line)["uid"].partition("~")[0] for line in lines]
        assert len(uids) == 16 and not {*uids} & {*"012"}


def test_filtered_rows_are_not_rebuilt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Trajectory] = []

    def counting(trajectories: Sequence[Trajectory]) -> Any:
        read.extend(trajectories)
        return batch_from_trajectories(trajectories)

    monkeypatch.setattr(training_batch, "batch_from_trajectories", counting)
    make = outcomes_by_uid(["0", "1", "2"])
    train(settings(folder, "run", FILTER, "trainer.epochs=4", "trainer.max_training_steps=2"), make)
    assert len(read) == 4 * sum(len(uids) for _, uids in make.order)


@pytest.mark.spec("filter.data-position")
def test_dynamic_sampling_resumes_at_its_data_position(folder: Path) -> None:
    wanted = [FILTER, "trainer.epochs=6", "trainer.max_training_steps=4"]
    complete, first, second = (outcomes_by_uid(["0", "1", "2"]) for _ in range(3))
    expected = train(settings(folder, "expected", *wanted), complete)

    async def until_second_batch_of_step_2(step: int) -> None:
        if [s for s, _ in first.order].count(2) == 2:
            raise RuntimeError("gone")

    first.during = until_second_batch_of_step_2
    with pytest.raises(RuntimeError, match="gone"):
        train(settings(folder, "broken", *wanted), first)
    outcome = train(settings(folder, "broken", *wanted, RESUME), second)
    assert steady(outcome.metrics) == steady(expected.metrics)
    done = [call for call in first.order if call[0] < 2]
    assert done + second.order == complete.order


@pytest.mark.spec("filter.dynamic-data-end")
def test_run_ends_if_prompts_run_out_before_the_batch_is_full(folder: Path) -> None:
    one_epoch = (FILTER, "trainer.epochs=1")
    outcome = train(settings(folder, "run", *one_epoch), outcomes_by_uid(["0", "1", "2"]))
    # Eight prompts, five of them informative: one batch of four, and one that is not filled.
    assert (outcome.step, outcome.total_steps, outcome.signal) == (1, 2, None)
    assert outcome.checkpoint is not None and outcome.checkpoint.name == "step_000001"
    assert outcome.after is not None
    again = train(settings(folder, "run", *one_epoch, RESUME), outcomes_by_uid(["0", "1", "2"]))
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
    wanted = "without a training step: 0 of 8 sampled groups are informative, for a batch of 4"
    with pytest.raises(DynamicSamplingError, match=wanted):
        train(settings(folder, "run", *options, "trainer.epochs=1"), outcomes_by_uid("01234567"))


@pytest.mark.spec("metrics.reported-once")
def test_resume_after_prompts_ran_out_repeats_nothing(folder: Path) -> None:
    order = PromptSampler(8, batch_size=4, seed=42)
    order.next_batch()
    alike = [str(prompt) for prompt in order.next_batch()[:2]]  # of the second batch
    for epochs, wanted in ((1, 1), (1, 1), (2, 3)):  # again, then with more data
        config = settings(folder, "run", FILTER, f"trainer.epochs={epochs}", RESUME)
        outcome = train(config, outcomes_by_uid(alike))
        assert outcome.step == wanted
        steps = [row["step"] for row in read_metrics(outcome.metrics)]
        # The step could not tell that it was the last: its evaluation has a separate row.
        assert steps[:3] == [0, 1, 1] and steps[3:].count(1) == 0


@pytest.mark.spec("metrics.reported-once")
def test_last_evaluation_is_reported_once_if_its_callback_fails(folder: Path) -> None:
    class Failing(Callback):
        def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == 1:
                raise RuntimeError("of the callback")

    order = PromptSampler(8, batch_size=4, seed=42)
    order.next_batch()
    alike = [str(prompt) for prompt in order.next_batch()[:2]]
    config = settings(folder, "run", FILTER, "trainer.epochs=1", RESUME)
    with pytest.raises(CallbackError, match="of the callback"):
        train_agent(config, make_rollouts=outcomes_by_uid(alike), callbacks=[Failing()])
    outcome = train(config, outcomes_by_uid(alike))
    rows = read_metrics(outcome.metrics)
    evaluations = [row["step"] for row in rows if "eval/all/avg_score" in row]
    assert evaluations == [0, 1]


def test_replacement_keeps_the_number_of_groups_and_steps(folder: Path) -> None:
    replace = "trainer.algorithm.dynamic_sampling={type: replace, min_replace_ratio: 0}"
    config = settings(folder, "run", replace, "trainer.epochs=1")
    rows = read_metrics(train(config, outcomes_by_uid("0123")).metrics)[1:]
    assert sum(row["dynamic_sampling/num_groups_replaced"] for row in rows) > 0
    for row in rows:
        assert row["reward/avg_raw_reward"] == 0.5
        assert row["policy/optimizer_steps"] == 2


@pytest.mark.spec("loss.all-masked-step")
def test_batch_without_informative_groups_changes_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filtered = "trainer.algorithm.zero_variance_filter=true"
    outcome = train(
        settings(folder, "run", filtered, "trainer.epochs=1"), outcomes_by_uid("01234567")
    )
    assert "no token of the batch's 32 rows is trained" in caplog.text
    rows = read_metrics(outcome.metrics)[1:]
    assert outcome.step == 2
    for row in rows:
        assert (row["policy/loss"], row["policy/grad_norm"]) == (0.0, 0.0)
        assert row["reward/num_zero_variance_filtered"] == 4
        assert row["reward/avg_raw_reward"] == 1.0
