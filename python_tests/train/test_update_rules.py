"""The update with scopes and off-policy correction; effects of masks and weights on gradients."""

from typing import Any

import pytest
import torch
from _fakes import tiny_model
from _rows import full_logprobs

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig, OffPolicyCorrectionConfig, OptimizerConfig
from skyrl_fast.ops.policy_loss.loss import policy_loss, reduction_weights
from skyrl_fast.ops.policy_loss.losses import (
    Cispo,
    ClipCov,
    ClipCovSelection,
    Dppo,
    DualClip,
    KlCov,
    LossSettings,
    Sapo,
)
from skyrl_fast.ops.policy_loss.off_policy import off_policy_correction
from skyrl_fast.train.algorithm.off_policy import apply_off_policy_correction
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.update import accumulate_gradient, contributing_rows, update_policy

GSPO = AlgorithmConfig(policy_loss_type="gspo")


def steps_batch() -> StepBatch:
    """Two groups; trajectories of 2, 1, 3 and 1 rows, advantages by hand."""
    ids = [("a", 0), ("a", 0), ("a", 1), ("b", 0), ("b", 0), ("b", 0), ("b", 1)]
    g = torch.Generator().manual_seed(0)
    lengths = [3, 2, 4, 1, 2, 3, 2]
    output: dict[str, Any] = {
        "prompt_token_ids": [[1, 4 + i, 5] for i in range(7)],
        "response_ids": [torch.randint(4, 16, (n,), generator=g).tolist() for n in lengths],
        "loss_masks": [[1] * n for n in lengths],
        "rewards": [0.0] * 7,
        "rollout_logprobs": [(-torch.rand(n, generator=g) * 3).tolist() for n in lengths],
        "trajectory_ids": ids,
        "is_last_step": [a != b for a, b in zip(ids, [*ids[1:], None], strict=True)],
    }
    batch = StepBatch.from_generator_output(output)
    row_advantages = torch.tensor([1.0, 1.0, -1.0, 0.5, 0.5, 0.5, -0.5])
    return batch.with_(advantages=row_advantages.repeat_interleave(batch.response_lengths))


def near(logprobs: torch.Tensor, size: float = 0.1) -> torch.Tensor:
    noise = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1))
    return logprobs + size * noise


def gradient(policy: Policy, batch: StepBatch, algorithm: AlgorithmConfig) -> list[torch.Tensor]:
    policy.model.zero_grad()
    accumulate_gradient(policy, batch, algorithm=algorithm)
    return [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]


def loss_of(policy: Policy, batch: StepBatch, **options: Any) -> list[torch.Tensor]:
    """Gradients of the loss over the full batch in one call, by the op alone."""
    policy.model.zero_grad()
    logprobs = full_logprobs(policy.model, batch)
    loss, _ = policy_loss(
        logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask,
        cu_seqlens=batch.cu_responses, **options,
    )[:2]  # fmt: skip
    loss.backward()
    return [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]


