"""Rows to train: steps, merged steps or full trajectories, by the configuration.

Section 10 of docs/spec.md.
"""

from __future__ import annotations

import pytest
from _merging import drifted, worked_output
from _rows import assert_same

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import ConfigError, GeneratorConfig
from skyrl_fast.config.loading import load_config
from skyrl_fast.train.algorithm.training_rows import training_rows
from skyrl_fast.train.metrics.rollouts import batch_metrics


def config(*overrides: str) -> GeneratorConfig:
    needed = ["data.train_data=[a.jsonl]", "trainer.policy.model.path=m"]
    return load_config(None, [*needed, *overrides]).generator


@pytest.mark.spec("merge.off", "merge.on", "merge.row-per-trajectory", "merge.outcome")
def test_rows_are_steps_merged_steps_or_trajectories() -> None:
    steps = StepBatch.from_generator_output(worked_output())
    assert training_rows(steps, config()) is steps
    merged = training_rows(steps, config("generator.merge_stepwise_output=true"))
    assert_same(merged, steps.merged())
    metrics = batch_metrics(merged, num_rows_before_merge=steps.num_rows)
    assert metrics["generate/num_seq_before_merge"] == 6
    assert metrics["generate/num_seq_after_merge"] == 3
    grown = steps.rows(slice(0, 3))
    rows = training_rows(grown, config("generator.step_wise_trajectories=false"))
    assert rows.num_rows == 1
    assert rows.row_rewards.tolist() == [1.75]  # every step's reward, at the end of its response
    assert rows.rewards.tolist() == [0.25, 0, 0, 0.5, 0, 1.0]


@pytest.mark.spec("merge.row-per-trajectory")
def test_a_context_that_was_rewritten_is_not_one_row() -> None:
    steps = StepBatch.from_generator_output(worked_output())
    with pytest.raises(ValueError, match=r"sample 1 of prompt 'a' the prompt of turn 2 .*agree on"):
        training_rows(steps, config("generator.step_wise_trajectories=false"))


def test_drift_is_a_setting() -> None:
    steps = StepBatch.from_generator_output(drifted([1, 2, 3, 4, 50, 9]))
    merge = "generator.merge_stepwise_output=true"
    realign = "generator.merge_drift=realign"
    assert training_rows(steps, config(merge)).num_rows == 2
    assert training_rows(steps, config(merge, realign)).num_rows == 1
    one = config(merge, realign, "generator.merge_max_drift_tokens=1")
    assert training_rows(steps, one).num_rows == 2


def test_merging_full_trajectories_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"generator.merge_stepwise_output: expected false"):
        config("generator.step_wise_trajectories=false", "generator.merge_stepwise_output=true")
