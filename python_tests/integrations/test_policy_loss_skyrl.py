"""Policy losses and KL penalties against SkyRL's own functions."""

import math

import pytest
import torch
from _losses import F32, batch
from _skyrl_losses import skyrl_losses

from skyrl_fast.ops.policy_loss.loss import (
    KL_ESTIMATORS,
    LOSS_NAMES,
    kl_penalty,
    off_policy_correction,
    policy_loss,
    reduction_weights,
)
from skyrl_fast.ops.policy_loss.losses import Cispo, Dppo


@pytest.mark.peers
@pytest.mark.parametrize(
    "reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]
)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_equals_skyrl(name: str, reduction: str, backend: str) -> None:
    """Same loss and gradient as SkyRL's, for every loss that both define in the same way."""
    ppo_utils = skyrl_losses()
    from skyrl.train.config import AlgorithmConfig

    config = AlgorithmConfig(policy_loss_type=name, loss_reduction=reduction)
    config.dppo.delta_low = config.dppo.delta_high = 0.05
    config.off_policy_correction.tis_ratio_type = "token"
    # SkyRL's gspo averages over the mask before the correction, this package over that after it.
    bounds = {} if name == "gspo" else {"token_mask_low": 0.4, "token_mask_high": 1.8}
    config.off_policy_correction.token_mask_is_threshold_low = bounds.get("token_mask_low")
    config.off_policy_correction.token_mask_is_threshold_high = bounds.get("token_mask_high")
    d = batch((6, 30))
    mask = d["mask"].float()
    weights = reduction_weights(
        d["mask"], reduction=reduction, group_ids=[0, 0, 0, 0, 1, 1], max_seq_len=40
    )
    scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        d["advantages"], mask, reduction, 1, 40, [(0, 4), (4, 6)]
    )
    torch.testing.assert_close(d["advantages"] * weights[:, None], scaled)

    unscaled = name in ("clip_cov", "kl_cov", "cross_entropy")  # SkyRL's own weighting differs
    row_weights = torch.ones(6) if unscaled else weights
    original = d["logprobs"].clone().requires_grad_()
    torch.manual_seed(0)
    want, metrics = ppo_utils.PolicyLossRegistry.get(name)(
        original, d["old"], d["advantages"] if unscaled else scaled, config, mask, d["rollout"]
    )
    want.backward()

    token_weights, new_mask = None, mask
    if name not in ("clip_cov", "kl_cov", "cross_entropy", "importance_sampling"):
        token_weights, new_mask, _ = off_policy_correction(
            d["old"], d["rollout"], mask, tis_ratio_type="token", backend=backend, **bounds,
        )  # fmt: skip
    ours = d["logprobs"].clone().requires_grad_()
    settings = {
        "dppo": Dppo(delta_low=0.05, delta_high=0.05),
        "cispo": Cispo(config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high),
    }
    torch.manual_seed(0)
    loss, our_metrics = policy_loss(
        ours, d["old"], d["advantages"], new_mask, loss=settings.get(name, name),
        row_weights=row_weights, rollout_logprobs=d["rollout"], token_weights=token_weights,
        backend=backend,
    )[:2]  # fmt: skip
    loss.backward()
    torch.testing.assert_close(loss, want, **F32)
    torch.testing.assert_close(ours.grad, original.grad, **F32)
    if name in ("clip_cov", "cross_entropy"):
        assert math.isclose(float(our_metrics["clip_ratio"]), metrics["clip_ratio"], rel_tol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize("estimator", list(KL_ESTIMATORS))
def test_kl_equals_skyrl(estimator: str, backend: str) -> None:
    ppo_utils = skyrl_losses()
    d = batch((4, 30))
    want = ppo_utils.compute_approx_kl(d["logprobs"], d["ref"], d["mask"].float(), estimator)
    got = kl_penalty(
        d["logprobs"], d["ref"], estimator=estimator, loss_mask=d["mask"], backend=backend
    )
    torch.testing.assert_close(got, want)