def close(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    # float32 noise of another order of summation
    return all(torch.allclose(a, b, atol=2e-5) for a, b in zip(one, two, strict=True))


# --- settings of individual losses ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "settings", "wanted"),
    [
        ("dual_clip", {"clip_ratio_c": 1.01}, DualClip(clip_ratio_c=1.01)),
        ("cispo", {"cispo": Cispo(0.02, 0.03, "rollout")}, Cispo(0.02, 0.03, "rollout")),
        ("sapo", {"sapo": Sapo(3.0, 0.5)}, Sapo(3.0, 0.5)),
        ("dppo", {"dppo": Dppo("binary_kl", 1e-5, 1e-5)}, Dppo("binary_kl", 1e-5, 1e-5)),
        ("clip_cov", {"clip_cov": ClipCovSelection(1.0, -9.0, 9.0)}, ClipCov(1.0, -9.0, 9.0)),
        ("kl_cov", {"kl_cov": KlCov(0.9, 3.0)}, KlCov(0.9, 3.0)),
    ],
)
def test_loss_gets_its_settings(loss: str, settings: dict[str, Any], wanted: LossSettings) -> None:
    policy = Policy(tiny_model(), max_tokens_per_microbatch=1000)
    batch = steps_batch()
    old = near(policy.batch_logprobs(batch), 0.3)
    batch = batch.with_(old_logprobs=old, rollout_logprobs=near(old.flip(0), 0.3).flip(0))
    got = gradient(policy, batch, AlgorithmConfig(policy_loss_type=loss, **settings))
    rollout = {"rollout_logprobs": batch.rollout_logprobs}
    assert close(got, loss_of(policy, batch, loss=wanted, **rollout))
    assert not close(got, loss_of(policy, batch, loss=loss, **rollout))


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_the_choice_among_all_tokens_is_that_of_any_coefficient(loss: str) -> None:
    observed = torch.zeros(17)
    observed[0] = 1.0  # the first row has a gradient without a policy loss, too
    found = []
    for coefficient in (0.0, 1.0):
        algorithm = AlgorithmConfig(
            policy_loss_type=loss,
            policy_loss_coef=coefficient,
            observation_loss_coef=0.5,
            clip_cov=ClipCovSelection(1.0, 0.0, 9.0),
        )
        batch = steps_batch().with_(cross_entropy_weights=observed)
        found.append(accumulate_gradient(Policy(tiny_model()), batch, algorithm=algorithm))
    without, with_loss = found
    assert 0 < with_loss["policy/chosen_ratio"] < 1
    assert without["policy/chosen_ratio"] == with_loss["policy/chosen_ratio"]
    assert without["policy/policy_entropy"] == pytest.approx(with_loss["policy/policy_entropy"])


@pytest.mark.spec("update.kl-cov-first")
def test_rounding_between_two_passes_is_no_distance_of_kl_cov() -> None:
    policy = Policy(tiny_model())
    batch = steps_batch()
    known = near(policy.batch_logprobs(batch), 1e-6)
    batch = batch.with_(old_logprobs=known, advantages=torch.zeros_like(known))
    optimizer = Optimizer(policy, OptimizerConfig(lr=0.01), total_steps=2)
    metrics = update_policy(
        policy,
        optimizer,
        batch,
        algorithm=AlgorithmConfig(policy_loss_type="kl_cov"),
        mini_batch_size=2,
    )
    assert metrics["policy/chosen_ratio"] > 0
    assert metrics["policy/grad_norm"] == 0


# --- scope ---------------------------------------------------------------------------------------


@pytest.mark.spec("loss.gspo")
@pytest.mark.parametrize("scope", ["row", "trajectory"])
@pytest.mark.parametrize("budget", [8, 1000])
def test_gspo_ratio_follows_the_scope(scope: str, budget: int) -> None:
    policy = Policy(tiny_model(), max_tokens_per_microbatch=budget)
    batch = steps_batch()
    batch = batch.with_(old_logprobs=near(policy.batch_logprobs(batch)))
    algorithm = AlgorithmConfig(policy_loss_type="gspo", sequence_scope=scope)
    want = loss_of(policy, batch, loss="gspo", scope=scope, trajectory_ids=batch.trajectory_ids)
    assert close(gradient(policy, batch, algorithm), want)
    other = "row" if scope == "trajectory" else "trajectory"
    other_want = loss_of(
        policy, batch, loss="gspo", scope=other, trajectory_ids=batch.trajectory_ids
    )
    assert not close(other_want, want)


def test_gspo_keeps_rows_without_advantage_in_trajectories_with_advantage() -> None:
    batch = steps_batch()
    values = batch.advantages.clone()
    values[:3] = 0.0  # row 0, the first turn of trajectory 0
    values[5:9] = 0.0  # row 2, all of trajectory 1
    batch = batch.with_(advantages=values)
    rows = contributing_rows(batch, GSPO).tolist()
    assert rows == [True, True, False, True, True, True, True]
    by_row = AlgorithmConfig(policy_loss_type="gspo", sequence_scope="row")
    assert contributing_rows(batch, by_row).tolist() == [False, True, False, *[True] * 4]
    policy = Policy(tiny_model())
    batch = batch.with_(old_logprobs=near(policy.batch_logprobs(batch)))
    want = loss_of(
        policy, batch, loss="gspo", scope="trajectory", trajectory_ids=batch.trajectory_ids
    )
    assert close(gradient(policy, batch, GSPO), want)


