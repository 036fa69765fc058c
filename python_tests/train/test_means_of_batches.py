"""Metrics of an update are over what they count, in however many mini-batches it is."""

import pytest
import torch
from _fakes import tiny_model

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig, OffPolicyCorrectionConfig, OptimizerConfig
from skyrl_fast.train.metrics.aggregate import Part, add_up_mini_batches, add_up_passes
from skyrl_fast.train.model.critic import Critic, ValueModel
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.update import update_policy

SHARES = {
    "policy/outlier_seq_masked_ratio": {"outlier_token_is_threshold_high": 1.5},
    "policy/tis_seq_clip_high_ratio": {"tis_ratio_type": "sequence"},
    "policy/product_sequence_mask_masked_ratio": {"sequence_mask_metric": "product"},
}

# Values of two parts of 1 and 3 tokens, 2 and 1 sequences, 4 and 1 tokens of the cross-entropy;
# what they are together as passes, and as mini-batches.
ADDED_UP = {
    "policy/kl": ((4.0, 0.0), 1.0, 1.0),
    "policy/tis_seq_clip_high_ratio": ((0.0, 0.9), 0.3, 0.3),
    "policy/cross_entropy": ((0.0, 1.0), 0.2, 0.2),
    "policy/grad_norm": ((1.0, 2.0), 1.5, 1.5),
    "policy/kl_loss": ((1.0, 2.0), 3.0, 1.5),
    "policy/ratio_max": ((1.0, 2.0), 2.0, 2.0),
    "policy/ratio_min": ((1.0, 2.0), 1.0, 1.0),
    "policy/distance_of_a_custom_loss": ((4.0, 0.0), 1.0, 1.0),
    "policy/distance_of_a_custom_loss_max": ((4.0, 0.0), 4.0, 4.0),
}


@pytest.mark.parametrize("name", ADDED_UP)
def test_metrics_add_up_as_the_table_says(name: str) -> None:
    (first, second), of_passes, of_mini_batches = ADDED_UP[name]
    count = "policy/cross_entropy_tokens"
    parts = [
        Part({name: first, count: 4.0}, tokens=1, sequences=2),
        Part({name: second, count: 1.0}, tokens=3, sequences=1),
    ]
    assert add_up_passes(parts)[name] == pytest.approx(of_passes)
    assert add_up_mini_batches(parts)[name] == pytest.approx(of_mini_batches)


@pytest.mark.spec("metrics.update")
@pytest.mark.parametrize("name", SHARES)
def test_shares_of_sequences_and_the_spread_of_ratios(name: str) -> None:
    """One long sequence in the first mini-batch has other ratios than nine short ones."""
    lengths = [40] + [1] * 9
    output = {
        "prompt_token_ids": [[1, 4]] * 10,
        "response_ids": [[5] * n for n in lengths],
        "loss_masks": [[1] * n for n in lengths],
        "rewards": [float(i % 2) for i in range(10)],
        "trajectory_ids": [("a", 0)] + [("b", i) for i in range(9)],
        "is_last_step": [True] * 10,
        "rollout_logprobs": [[-1.0] * n for n in lengths],
    }
    policy = Policy(tiny_model())
    batch = StepBatch.from_generator_output(output, step_wise=True)
    logprobs = policy.batch_logprobs(batch)
    sampled = logprobs.clone()
    sampled[:40] -= 0.6
    batch = batch.with_(rollout_logprobs=sampled, advantages=torch.ones_like(logprobs))
    settings = AlgorithmConfig(off_policy_correction=OffPolicyCorrectionConfig(**SHARES[name]))
    optimizer = Optimizer(policy, OptimizerConfig(lr=0.0), total_steps=4)
    metrics = update_policy(policy, optimizer, batch, algorithm=settings, mini_batch_size=1)
    assert metrics[name] == pytest.approx(0.1)
    ratios = (logprobs - sampled).double().exp()
    assert metrics["policy/is_ratio_std"] == pytest.approx(float(ratios.std()), rel=1e-5)


def two_rows() -> StepBatch:
    """Return a row of each of two prompts, with two trained tokens."""
    output = {
        "prompt_token_ids": [[1, 4]] * 2,
        "response_ids": [[5, 6]] * 2,
        "loss_masks": [[1, 1]] * 2,
        "rewards": [0.0] * 2,
        "trajectory_ids": [("a", 0), ("b", 0)],
        "is_last_step": [True] * 2,
        "rollout_logprobs": [[-1.0, -1.0]] * 2,
    }
    return StepBatch.from_generator_output(output, step_wise=True)


def test_a_mini_batch_without_a_gradient_counts_in_the_mean_loss() -> None:
    policy = Policy(tiny_model())
    batch = two_rows().with_(advantages=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    optimizer = Optimizer(policy, OptimizerConfig(lr=0.0), total_steps=2)
    metrics = update_policy(
        policy, optimizer, batch, algorithm=AlgorithmConfig(), mini_batch_size=1
    )
    assert metrics["policy/loss"] == pytest.approx(-0.5)  # of -1 and 0
    assert metrics["policy/policy_loss"] == pytest.approx(metrics["policy/loss"])


@pytest.mark.spec("metrics.mismatch")
@pytest.mark.parametrize("update_epochs", [1, 2])
def test_optimizer_steps_are_no_mismatch_of_trainer_and_engine(update_epochs: int) -> None:
    policy = Policy(tiny_model())
    batch = two_rows()
    batch = batch.with_(rollout_logprobs=policy.batch_logprobs(batch) + 0.5)
    batch = batch.with_(advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]))
    optimizer = Optimizer(policy, OptimizerConfig(lr=0.05), total_steps=4)
    metrics = update_policy(
        policy,
        optimizer,
        batch,
        algorithm=AlgorithmConfig(),
        mini_batch_size=1,
        update_epochs=update_epochs,
    )
    assert metrics["policy/ratio_max"] > 1.1  # the policy has moved
    for name in ("mean", "max"):
        difference = metrics[f"policy/rollout_train_logprobs_abs_diff_{name}"]
        assert difference == pytest.approx(0.5, abs=1e-5)  # float32 in two orders of sums


