"""Advantage estimators in the trainer: inputs, settings, full runs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _training import RESUME, Recorder, assert_same_files, dies_at, dying, settings, steady, train
from _training import folder as folder

from skyrl_fast import gae, gigpo_advantage, turn_group_advantage, turn_level_returns
from skyrl_fast.batch import StepBatch
from skyrl_fast.config import Config, ConfigError
from skyrl_fast.config.loading import load_config
from skyrl_fast.ops.advantage.estimators import ADVANTAGE_ESTIMATORS
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.algorithm.advantages import compute_advantages, normalize_advantages
from skyrl_fast.train.algorithm.anchor_states import anchor_ids
from skyrl_fast.train.checkpoint.local import checkpoints
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.prepare_batch import training_batch, with_advantages
from skyrl_fast.train.run import TrainResult

BASE = ["data.train_data=[x.jsonl]", "trainer.policy.model.path=m"]


def step(
    reward: float, *, prompt: Sequence[int] = (1,), length: int = 2, observation: str = ""
) -> Step:
    return Step(
        prompt_token_ids=list(prompt),
        response_ids=[5] * length,
        loss_mask=[1] * length,
        rollout_logprobs=[-1.0] * length,
        reward=reward,
        stop_reason="stop",
        policy_version=0,
        text="",
        observation=observation,
        llm_seconds=0.0,
        env_seconds=0.0,
    )


def trajectory(uid: str, repetition: int, steps: list[Step], **changes: Any) -> Trajectory:
    args: dict[str, Any] = {
        "uid": uid,
        "repetition_id": repetition,
        "steps": steps,
        "stop_reason": "stop",
        "env_class": "fake",
        "env_metrics": {},
        "seconds": 0.1,
        "phase": "train",
    }
    return Trajectory(**(args | changes))


def group() -> list[Trajectory]:
    """Two trajectories of one prompt: rewards 1, 2 and 0, 0, 5."""
    return [
        trajectory("a", 0, [step(1.0, observation="hall"), step(2.0)]),
        trajectory("a", 1, [step(0.0, observation="hall"), step(0.0, observation=""), step(5.0)]),
    ]


def config(*overrides: str) -> Config:
    return load_config(
        None,
        [
            *BASE,
            "trainer.train_batch_size=1",
            "trainer.policy_mini_batch_size=1",
            "generator.n_samples_per_prompt=2",
            *overrides,
        ],
    )


def with_estimates(*overrides: str) -> StepBatch:
    settings = config(*overrides)
    batch, units, _ = training_batch(group(), settings)
    batch, _, _ = with_advantages(
        batch,
        units,
        settings.trainer.algorithm,
        policy=None,  # type: ignore[arg-type]
        reference=None,
        critic=None,
        kl_coef=0.0,
    )
    return batch


REWARDS, LAST, IDS = torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0]), [False, True, False, False, True], "a"
WANTED = {
    "turn_level_returns": lambda: turn_level_returns(REWARDS, is_last_step=LAST, gamma=0.5),
    "turn_level_group": lambda: turn_group_advantage(
        REWARDS, ["a"] * 5, is_last_step=LAST, gamma=0.5, baseline="episode"
    ),
    "gigpo": lambda: gigpo_advantage(
        REWARDS,
        ["a"] * 5,
        ["start", "hall", "start", "hall", ""],
        is_last_step=LAST,
        gamma=0.5,
        step_advantage_w=0.25,
    ),
}


@pytest.mark.spec("advantage.every-reward")
@pytest.mark.parametrize("estimator", WANTED)
def test_turn_estimators_read_the_rewards_of_all_steps(estimator: str) -> None:
    batch = with_estimates(
        f"trainer.algorithm.advantage_estimator={estimator}",
        "trainer.algorithm.gamma=0.5",
        "trainer.algorithm.step_advantage_w=0.25",
        "trainer.algorithm.turn_level_baseline=episode",
    )
    assert torch.equal(batch.advantages, torch.repeat_interleave(WANTED[estimator](), 2))


@pytest.mark.spec("advantage.trainer-normalize")
def test_reinforce_is_normalized_over_the_batch() -> None:
    batch = with_estimates("trainer.algorithm.advantage_estimator=reinforce++")
    to_go = torch.tensor([3.0, 3, 2, 2, 5, 5, 5, 5, 5, 5])
    wanted = (to_go - to_go.mean()) / to_go.std(correction=0)
    torch.testing.assert_close(batch.advantages, wanted)


@pytest.mark.spec("advantage.trainer-normalize")
@pytest.mark.parametrize("estimator", ["turn_level_returns", "rloo"])
def test_other_estimators_are_normalized_on_request(estimator: str) -> None:
    name = f"trainer.algorithm.advantage_estimator={estimator}"
    plain = with_estimates(name)
    scaled = with_estimates(name, "trainer.algorithm.advantage_batch_normalize=true")
    wanted = normalize_advantages(plain.advantages, plain.loss_mask)
    assert torch.equal(scaled.advantages, wanted)
    assert not torch.equal(scaled.advantages, plain.advantages)


@pytest.mark.spec("advantage.trainer-names")
def test_gae_takes_its_values_from_the_batch() -> None:
    batch, _, _ = training_batch(group(), config())
    values = torch.arange(10.0) / 10
    got = compute_advantages(batch.with_(values=values), estimator="gae", gamma=0.9, lambd=0.8)
    advantages_, returns = gae(
        batch.rewards,
        values,
        is_last_step=batch.is_last_step,
        cu_seqlens=batch.cu_responses,
        gamma=0.9,
        lambd=0.8,
        normalize=True,
    )
    assert torch.equal(got.advantages, advantages_) and torch.equal(got.returns, returns)
    with pytest.raises(ValueError, match="gae needs the batch's values"):
        compute_advantages(batch, estimator="gae")


@pytest.mark.spec("advantage.gae-reward-shift")
def test_reward_of_an_empty_response_is_kept() -> None:
    steps = [step(1.0), step(4.0, length=0), step(2.0)]
    others = [step(8.0, length=0), step(1.0)]
    batch, _, _ = training_batch([trajectory("a", 0, steps), trajectory("a", 1, others)], config())
    got = compute_advantages(batch, estimator="reinforce++").advantages
    to_go = torch.tensor([7.0, 7, 2, 2, 1, 1])  # the 8 came before the first trained token
    torch.testing.assert_close(got, (to_go - to_go.mean()) / to_go.std(correction=0))


def test_merged_rows_keep_every_reward() -> None:
    grown = [step(1.0, prompt=[1]), step(2.0, prompt=[1, 5, 5, 9])]
    both = [trajectory("a", 0, grown), trajectory("a", 1, grown)]
    merge = "generator.merge_stepwise_output=true"
    merged, _, _ = training_batch(
        both, config(merge, "trainer.algorithm.advantage_estimator=reinforce++")
    )
    assert merged.num_rows == 2
    assert merged.rewards.tolist() == [0.0, 1.0, 0.0, 0.0, 2.0] * 2
    outcome, _, _ = training_batch(both, config(merge))
    assert outcome.rewards.tolist() == [0.0, 0.0, 0.0, 0.0, 2.0] * 2


@pytest.mark.spec("advantage.gigpo-anchor")
def test_anchor_is_the_last_environment_message() -> None:
    failed = trajectory("a", 2, [step(0.0), step(0.0)], failure="RuntimeError: gone")
    none = trajectory("a", 3, [], stop_reason="length")
    # start, hall | start, hall, "" | start | start: an empty observation is not the start
    assert anchor_ids([*group(), failed, none]).tolist() == [0, 1, 0, 1, 2, 0, 0]


def test_gigpo_without_anchors_is_refused() -> None:
    batch, _, _ = training_batch(group(), config())
    with pytest.raises(ValueError, match="gigpo needs the batch's anchor_ids"):
        compute_advantages(batch, estimator="gigpo")


def test_columns_follow_their_rows() -> None:
    batch, _, _ = training_batch(group(), config("trainer.algorithm.advantage_estimator=gigpo"))
    batch = batch.with_(values=torch.arange(10.0), returns=torch.arange(10.0) + 0.5)
    part = batch.rows([1, 3])
    assert part.anchor_ids.tolist() == [1, 1]
    assert part.values.tolist() == [2.0, 3.0, 6.0, 7.0]
    assert part.returns.tolist() == [2.5, 3.5, 6.5, 7.5]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.algorithm.advantage_estimator=gae"], "critic.model.path: expected a model with"),
        (
            ["trainer.critic.model.path=m"],
            "estimator: expected gae, .* with trainer.critic.* got grpo",
        ),
        (
            ["trainer.algorithm.advantage_estimator=gigpo", "generator.merge_stepwise_output=true"],
            "advantages are per turn and need a row for each turn, got gigpo",
        ),
        (
            [
                "trainer.algorithm.advantage_estimator=turn_level_group",
                "generator.step_wise_trajectories=false",
            ],
            "advantages are per turn and need a row for each turn, got turn_level_group",
        ),
        (["trainer.critic_mini_batch_size=3"], "critic_mini_batch_size: expected a divisor"),
        (["trainer.critic.optimizer_config.adam_betas=[2,0]"], "critic.optimizer_config.adam_beta"),
        (["trainer.algorithm.gamma=1.1"], "gamma: expected at most 1"),
        (["trainer.algorithm.value_head_prefix=v"], "the head is stored in a separate file"),
        (["trainer.algorithm.advantage_estimator=ppo"], "expected one of grpo"),
    ],
)
def test_incompatible_settings(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*BASE, *overrides])


def test_critic_has_separate_defaults() -> None:
    settings = load_config(
        None,
        [
            *BASE,
            "trainer.algorithm.advantage_estimator=gae",
            "trainer.critic.model.path=m",
            "trainer.critic.optimizer_config.weight_decay=0",
        ],
    )
    assert settings.trainer.critic.optimizer_config.lr == 5e-6
    assert settings.trainer.policy.optimizer_config.lr == 1e-6


# --- full runs ---------------------------------------------------------------------------------


def reward_each_step(rollouts: Any, trajectories: list[Trajectory], phase: str) -> None:
    """Give a reward of 0.25 for any step that says the prompt's word."""
    for one in trajectories:
        word = one.steps[0].prompt_token_ids[1]
        for turn in one.steps[:-1]:
            turn.reward = 0.25 * (word in turn.response_ids)