# --- off-policy correction -----------------------------------------------------------------------


def algorithm_with(scope: str = "trajectory", **correction: Any) -> AlgorithmConfig:
    return AlgorithmConfig(
        sequence_scope=scope, off_policy_correction=OffPolicyCorrectionConfig(**correction)
    )


def known_batch() -> StepBatch:
    """Ratios of old to rollout: row 0 (2, 2, 1), row 1 (1, 1), row 2 (8, 1, 1, 1), then ones."""
    batch = steps_batch()
    ratios = torch.ones(17)
    ratios[:2], ratios[5] = 2.0, 8.0
    return batch.with_(old_logprobs=batch.rollout_logprobs + ratios.log())


def weights_of(algorithm: AlgorithmConfig) -> list[list[float]]:
    batch, _ = apply_off_policy_correction(known_batch(), algorithm)
    assert batch.token_weights is not None
    parts = batch.token_weights.split(batch.response_lengths.tolist())
    return [[round(x, 4) for x in part.tolist()] for part in parts][:3]


def test_no_weights_without_a_correction() -> None:
    batch = known_batch()
    assert apply_off_policy_correction(batch, algorithm_with()) == (batch, {})


def test_token_ratios_are_capped() -> None:
    algorithm = algorithm_with(tis_ratio_type="token", token_tis_ratio_clip_high=1.5)
    assert weights_of(algorithm) == [[1.5, 1.5, 1], [1, 1], [1.5, 1, 1, 1]]
    _, metrics = apply_off_policy_correction(known_batch(), algorithm)
    assert metrics["policy/tis_token_clip_high_ratio"] == pytest.approx(3 / 17)
    assert metrics["policy/is_ratio_max"] == pytest.approx(8.0, rel=1e-5)


@pytest.mark.spec("loss.off-policy-tis")
def test_sequence_ratios_by_scope() -> None:
    settings: dict[str, Any] = {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 6.0}
    assert weights_of(algorithm_with(**settings)) == [[4, 4, 4], [4, 4], [6] * 4]
    assert weights_of(algorithm_with("row", **settings)) == [[4, 4, 4], [1, 1], [6] * 4]


@pytest.mark.spec("loss.off-policy-sequence-mask")
def test_sequence_masks_by_scope() -> None:
    product: dict[str, Any] = {"sequence_mask_metric": "product", "product_mask_high": 3.0}
    assert weights_of(algorithm_with(**product)) == [[0] * 3, [0] * 2, [0] * 4]
    assert weights_of(algorithm_with("row", **product)) == [[0] * 3, [1] * 2, [0] * 4]
    geometric: dict[str, Any] = {  # of trajectory 0: 4 ** (1 / 5) = 1.32; of row 0: 1.59
        "sequence_mask_metric": "geometric",
        "geo_mask_high": 1.5,
    }
    assert weights_of(algorithm_with(**geometric)) == [[1] * 3, [1] * 2, [0] * 4]
    assert weights_of(algorithm_with("row", **geometric)) == [[0] * 3, [1] * 2, [0] * 4]


@pytest.mark.spec("loss.off-policy-outlier", "loss.off-policy-token-mask")
def test_outliers_and_single_tokens() -> None:
    outlier: dict[str, Any] = {"outlier_token_is_threshold_high": 1.9}
    assert weights_of(algorithm_with(**outlier)) == [[0] * 3, [0] * 2, [0] * 4]
    assert weights_of(algorithm_with("row", **outlier)) == [[0] * 3, [1] * 2, [0] * 4]
    token: dict[str, Any] = {"token_mask_is_threshold_high": 1.9}
    assert weights_of(algorithm_with(**token)) == [[0, 0, 1], [1, 1], [0, 1, 1, 1]]


