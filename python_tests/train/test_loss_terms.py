"""Terms of the loss in training: policy loss, cross-entropy on observations, KL to a teacher."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers._fakes import tiny_model
from helpers._trees import agent_batch

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig, Config, ConfigError, GeneratorConfig, check_config
from skyrl_fast.config.loading import as_config
from skyrl_fast.train.algorithm.training_rows import training_rows
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.update import accumulate_gradient


def merged_batch(seed: int = 3) -> StepBatch:
    steps = agent_batch(seed, stripped=0.0).with_(advantages=None)
    rows = training_rows(steps, GeneratorConfig(), form="merged", observations=True)
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.standard_normal(rows.loss_mask.shape[0])).float()
    return rows.with_(advantages=values)


@pytest.mark.spec("terms.observations")
def test_weights_are_on_the_tokens_that_no_step_has() -> None:
    steps = agent_batch(3, stripped=0.0).with_(advantages=None)
    plain = steps.merged()
    rows = training_rows(steps, GeneratorConfig(), form="merged", observations=True)
    of_steps = steps.with_(loss_mask=torch.ones_like(steps.loss_mask)).merged().loss_mask
    assert torch.equal(rows.cross_entropy_weights, 1.0 - of_steps.float())
    assert int(rows.cross_entropy_weights.sum()) > 0
    assert torch.equal(rows.loss_mask, plain.loss_mask)
    trained = (rows.loss_mask != 0) | (of_steps == 0)
    assert torch.equal(rows.trained_mask, trained)


def gradient(
    batch: StepBatch, tree: bool = False, budget: int = 64, **options: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    model = tiny_model(dtype=torch.float64)
    policy = Policy(model, tree=tree, max_tokens_per_microbatch=budget)
    metrics = accumulate_gradient(policy, batch, algorithm=AlgorithmConfig(**options))
    return torch.cat([p.grad.flatten() for p in model.parameters()]), metrics


def expected_gradient(batch: StepBatch, terms: Any) -> torch.Tensor:
    """Return the gradient of `terms` of (A,) log-probabilities, one forward pass per row."""
    model = tiny_model(dtype=torch.float64)
    values = []
    for row in range(batch.num_rows):
        ids = batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]].long()
        count = int(batch.response_lengths[row])
        logits = model(ids[None]).logits[0].log_softmax(-1)
        values.append(logits[len(ids) - count - 1 : -1].gather(1, ids[-count:, None])[:, 0])
    terms(torch.cat(values)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.spec("terms.sum")
@pytest.mark.parametrize("tree", [False, True])
def test_gradient_is_that_of_the_sum_of_terms(tree: bool) -> None:
    batch = merged_batch().with_(old_logprobs=None, rollout_logprobs=None)
    reference = torch.from_numpy(
        -2 * np.random.default_rng(0).random(batch.loss_mask.shape[0])
    ).float()
    batch = batch.with_(ref_logprobs=reference)

    def terms(logprobs: torch.Tensor) -> torch.Tensor:
        mask, weights = batch.loss_mask.double(), batch.cross_entropy_weights.double()
        policy = -(logprobs * batch.advantages.double() * mask).sum()  # at ratio 1
        kl = 0.5 * ((logprobs - reference.double()) ** 2 * mask).sum()
        observations = -(logprobs * weights).sum() / weights.sum()
        return (0.5 * policy + 0.1 * kl) / mask.sum() + 0.3 * observations

    got, metrics = gradient(
        batch, tree, policy_loss_coef=0.5, observation_loss_coef=0.3,
        use_kl_loss=True, kl_loss_coef=0.1, kl_estimator_type="k2",
    )  # fmt: skip
    wanted = expected_gradient(batch, terms)
    assert (got - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert metrics["policy/trained_tokens"] == int(batch.loss_mask.sum())
    assert metrics["policy/cross_entropy_tokens"] == int(batch.cross_entropy_weights.sum())


@pytest.mark.spec("terms.sum")
@pytest.mark.parametrize("loss", ["regular", "cross_entropy"])
def test_metrics_of_tokens_do_not_depend_on_the_split(loss: str) -> None:
    batch = merged_batch()
    options: Any = {"observation_loss_coef": 0.3, "policy_loss_type": loss}
    whole = gradient(batch, budget=10**6, **options)[1]
    parts = gradient(batch, budget=24, **options)[1]
    assert parts["policy/num_micro_batches"] > whole["policy/num_micro_batches"] == 1
    of_passes = ("policy/num_micro_batches", "policy/forward_tokens", "policy/token_saving")
    for name in whole.keys() - set(of_passes):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name  # float32 sums
    assert whole["policy/cross_entropy_loss"] == pytest.approx(
        0.3 * whole["policy/cross_entropy"], rel=1e-5
    )


def test_kl_alone_is_distillation_without_the_policy_loss() -> None:
    batch = merged_batch().with_(cross_entropy_weights=None, old_logprobs=None)
    teacher = torch.full(batch.loss_mask.shape, -1.0)
    got, _ = gradient(
        batch.with_(ref_logprobs=teacher), policy_loss_coef=0.0, use_kl_loss=True,
        kl_loss_coef=1.0, kl_estimator_type="k2",
    )  # fmt: skip

    def terms(logprobs: torch.Tensor) -> torch.Tensor:
        mask = batch.loss_mask.double()
        return 0.5 * ((logprobs + 1.0) ** 2 * mask).sum() / mask.sum()

    wanted = expected_gradient(batch, terms)
    assert (got - wanted).abs().max() < 1e-6 * wanted.abs().max()


def config(**values: Any) -> Config:
    return as_config({"data.train_data": ["a.jsonl"], "trainer.policy.model.path": "m", **values})


@pytest.mark.spec("terms.settings")
def test_settings_that_train_nothing_are_refused() -> None:
    key = "trainer.algorithm"
    with pytest.raises(
        ConfigError, match=rf"{key}\.use_kl_loss: expected true \(or .* no other term"
    ):
        check_config(config(**{f"{key}.policy_loss_coef": 0.0}))
    with pytest.raises(ConfigError, match=rf"{key}\.observation_loss_coef: expected 0"):
        check_config(config(**{f"{key}.observation_loss_coef": 0.1}))
    check_config(config(**{f"{key}.observation_loss_coef": 0.1, "trainer.rows": "merged"}))
    check_config(config(**{f"{key}.policy_loss_coef": 0.0, f"{key}.use_kl_loss": True}))


@pytest.mark.spec("loss.off-policy-keeps-counts")
def test_the_observation_loss_changes_nothing_of_a_correction() -> None:
    """A token that the correction drops stays in GSPO's mean, whatever else is trained."""
    rows = merged_batch(3)
    dropped = (torch.arange(rows.loss_mask.shape[0]) % 3 > 0).float()
    rows = rows.with_(token_weights=dropped, old_logprobs=rows.rollout_logprobs + 0.1)
    plain = rows.with_(cross_entropy_weights=None)
    of_policy, metrics = gradient(plain, policy_loss_type="gspo")
    both, with_observations = gradient(rows, policy_loss_type="gspo", observation_loss_coef=0.3)
    of_observations, _ = gradient(rows, policy_loss_coef=0.0, observation_loss_coef=0.3)
    # Row weights are float32.
    assert torch.allclose(both, of_policy + of_observations, rtol=1e-6, atol=1e-6)
    for name in ("ratio_mean", "ratio_max", "clip_ratio", "policy_loss"):
        assert with_observations[f"policy/{name}"] == pytest.approx(metrics[f"policy/{name}"])


def test_without_a_policy_loss_only_rows_of_other_terms_are_visited() -> None:
    rows = merged_batch(3)
    weights = torch.zeros_like(rows.cross_entropy_weights)
    weights[int(rows.cross_entropy_weights.argmax())] = 1.0  # in one row
    rows = rows.with_(cross_entropy_weights=weights)
    policy = Policy(tiny_model())
    settings = AlgorithmConfig(policy_loss_coef=0.0, observation_loss_coef=0.5)
    metrics = accumulate_gradient(policy, rows, algorithm=settings)
    assert metrics["policy/rows_without_gradient"] == rows.num_rows - 1
