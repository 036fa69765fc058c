"""`trainer.rows=tree` in full runs: the curve of rows, at the cost of distinct tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from _settings import NEEDED, error_of
from _training import folder as folder  # a fixture
from _training import settings, train

from skyrl_fast.config.loading import load_config
from skyrl_fast.train.output.loggers import read_metrics

SAME = ("reward/avg_raw_reward", "policy/grad_norm", "policy/loss", "eval/all/avg_score")


def metrics_of(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    return read_metrics(train(settings(folder, name, *overrides)).metrics)


@pytest.mark.spec("tree.metrics", "tree.rows-setting", "tree.shared-forward")
def test_run_on_trees_has_the_learning_curve_of_rows(folder: Path) -> None:
    rows = metrics_of(folder, "step", "trainer.rows=step", "trainer.max_training_steps=3")
    trees = metrics_of(folder, "tree", "trainer.rows=tree", "trainer.max_training_steps=3")
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


@pytest.mark.spec("tree.reference-and-critic", "tree.rows-setting")
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
        metrics_of(folder, name, f"trainer.rows={name}", "trainer.max_training_steps=1",
                   "trainer.eval_interval=-1", *overrides)[:2]
        for name in ("auto", "tree")
    )  # fmt: skip
    for name in ("policy/grad_norm", "policy/loss", "generate/batch_num_seq"):
        # The mean of several optimizer steps: Adam's first steps magnify rounding.
        assert trees[name] == pytest.approx(rows[name], rel=2e-2, abs=1e-5), name


@pytest.mark.spec("tree.rows-setting")
def test_rows_merged_equals_the_generator_setting(folder: Path) -> None:
    one = metrics_of(folder, "a", "trainer.rows=merged", "trainer.max_training_steps=1")
    assert one[1]["policy/tree_group_share"] == 0
    two = metrics_of(
        folder, "b", "generator.merge_stepwise_output=true", "trainer.max_training_steps=1"
    )
    assert two[1]["policy/tree_group_share"] == 1
    assert one[1]["generate/num_seq_after_merge"] == two[1]["generate/num_seq_after_merge"]
    for name in ("policy/grad_norm", "policy/loss"):
        assert one[1][name] == pytest.approx(two[1][name], rel=1e-5)  # other orders of sums


@pytest.mark.spec("tree.rows-setting")
def test_one_row_per_trajectory_can_be_sequences(folder: Path) -> None:
    one_row = ("generator.step_wise_trajectories=false", "trainer.max_training_steps=1")
    trees = metrics_of(folder, "a", *one_row)[1]
    sequences = metrics_of(folder, "b", "trainer.rows=merged", *one_row)[1]
    assert (trees["policy/tree_group_share"], sequences["policy/tree_group_share"]) == (1, 0)
    assert sequences["generate/batch_num_seq"] == trees["generate/batch_num_seq"]
    for name in ("policy/grad_norm", "policy/loss"):
        assert sequences[name] == pytest.approx(trees[name], rel=1e-5)  # other orders of sums


@pytest.mark.spec("tree.rows-setting")
@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["trainer.rows=trees"], "did you mean 'tree'"),
        (["trainer.rows=step", "generator.merge_stepwise_output=true"], "got step"),
        (["trainer.rows=step", "generator.step_wise_trajectories=false"], "got step"),
        (
            [
                "generator.merge_stepwise_output=true",
                "generator.step_wise_trajectories=false",
            ],
            "expected false where generator.step_wise_trajectories is false",
        ),
        (
            ["trainer.rows=merged", "trainer.algorithm.advantage_estimator=gigpo"],
            "gigpo is per turn",
        ),
    ],
)
def test_incompatible_row_settings(overrides: list[str], wanted: str) -> None:
    assert wanted in error_of(*overrides)


def test_turn_level_estimators_on_trees() -> None:
    options = ["trainer.rows=tree", "trainer.algorithm.advantage_estimator=gigpo"]
    assert load_config(None, [*NEEDED, *options]).trainer.rows == "tree"
