"""Rows of summaries: advantages, weights, masks and metrics, by hand (docs/spec.md)."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from skyrl_fast.batch import StepBatch, batch_from_trajectories
from skyrl_fast.config import Config
from skyrl_fast.config.parse import as_config
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.algorithm.advantages import compute_advantages
from skyrl_fast.train.algorithm.anchor_states import anchor_ids
from skyrl_fast.train.algorithm.off_policy import apply_off_policy_correction
from skyrl_fast.train.algorithm.training_rows import with_records
from skyrl_fast.train.metrics.calls import call_metrics, loss_share_of_summaries
from skyrl_fast.train.prepare_batch import training_batch

TOKENS = 2  # of each answer


def make_trajectory(
    sample: int,
    calls: Sequence[tuple[str, float]],
    *,
    stop: str = "stop",
    reasons: Sequence[str] = (),
    states: Sequence[str] = (),
) -> Trajectory:
    """Return a trajectory of calls (kind, reward); a summary ends its context."""
    steps: list[Step] = []
    prompt = [1]
    parent = None
    for number, (kind, reward) in enumerate(calls):
        response = [10 + number, 20 + number]
        steps.append(
            Step(
                prompt_token_ids=list(prompt),
                response_ids=response,
                loss_mask=[1] * TOKENS,
                rollout_logprobs=[-1.0] * TOKENS,
                reward=reward,
                stop_reason=reasons[number] if reasons else "stop",
                policy_version=0,
                text="",
                observation="",
                llm_seconds=0.0,
                env_seconds=0.0,
                number=number,
                parent=parent,
                state=states[number] if states else str(number),
                kind=kind,
            )
        )
        if kind == "summarise":
            prompt = [1, 30 + number]
            parent = None
        else:
            prompt = [*prompt, *response, 5]
            parent = number
    steps[-1].stop_reason = stop
    return Trajectory("p", sample, steps, stop_reason=stop)


def rows_of(trajectories: Sequence[Trajectory]) -> StepBatch:
    return with_records(batch_from_trajectories(trajectories), trajectories)


def of_rows(batch: StepBatch) -> list[float]:
    assert batch.advantages is not None
    values = batch.advantages.reshape(-1, TOKENS)
    assert torch.equal(values[:, 0], values[:, 1])
    return values[:, 0].tolist()


SUMMARISED = [("act", 1.0), ("summarise", 0.0), ("act", 2.0)]
PLAIN = [("act", 1.0), ("act", 0.0)]


@pytest.mark.spec("compaction.once")
def test_a_trajectory_counts_once_whatever_its_number_of_contexts() -> None:
    many = [("act", 0.0), ("summarise", 0.0)] * 3 + [("act", 3.0)]
    batch = rows_of([make_trajectory(0, many), make_trajectory(1, PLAIN)])
    found = of_rows(compute_advantages(batch, estimator="dr_grpo"))
    assert found == [1.5] * 7 + [-1.5] * 2


@pytest.mark.spec("compaction.turns")
def test_returns_of_turns_do_not_count_a_summary() -> None:
    batch = rows_of([make_trajectory(0, SUMMARISED), make_trajectory(1, PLAIN)])
    found = of_rows(compute_advantages(batch, estimator="turn_level_returns", gamma=0.5))
    # G of the turns: 1 + 0.5 * 2, and 2; the summary has that of the turn that it leads to.
    assert found == [2.0, 2.0, 2.0, 1.0, 0.0]


@pytest.mark.spec("compaction.turns")
def test_a_turn_is_compared_with_the_same_turn_of_others() -> None:
    batch = rows_of([make_trajectory(0, SUMMARISED), make_trajectory(1, PLAIN)])
    found = of_rows(compute_advantages(batch, estimator="turn_level_group", gamma=1.0))
    assert found == [3.0 - 1.0, 2.0 - 0.0, 2.0 - 0.0, 1.0 - 3.0, 0.0 - 2.0]


@pytest.mark.spec("compaction.turns")
def test_the_reward_of_a_summary_is_that_of_its_turn() -> None:
    calls = [("act", 1.0), ("summarise", 4.0), ("act", 2.0), ("summarise", 8.0)]
    batch = rows_of([make_trajectory(0, calls, stop="length")])
    found = of_rows(compute_advantages(batch, estimator="turn_level_returns", gamma=0.5))
    last = 4.0 + 2.0 + 8.0
    assert found == [1.0 + 0.5 * last, last, last, last]


@pytest.mark.spec("compaction.turns")
def test_summaries_alone_are_the_turns_of_a_policy() -> None:
    calls = [("summarise", 1.0), ("summarise", 2.0)]
    batch = rows_of([make_trajectory(0, calls), make_trajectory(1, PLAIN)])
    found = of_rows(compute_advantages(batch, estimator="turn_level_returns", gamma=1.0))
    assert found == [3.0, 2.0, 1.0, 0.0]


@pytest.mark.spec("compaction.turns")
def test_a_summary_has_no_state() -> None:
    trajectories = [
        make_trajectory(0, SUMMARISED, states=["start", "door", "door"]),
        make_trajectory(1, PLAIN, states=["start", "door"]),
    ]
    batch = rows_of(trajectories).with_(anchor_ids=anchor_ids(trajectories))
    found = of_rows(compute_advantages(batch, estimator="gigpo", gamma=1.0, scale_by_std=False))
    episodes = [1.0, -1.0]  # 3 and 1, around 2
    at_start = [1.0, -1.0]  # returns 3 and 1
    at_door = [1.0, -1.0]  # returns 2 and 0: with the summary's there were three
    assert found == [
        episodes[0] + at_start[0],
        episodes[0] + at_door[0],
        episodes[0] + at_door[0],
        episodes[1] + at_start[1],
        episodes[1] + at_door[1],
    ]


def config_with(**changes: Any) -> Config:
    return as_config(
        {
            "data.train_data": ["given"],
            "trainer.policy.model.path": "model",
            "generator.n_samples_per_prompt": 2,
            "generator.context": "compact",
            **changes,
        }
    )


@pytest.mark.spec("compaction.weight")
@pytest.mark.parametrize("rows", ["step", "merged"])
def test_summaries_have_a_weight_of_their_own(rows: str) -> None:
    trajectories = [make_trajectory(0, SUMMARISED), make_trajectory(1, PLAIN)]
    config = config_with(**{"trainer.algorithm.summary_weight": 0.25, "trainer.rows": rows})
    batch, _, _ = training_batch(trajectories, config)
    assert batch.is_summary is not None
    assert batch.token_weights is not None
    assert int(batch.is_summary.sum()) == TOKENS
    expected = torch.where(batch.is_summary != 0, 0.25, 1.0)
    assert torch.equal(batch.token_weights, expected)
    assert training_batch(trajectories, config_with())[0].token_weights is None


@pytest.mark.spec("compaction.weight")
def test_weights_of_a_correction_are_multiplied() -> None:
    trajectories = [make_trajectory(0, SUMMARISED), make_trajectory(1, PLAIN)]
    config = config_with(
        **{
            "trainer.algorithm.summary_weight": 0.25,
            "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
            "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high": 1.5,
        }
    )
    batch, _, _ = training_batch(trajectories, config)
    assert batch.rollout_logprobs is not None
    batch = batch.with_(old_logprobs=batch.rollout_logprobs + 1.0)  # e, above the bound
    corrected, _ = apply_off_policy_correction(batch, config.trainer.algorithm)
    assert batch.is_summary is not None
    expected = torch.where(batch.is_summary != 0, 0.25 * 1.5, 1.5)
    assert torch.equal(corrected.token_weights, expected)


@pytest.mark.spec("compaction.overflow")
@pytest.mark.parametrize("rows", ["step", "merged"])
@pytest.mark.parametrize("stop", ["length", "max_turns", "timeout"])
def test_a_summarised_trajectory_that_did_not_end_by_itself_is_masked(rows: str, stop: str) -> None:
    trajectories = [make_trajectory(0, SUMMARISED, stop=stop), make_trajectory(1, PLAIN, stop=stop)]
    name = "trainer.algorithm.mask_overflowed_summaries"
    batch, units, metrics = training_batch(
        trajectories, config_with(**{name: True, "trainer.rows": rows})
    )
    assert batch.trajectory_ids.dtype == torch.int32
    rows_of_first = batch.trajectory_ids == 0
    lengths = batch.response_lengths.tolist()
    trained = torch.stack([mask.sum() for mask in batch.loss_mask.split(lengths)])
    assert trained[rows_of_first].tolist() == [0] * int(rows_of_first.sum())
    assert bool((trained[~rows_of_first] > 0).all())
    assert metrics["generate/num_overflowed_filtered"] == 1.0
    assert units.live.tolist() == [False, True]
    assert batch.row_rewards[rows_of_first][-1] == 2.0  # it still counts in its group


@pytest.mark.spec("compaction.overflow")
@pytest.mark.parametrize("rows", ["step", "merged"])
def test_a_truncated_summary_is_masked_alone(rows: str) -> None:
    cut = make_trajectory(0, SUMMARISED, reasons=["stop", "length", "stop"])
    name = "trainer.algorithm.mask_overflowed_summaries"
    batch, _, metrics = training_batch(
        [cut, make_trajectory(1, PLAIN)], config_with(**{name: True, "trainer.rows": rows})
    )
    assert batch.is_summary is not None
    assert not bool(batch.loss_mask[batch.is_summary != 0].any())
    assert int(batch.loss_mask.sum()) == TOKENS * 4
    assert metrics["generate/num_overflowed_filtered"] == 0.0


@pytest.mark.spec("compaction.metrics")
def test_calls_and_contexts_are_counted() -> None:
    long = [("act", 0.0), ("summarise", 0.0)] * 2 + [("other", 0.0), ("act", 1.0)]
    trajectories = [
        make_trajectory(0, SUMMARISED),
        make_trajectory(1, PLAIN),
        make_trajectory(2, long),
        Trajectory("p", 3, failure="broken"),
    ]
    metrics = call_metrics(trajectories)
    assert metrics == {
        "generate/calls/act": pytest.approx(7 / 3),
        "generate/calls/act_token_share": pytest.approx(7 / 11),
        "generate/calls/summarise": 1.0,
        "generate/calls/summarise_token_share": pytest.approx(3 / 11),
        "generate/calls/other": pytest.approx(1 / 3),
        "generate/calls/other_token_share": pytest.approx(1 / 11),
        "generate/avg_num_contexts": 2.0,
        "generate/max_num_contexts": 3.0,
        "generate/avg_peak_prompt_length": pytest.approx((4 + 4 + 5) / 3),
        "generate/max_peak_prompt_length": 5.0,
        "reward/contexts_1": 0.0,
        "reward/contexts_2": 2.0,
        "reward/contexts_3_or_more": 1.0,
    }
    assert call_metrics([trajectories[1]]) == {}
    assert call_metrics([trajectories[1]], always=True)["generate/avg_num_contexts"] == 1.0
    assert call_metrics([trajectories[3]], always=True) == {}


@pytest.mark.spec("compaction.metrics")
def test_turns_are_counted_without_summaries_and_the_share_of_the_loss_is_told() -> None:
    trajectories = [make_trajectory(0, SUMMARISED), make_trajectory(1, PLAIN)]
    config = config_with(**{"trainer.algorithm.summary_weight": 0.5})
    batch, _, metrics = training_batch(trajectories, config)
    assert metrics["generate/avg_num_turns"] == 2.0
    batch = compute_advantages(batch, estimator="dr_grpo")
    # Each token has |advantage| 1: four turns of two, and a summary of two with weight 0.5.
    assert loss_share_of_summaries(batch)["policy/summary_loss_share"] == pytest.approx(1 / 9)
    assert loss_share_of_summaries(rows_of([trajectories[1]])) == {}
