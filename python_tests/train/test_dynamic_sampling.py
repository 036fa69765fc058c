"""Dynamic sampling: groups are judged by outcomes, kept as a unit, or replaced by copies."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from _rows import Row, batch_of
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.batch import StepBatch, batch_from_trajectories
from skyrl_fast.batch.split import mini_batch_boundaries
from skyrl_fast.config import DynamicSamplingConfig
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.algorithm.dynamic_sampling import (
    DynamicSamplingError,
    GroupSampling,
    informative_groups,
    replacement_groups,
)
from skyrl_fast.train.algorithm.sequence_scope import sequences


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


@pytest.mark.spec("filter.informative-group")
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


@pytest.mark.spec("filter.dynamic-replace", "filter.dynamic-sampling")
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


@pytest.mark.spec("filter.dynamic-replace")
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


@pytest.mark.spec("filter.dynamic-filter", "filter.dynamic-sampling")
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