def run(folder: Path, name: str, *overrides: str, during: Any = None) -> TrainResult:
    defaults = ("trainer.epochs=1", "data.val_data=[]")
    return train(settings(folder, name, *defaults, *overrides), Recorder(during, reward_each_step))


def gae_settings(folder: Path) -> list[str]:
    return [
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.algorithm.lambd=0.95",
        f"trainer.critic.model.path={folder}/model",
        "trainer.critic.optimizer_config.lr=0.01",
    ]


@pytest.mark.spec("advantage.trainer-names")
@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_every_estimator_trains(folder: Path, estimator: str) -> None:
    needed = {
        "gae": gae_settings(folder),
        "gdpo": ["trainer.algorithm.gdpo_weights={reward: 1.0}"],
        "context_level_group": ["generator.context=compact"],
    }
    extra = needed.get(estimator, [])
    name = f"trainer.algorithm.advantage_estimator={estimator}"
    rows = read_metrics(run(folder, "run", name, *extra).metrics)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["policy/optimizer_steps"] == 2
        assert math.isfinite(row["policy/loss"]) and row["policy/grad_norm"] > 0


@pytest.mark.spec("advantage.critic")
def test_gae_policy_and_critic_learn(folder: Path) -> None:
    outcome = run(
        folder,
        "run",
        *gae_settings(folder),
        "trainer.epochs=12",
        "trainer.critic_mini_batch_size=1",
        "generator.n_samples_per_prompt=8",
    )
    rows = read_metrics(outcome.metrics)
    assert rows[0]["critic/optimizer_steps"] == 4 and rows[0]["policy/optimizer_steps"] == 2
    # The returns vary more as the policy learns, so the loss alone is not conclusive.
    explained = [row["critic/explained_variance"] for row in rows]
    assert sum(explained[-4:]) > sum(explained[:4]) + 0.4
    reward = [row["reward/avg_raw_reward"] for row in rows]
    assert sum(reward[-4:]) > sum(reward[:4]) + 0.4
    assert (outcome.checkpoint / "critic" / "value_head.safetensors").is_file()


@pytest.mark.spec("advantage.critic-tokens")
def test_resumed_gae_run_equals_an_uninterrupted_one(folder: Path) -> None:
    options = [*gae_settings(folder), "trainer.epochs=3"]
    expected = run(folder, "expected", *options)
    with dying():
        run(folder, "broken", *options, during=dies_at(3))
    assert [number for number, _ in checkpoints(folder / "broken/checkpoints")] == [2]
    outcome = run(folder, "broken", *options, RESUME)
    files = ("model.safetensors", "value_head.safetensors", "optimizer.safetensors")
    assert_same_files(outcome, expected, *(f"critic/{file}" for file in files))
    assert steady(outcome.metrics) == steady(expected.metrics)
