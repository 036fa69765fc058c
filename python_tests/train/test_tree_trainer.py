"""`trainer.row_layout=tree` in full runs: the curve of rows, at the cost of distinct tokens."""

from pathlib import Path
from typing import Any

import pytest
from _merging import drifted, worked_output
from _rows import assert_same
from _settings import error_of
from _training import folder as folder  # a fixture
from _training import settings, train

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import Config, ConfigError
from skyrl_fast.config.loading import load_config
from skyrl_fast.train.algorithm.training_rows import training_rows
from skyrl_fast.train.metrics.rollouts import batch_metrics
from skyrl_fast.train.output.loggers import read_metrics

SAME = ("reward/avg_raw_reward", "policy/grad_norm", "policy/loss", "eval/all/avg_score")


def metrics_of(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    return read_metrics(train(settings(folder, name, *overrides)).metrics)


@pytest.mark.spec("tree.metrics", "tree.shared-forward")
def test_run_on_trees_has_the_learning_curve_of_rows(folder: Path) -> None:
    rows = metrics_of(folder, "step", "trainer.row_layout=sequence", "trainer.max_training_steps=3")
    trees = metrics_of(folder, "tree", "trainer.row_layout=tree", "trainer.max_training_steps=3")
    for one, two in zip(rows, trees, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() & set(SAME):
            # float32 sums in another order; from the second step on through Adam's square root
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    for one, two in zip(rows[1:], trees[1:], strict=True):
        assert two["policy/row_tokens"] == one["policy/row_tokens"]
        assert two["policy/forward_tokens"] < one["policy/forward_tokens"]
        # the savings of trees are reported without them
        for name in ("", "_merged", "_tree"):
            assert (
                one[f"generate/batch_num_tokens{name}"] == two[f"generate/batch_num_tokens{name}"]
            )
        assert one["generate/batch_num_tokens_tree"] < one["generate/batch_num_tokens_merged"]
        assert two["policy/forward_tokens"] <= one["generate/batch_num_tokens_tree"]


@pytest.mark.spec("tree.reference-and-critic")
@pytest.mark.parametrize(
    "overrides",
    [
        ("generator.merge_stepwise_output=true",),
        ("generator.step_wise_trajectories=false",),
        ("trainer.algorithm.use_kl_loss=true", "trainer.update_epochs_per_batch=2"),
        ("trainer.algorithm.policy_loss_type=gspo", "trainer.max_tokens_per_microbatch=30"),
        ("trainer.gradient_checkpointing=true",),
    ],
)
def test_trees_work_with_other_settings(folder: Path, overrides: tuple[str, ...]) -> None:
    (_, rows), (_, trees) = (
        metrics_of(folder, name, f"trainer.row_layout={name}", "trainer.max_training_steps=1",
                   "trainer.eval_interval=-1", *overrides)[:2]
        for name in ("auto", "tree")
    )  # fmt: skip
    for name in ("policy/grad_norm", "policy/loss", "generate/batch_num_seq"):
        # The mean of several optimizer steps: Adam's first steps magnify rounding.
        assert trees[name] == pytest.approx(rows[name], rel=2e-2, abs=1e-5), name


def test_rows_merged_equals_skyrls_setting(folder: Path) -> None:
    sequences = ("trainer.rows=merged", "trainer.row_layout=sequence")
    one = metrics_of(folder, "a", *sequences, "trainer.max_training_steps=1")
    assert one[1]["policy/tree_group_share"] == 0
    two = metrics_of(
        folder, "b", "generator.merge_stepwise_output=true", "trainer.max_training_steps=1"
    )
    assert two[1]["policy/tree_group_share"] == 1
    assert one[1]["generate/num_seq_after_merge"] == two[1]["generate/num_seq_after_merge"]
    for name in ("policy/grad_norm", "policy/loss"):
        assert one[1][name] == pytest.approx(two[1][name], rel=1e-5)  # other orders of sums


def test_one_row_per_trajectory_can_be_sequences(folder: Path) -> None:
    one_row = ("generator.step_wise_trajectories=false", "trainer.max_training_steps=1")
    trees = metrics_of(folder, "a", *one_row)[1]
    sequences = metrics_of(folder, "b", "trainer.row_layout=sequence", *one_row)[1]
    assert (trees["policy/tree_group_share"], sequences["policy/tree_group_share"]) == (1, 0)
    assert sequences["generate/batch_num_seq"] == trees["generate/batch_num_seq"]
    for name in ("policy/grad_norm", "policy/loss"):
        assert sequences[name] == pytest.approx(trees[name], rel=1e-5)  # other orders of sums


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["trainer.row_layout=trees"], "did you mean 'tree'"),
        (["trainer.rows=step", "generator.merge_stepwise_output=true"], "got 'step'"),
        (["trainer.rows=merged", "generator.step_wise_trajectories=false"], "got 'merged'"),
        (
            ["generator.merge_stepwise_output=true", "generator.step_wise_trajectories=false"],
            "expected false with generator.step_wise_trajectories=false",
        ),
        (
            ["trainer.rows=merged", "trainer.algorithm.advantage_estimator=gigpo"],
            "per turn and need a row for each turn, got gigpo",
        ),
    ],
)
def test_incompatible_row_settings(overrides: list[str], wanted: str) -> None:
    assert wanted in error_of(*overrides)


# --- rows to train -------------------------------------------------------------------------------


def config(*overrides: str) -> Config:
    needed = ["data.train_data=[a.jsonl]", "trainer.policy.model.path=m"]
    return load_config(None, [*needed, *overrides])


def rows_of(steps: StepBatch, *overrides: str) -> StepBatch:
    chosen = config(*overrides)
    return training_rows(steps, chosen.generator, form=chosen.trainer.rows)


@pytest.mark.spec("merge.off", "merge.on", "merge.outcome")
def test_rows_are_steps_merged_steps_or_trajectories() -> None:
    steps = StepBatch.from_generator_output(worked_output())
    assert rows_of(steps) is steps
    merged = rows_of(steps, "trainer.rows=merged")
    assert_same(merged, steps.merged())
    metrics = batch_metrics(merged, num_rows_before_merge=steps.num_rows)
    assert metrics["generate/num_seq_before_merge"] == 6
    assert metrics["generate/num_seq_after_merge"] == 3
    grown = steps.rows(slice(0, 3))
    rows = rows_of(grown, "trainer.rows=trajectory")
    assert rows.num_rows == 1
    assert rows.row_rewards.tolist() == [1.75]  # every step's reward, at the end of its response
    assert rows.rewards.tolist() == [0.25, 0, 0, 0.5, 0, 1.0]


@pytest.mark.spec("merge.row-per-trajectory")
def test_a_context_that_was_rewritten_is_not_one_row() -> None:
    steps = StepBatch.from_generator_output(worked_output())
    with pytest.raises(ValueError, match=r"sample 1 of prompt 'a' the prompt of turn 2 .*agree on"):
        rows_of(steps, "trainer.rows=trajectory")


def test_drift_is_a_setting() -> None:
    steps = StepBatch.from_generator_output(drifted([1, 2, 3, 4, 50, 9]))
    merge = "trainer.rows=merged"
    realign = "generator.merge_drift=realign"
    assert rows_of(steps, merge).num_rows == 2
    assert rows_of(steps, merge, realign).num_rows == 1
    one = (merge, realign, "generator.merge_max_drift_tokens=1")
    assert rows_of(steps, *one).num_rows == 2


def test_merging_full_trajectories_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"generator.merge_stepwise_output: expected false"):
        config("generator.step_wise_trajectories=false", "generator.merge_stepwise_output=true")
