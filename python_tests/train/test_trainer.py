"""Complete runs whose rollouts sample from the policy: learning, rows, settings, evaluation."""

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _fakes import FakeRollouts, tiny_model
from _training import RESUME, DiedError, Recorder, dies_at, settings, steady, train
from _training import folder as folder  # a fixture

from skyrl_fast.config import Config
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train import trainer as trainer_module
from skyrl_fast.train.data.prompts import load_prompts
from skyrl_fast.train.flow.rollouts import split_rollout_time
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.trajectory_store import read_trajectories


def test_a_full_run_learns_and_leaves_all_files(folder: Path) -> None:
    recorder = Recorder()
    outcome = train(
        settings(folder, "run", "trainer.epochs=12", "generator.n_samples_per_prompt=8"), recorder
    )
    assert (outcome.step, outcome.total_steps, outcome.signal) == (24, 24, None)
    assert outcome.before is not None and outcome.after is not None
    rows = read_metrics(outcome.metrics)
    assert [row["step"] for row in rows] == list(range(25))
    early = [row["reward/avg_raw_reward"] for row in rows[1:5]]
    late = [row["reward/avg_raw_reward"] for row in rows[-4:]]
    assert sum(late) / 4 > sum(early) / 4 + 0.1
    assert rows[1]["policy/optimizer_steps"] == 2
    assert rows[1]["generate/avg_num_turns"] == 2
    assert {f"timing/{part}" for part in ("generate", "environment", "batch", "sync")} <= set(
        rows[1]
    )
    assert recorder.rollouts[0].version == 24
    assert recorder.rollouts[0].closed
    record = json.loads((outcome.trajectories / "step_000001.jsonl").read_text().splitlines()[0])
    assert len(record["turns"]) == 2 and record["turns"][0]["context"].startswith("1 ")
    assert (outcome.trajectories / "eval_step_000000.jsonl").exists()
    assert outcome.checkpoint == folder / "run/checkpoints/step_000024"
    assert "agent, turn 2" in outcome.sample


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.policy_mini_batch_size=4"],
        ["trainer.policy_mini_batch_size=2"],
        ["trainer.policy_mini_batch_size=4", "trainer.algorithm.old_logprobs=rollout"],
        # Those of the second mini-batch are seen after a step, which must not change them here.
        [
            "trainer.policy_mini_batch_size=2",
            "trainer.algorithm.old_logprobs=rollout",
            "trainer.policy.optimizer_config.lr=0",
        ],
        ["trainer.policy_mini_batch_size=4", "generator.merge_stepwise_output=true"],
    ],
)
@pytest.mark.spec("store.trained-values")
def test_store_contains_the_trained_values(folder: Path, overrides: list[str]) -> None:
    outcome = train(settings(folder, "run", "trainer.epochs=1", *overrides))
    stored = list(read_trajectories(outcome.run_path, phase="train"))
    assert [t.entry.step for t in stored] == [1] * 16 + [2] * 16
    rewards = [t.entry.reward for t in stored if t.entry.step == 1]
    row = read_metrics(outcome.metrics)[1]
    assert sum(rewards) / 16 == pytest.approx(row["reward/avg_raw_reward"])
    assert all(t.entry.staleness == 0 for t in stored)
    compared = 0
    for trajectory in stored:
        for step in trajectory.steps:
            assert step.loss_mask.tolist() == [1, 1]
            assert step.advantages.tolist() == pytest.approx([trajectory.entry.advantage] * 2)
            seen = ~np.isnan(step.trainer_logprobs)
            # Rows with advantage 0 are skipped, unless old log-probabilities are computed.
            assert seen.all() or trajectory.entry.advantage == 0
            # The sampler is the trainer's model: the only differences are rounding.
            gap = np.abs(step.trainer_logprobs - step.rollout_logprobs)[seen]
            assert (gap < 1e-4).all()
            compared += len(gap)
    assert compared > 0