def test_missing_engine_logprobs_are_an_error() -> None:
    with pytest.raises(ValueError, match="off_policy_correction: needs the engine's logprobs"):
        apply_off_policy_correction(
            known_batch().with_(rollout_logprobs=None), algorithm_with(tis_ratio_type="token")
        )


@pytest.mark.spec("loss.off-policy-keeps-counts")
def test_corrected_gradient_equals_that_of_the_op() -> None:
    policy = Policy(tiny_model(), max_tokens_per_microbatch=8)
    batch = steps_batch()
    old = near(policy.batch_logprobs(batch))
    batch = batch.with_(old_logprobs=old, rollout_logprobs=near(old.flip(0), 0.2).flip(0))
    algorithm = algorithm_with(tis_ratio_type="token", sequence_mask_metric="geometric",
                               geo_mask_low=0.9, geo_mask_high=1.1)  # fmt: skip
    weights, mask, _ = off_policy_correction(
        batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask, tis_ratio_type="token",
        sequence_mask="geometric", sequence_mask_low=0.9, sequence_mask_high=1.1,
        cu_seqlens=batch.cu_responses, trajectory_ids=batch.trajectory_ids,
    )  # fmt: skip
    assert 0 < int(mask.sum()) < 17  # some kept, some dropped
    counts = reduction_weights(
        batch.loss_mask, reduction="token_mean", cu_seqlens=batch.cu_responses
    )  # before the correction: dropped tokens lower the loss, the others keep their weight
    want = loss_of(policy, batch, row_weights=counts, token_weights=weights * mask)
    mini, _ = apply_off_policy_correction(batch, algorithm)
    assert close(gradient(policy, mini, algorithm), want)


def test_dropped_rows_need_no_forward_pass() -> None:
    algorithm = algorithm_with(sequence_mask_metric="product", product_mask_high=3.0)
    mini, _ = apply_off_policy_correction(known_batch(), algorithm)
    assert contributing_rows(mini, algorithm).tolist() == [False] * 3 + [True] * 4


@pytest.mark.spec("loss.off-policy-per-minibatch")
@pytest.mark.parametrize("mini_batch_size", [1, 2])
def test_trainer_corrects_each_mini_batch(mini_batch_size: int) -> None:
    policy = Policy(tiny_model())
    optimizer = Optimizer(policy, OptimizerConfig(), total_steps=4)
    metrics = update_policy(
        policy, optimizer, steps_batch(), algorithm=algorithm_with(tis_ratio_type="token"),
        mini_batch_size=mini_batch_size, update_epochs=2,
    )  # fmt: skip
    assert metrics["policy/optimizer_steps"] == 4 / mini_batch_size
    batch = steps_batch()
    old = Policy(tiny_model()).batch_logprobs(batch)
    ratio = (old - batch.rollout_logprobs).exp()
    # float32 noise; the mean over mini-batches is that over tokens
    assert metrics["policy/is_ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-4)
    assert metrics["policy/is_ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-4)


def test_update_with_all_tokens_dropped_changes_no_weight() -> None:
    policy = Policy(tiny_model())
    before = [p.clone() for p in policy.model.parameters()]
    optimizer = Optimizer(policy, OptimizerConfig(lr=1.0), total_steps=1)
    metrics = update_policy(
        policy, optimizer, steps_batch(),
        algorithm=algorithm_with(outlier_token_is_threshold_high=1e-9), mini_batch_size=2,
    )  # fmt: skip
    assert metrics["policy/loss"] == 0.0
    assert metrics["policy/outlier_seq_masked_ratio"] == 1.0
    assert metrics["policy/rows_without_gradient"] == 7
    for one, two in zip(before, policy.model.parameters(), strict=True):
        assert torch.equal(one, two)