def test_a_mini_batch_without_tokens_has_no_extremes() -> None:
    output = {
        "prompt_token_ids": [[1, 4]] * 2,
        "response_ids": [[5, 6]] * 2,
        "loss_masks": [[1, 1], [0, 0]],
        "rewards": [0.0] * 2,
        "trajectory_ids": [("a", 0), ("b", 0)],
        "is_last_step": [True] * 2,
        "rollout_logprobs": [[-1.0, -1.0]] * 2,
    }
    policy = Policy(tiny_model())
    batch = StepBatch.from_generator_output(output, step_wise=True)
    batch = batch.with_(
        rollout_logprobs=policy.batch_logprobs(batch) - 0.5,
        advantages=torch.ones_like(batch.rewards),
        # The masked row is visited for the environment's tokens.
        cross_entropy_weights=torch.tensor([0.0, 0.0, 1.0, 1.0]),
    )
    correction = OffPolicyCorrectionConfig(tis_ratio_type="token")
    settings = AlgorithmConfig(off_policy_correction=correction, observation_loss_coef=0.1)
    optimizer = Optimizer(policy, OptimizerConfig(lr=0.0), total_steps=2)
    metrics = update_policy(policy, optimizer, batch, algorithm=settings, mini_batch_size=1)
    assert metrics["policy/ratio_min"] == pytest.approx(1.0, abs=1e-5)
    ratio = float(torch.tensor(0.5).exp())
    assert metrics["policy/is_ratio_min"] == pytest.approx(ratio, rel=1e-5)
    assert metrics["policy/is_ratio_std"] < 1e-5


@pytest.mark.spec("metrics.update")
def test_means_of_a_critics_tokens_do_not_depend_on_the_mini_batches() -> None:
    lengths = [19, 1]
    output = {
        "prompt_token_ids": [[1, 4]] * 2,
        "response_ids": [[5] * n for n in lengths],
        "loss_masks": [[1] * n for n in lengths],
        "rewards": [0.0, 1.0],
        "trajectory_ids": [("a", 0), ("b", 0)],
        "is_last_step": [True] * 2,
    }
    batch = StepBatch.from_generator_output(output, step_wise=True)
    clipped = torch.tensor([1e6] * 19 + [0.0])  # far from the values of the first row
    batch = batch.with_(values=clipped, returns=clipped.neg())
    found = {}
    for size in (1, 2):
        torch.manual_seed(0)
        model = ValueModel(tiny_model().base_model)
        torch.nn.init.normal_(model.value_head.weight)
        critic = Critic(
            model, OptimizerConfig(lr=0.0), total_steps=4, mini_batch_size=size, value_clip=0.2
        )
        found[size] = critic.update(batch)
    for name in ("critic/values_mean", "critic/values_clipfrac"):
        assert found[1][name] == pytest.approx(found[2][name], rel=1e-5)
    assert found[2]["critic/values_clipfrac"] not in (0.0, 1.0)


@pytest.mark.spec("metrics.mismatch")
@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        (AlgorithmConfig(), 1),  # computes the later mini-batches' before the update
        (AlgorithmConfig(), 2),  # computes all
        (AlgorithmConfig(old_logprobs="rollout"), 2),  # knows those of the first pass alone
        (AlgorithmConfig(policy_loss_type="rollout_is"), 1),
    ],
)
def test_mismatch_is_that_before_any_update(settings: AlgorithmConfig, epochs: int) -> None:
    output = {
        "prompt_token_ids": [[1, 4]] * 4,
        "response_ids": [[5, 6, 7], [8]] * 2,
        "loss_masks": [[1, 0, 1], [1]] * 2,
        "rewards": [0.0, 1.0] * 2,
        "trajectory_ids": [(name, i) for name in "ab" for i in range(2)],
        "is_last_step": [True] * 4,
        "rollout_logprobs": [[-1.0] * 3, [-1.0]] * 2,
    }
    policy = Policy(tiny_model())
    batch = StepBatch.from_generator_output(output, step_wise=True)
    logprobs = policy.batch_logprobs(batch)
    engine = logprobs - 0.125
    engine[0] -= 0.125
    batch = batch.with_(rollout_logprobs=engine, advantages=torch.ones_like(logprobs))
    optimizer = Optimizer(policy, OptimizerConfig(lr=0.3, num_warmup_steps=0), total_steps=4)
    metrics = update_policy(
        policy, optimizer, batch, algorithm=settings, mini_batch_size=1, update_epochs=epochs
    )
    first_alone = settings.old_logprobs == "rollout" or settings.policy_loss_type == "rollout_is"
    tokens = 3 if first_alone else 6
    name = "policy/rollout_train_logprobs_abs_diff"
    assert metrics[f"{name}_mean"] == pytest.approx(0.125 * (tokens + 1) / tokens, abs=1e-5)
    assert metrics[f"{name}_max"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["policy/rollout_update_logprobs_abs_diff_max"] > 0.5