def test_engine_sleeps_only_while_the_trainer_computes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations, checkpoints and the resumed run find an engine that is awake."""
    events: list[str] = []
    computed = trainer_module.update_policy

    def update(*arguments: Any, **options: Any) -> dict[str, float]:
        events.append("train")
        return computed(*arguments, **options)

    monkeypatch.setattr(trainer_module, "update_policy", update)

    class Events(FakeRollouts):
        async def before_batch(self, step: int, phase: str) -> None:
            events.append("generate" if phase == "train" else phase)

        async def sleep(self, policy: Any) -> None:
            events.append("sleep")

        async def update_weights(self, policy: Any, *, version: int) -> dict[str, float]:
            events.append("wake")
            return await super().update_weights(policy, version=version)

    async def make(config: Config, tokenizer: Any, model_path: str) -> FakeRollouts:
        return Events(config, tiny_model(seed=1))

    def run(*overrides: str) -> None:
        events.clear()
        train(settings(folder, "run", "trainer.update_epochs_per_batch=1", *overrides), make)

    run("trainer.max_training_steps=3")
    step = ["generate", "sleep", "train", "wake"]
    assert events == ["wake", "eval", *step, *step, "eval", *step, "eval"]
    run("trainer.max_training_steps=4", "trainer.resume_mode=latest")
    assert events == ["wake", *step, "eval"]


def test_trainer_and_sampler_agree_on_policy(folder: Path) -> None:
    outcome = train(settings(folder, "run", "trainer.epochs=1", "trainer.policy_mini_batch_size=4"))
    for row in read_metrics(outcome.metrics)[1:]:
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-5  # float32 noise


@pytest.mark.spec("merge.off", "merge.on", "merge.row-per-trajectory")
def test_step_merged_and_trajectory_rows_learn_the_same(folder: Path) -> None:
    first = {}
    for name, override in {
        "step": "generator.step_wise_trajectories=true",
        "merged": "generator.merge_stepwise_output=true",
        "trajectory": "generator.step_wise_trajectories=false",
    }.items():
        outcome = train(settings(folder, name, override, "trainer.max_training_steps=1"))
        first[name] = read_metrics(outcome.metrics)[1]
    for name in ("merged", "trajectory"):  # 16 trajectories of two turns each
        row = first[name]
        assert row["generate/num_seq_before_merge"] == 32
        assert row["generate/num_seq_after_merge"] == row["generate/batch_num_seq"] == 16
        assert row["generate/batch_num_tokens"] < first["step"]["generate/batch_num_tokens"]
        for same in ("generate/avg_num_turns", "reward/avg_raw_reward", "policy/grad_norm"):
            # The same tokens are trained after the same tokens: float32 sums in another order.
            assert row[same] == pytest.approx(first["step"][same], rel=1e-4), same
    assert first["step"]["policy/grad_norm"] > 0


def test_metrics_are_determined_by_the_seed(folder: Path) -> None:
    one = steady(train(settings(folder, "a")).metrics)
    two = steady(train(settings(folder, "b")).metrics)
    three = steady(train(settings(folder, "c", "trainer.seed=7")).metrics)
    assert one == two
    assert one != three


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("trainer.policy.model.path=./nowhere", "model folder not found: ./nowhere"),
        ("data.train_data=[nowhere.jsonl]", "data file not found: nowhere.jsonl"),
        ("trainer.train_batch_size=32", "at least trainer.train_batch_size=32 prompts, got 8"),
        ("trainer.logger=[wandb]", "wandb is not installed: pip install wandb"),
        ("trainer.logger=[mlflow]", "mlflow is not installed: pip install mlflow"),
        ("trainer.logger=[trackio]", "trackio is not installed: pip install trackio"),
        ("trainer.logger=['json:Nothing']", "trainer.logger: 'json' has no 'Nothing'"),
        ("trainer.logger=['json:loads']", "trainer.logger: json:loads did not start: TypeError"),
    ],
)
def test_missing_inputs_are_reported_before_the_engine_starts(
    folder: Path, override: str, wanted: str
) -> None:
    package = wanted.partition(" ")[0]
    if "is not installed" in wanted and importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    recorder = Recorder()
    extra = ["trainer.policy_mini_batch_size=4"] if "batch" in override else []
    with pytest.raises(SetupError, match=wanted):
        train(settings(folder, "run", override, *extra), recorder)
    assert recorder.rollouts == []


@pytest.mark.spec("filter.zero-reward-on-non-stop", "filter.overlong", "metrics.filtered-groups")
def test_overlong_and_unfinished_filters_from_the_settings(folder: Path) -> None:
    def edit(rollouts: FakeRollouts, trajectories: list[Trajectory], phase: str) -> None:
        first = 3 if len(rollouts.calls[-1][2]) == 1 else 0  # the batch's first group
        for number, one in enumerate(trajectories):
            one.steps[-1].reward = float(number < first)
            if number < first:
                one.stop_reason = one.steps[-1].stop_reason = "length"

    config = settings(
        folder, "run", "generator.zero_reward_on_non_stop=true", "trainer.epochs=1",
        "generator.apply_overlong_filtering=true",
    )  # fmt: skip
    row = read_metrics(train(config, Recorder(edit=edit)).metrics)[1]
    assert row["generate/num_zeroed_rewards"] == 3
    assert row["generate/num_overlong_filtered"] == 3
    assert row["reward/avg_raw_reward"] == 0.0
    assert row["generate/avg_tokens_non_zero_rewards"] == 4  # of the rollouts before filters


@pytest.mark.spec("advantage.kl-in-reward", "advantage.kl-resume")
def test_kl_in_the_reward_starts_at_zero_and_its_coefficient_survives_a_resume(
    folder: Path,
) -> None:
    wanted = [
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.kl_loss_coef=0.5",
        "trainer.algorithm.kl_ctrl={type: adaptive, kl_target: 0.01, horizon: 64}",
    ]
    expected = train(settings(folder, "expected", *wanted))
    rows = read_metrics(expected.metrics)[1:]
    assert rows[0]["loss/avg_kl"] == pytest.approx(0.0, abs=1e-6)  # the reference is the start
    assert rows[0]["loss/kl_loss_coef"] == 0.5
    assert rows[1]["loss/kl_loss_coef"] == pytest.approx(0.5 * (1 - 0.2 * 16 / 64))
    assert rows[-1]["loss/avg_kl"] > 1e-4
    with pytest.raises(DiedError):
        train(settings(folder, "broken", *wanted), Recorder(dies_at(3)))
    outcome = train(settings(folder, "broken", *wanted, RESUME))
    assert steady(outcome.metrics) == steady(expected.metrics)


@pytest.mark.spec("metrics.pass-at-k")
def test_evaluation_by_data_set_and_samples(folder: Path) -> None:
    def edit(rollouts: FakeRollouts, trajectories: list[Trajectory], phase: str) -> None:
        for number, one in enumerate(trajectories):
            one.data_source = "math/easy" if int(one.uid.removeprefix("eval-")) < 1 else None
            one.steps[-1].reward = float(number % 4 == 0)

    config = settings(
        folder, "run", "trainer.max_training_steps=1", "generator.eval_n_samples_per_prompt=2"
    )
    row = read_metrics(train(config, Recorder(edit=edit)).metrics)[0]
    scores = {name: value for name, value in row.items() if name.endswith(("_score", "_1", "_2"))}
    wanted = {  # four prompts twice: 1 0, 0 0, 1 0, 0 0
        "all": (0.25, 0.25, 0.5),
        "math_easy": (0.5, 0.5, 1.0),
        "unknown": (1 / 6, 1 / 6, 1 / 3),
    }
    names = ("avg_score", "pass_at_1", "pass_at_2")
    assert scores == {
        f"eval/{source}/{name}": pytest.approx(value)
        for source, values in wanted.items()
        for name, value in zip(names, values, strict=True)
    }


def test_plot_and_tensorboard(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    outcome = train(
        settings(
            folder,
            "run",
            "trainer.epochs=1",
            "trainer.plot=true",
            "trainer.logger=[jsonl,tensorboard]",
        )
    )
    assert outcome.plot is not None
    assert outcome.plot.read_bytes()[1:4] == b"PNG"
    assert list((folder / "run/tensorboard").iterdir())


def test_rollout_time_is_split_proportionally(folder: Path) -> None:
    config = settings(folder, "x")
    rollouts = FakeRollouts(config, tiny_model())
    prompts = load_prompts([f"{folder}/train.jsonl"], default_env_class="d")
    trajectories = asyncio.run(rollouts.generate(prompts, step=0, phase="train"))
    times = {"rollout": 8.0}
    split_rollout_time(times, trajectories)
    assert times == {"environment": pytest.approx(2.0), "generate": pytest.approx(6.0)}
