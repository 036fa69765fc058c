"""The off-policy correction of a mini-batch, from the settings."""

from __future__ import annotations

import logging
from typing import cast

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import AlgorithmConfig, Config, is_ratio_to_rollout
from skyrl_fast.ops.policy_loss.off_policy import off_policy_correction
from skyrl_fast.ops.policy_loss.reduction import SequenceScope

logger = logging.getLogger(__name__)


def apply_off_policy_correction(
    batch: StepBatch, algorithm: AlgorithmConfig
) -> tuple[StepBatch, dict[str, float]]:
    """Return the batch with its `token_weights` corrected, and metrics, if that is enabled."""
    # The loss mask is unchanged: a token that the correction drops has weight 0 in the policy loss,
    # but still counts in the reduction, the KL penalty and the entropy term, as in SkyRL.
    settings = algorithm.off_policy_correction
    if not settings.enabled:
        return batch, {}
    if batch.rollout_logprobs is None:
        raise ValueError(
            "trainer.algorithm.off_policy_correction: needs the engine's logprobs, got none"
        )
    assert batch.old_logprobs is not None
    caps = {
        "token": settings.token_tis_ratio_clip_high,
        "sequence": settings.sequence_tis_ratio_clip_high,
    }
    bounds = {
        "geometric": (settings.geo_mask_low, settings.geo_mask_high),
        "product": (settings.product_mask_low, settings.product_mask_high),
    }
    low, high = bounds.get(settings.sequence_mask_metric or "", (None, None))
    weights, mask, metrics = off_policy_correction(
        batch.old_logprobs,
        batch.rollout_logprobs,
        batch.loss_mask,
        tis_ratio_type=settings.tis_ratio_type,
        tis_cap=caps.get(settings.tis_ratio_type or ""),
        sequence_mask=settings.sequence_mask_metric,
        sequence_mask_low=low,
        sequence_mask_high=high,
        outlier_low=settings.outlier_token_is_threshold_low,
        outlier_high=settings.outlier_token_is_threshold_high,
        token_mask_low=settings.token_mask_is_threshold_low,
        token_mask_high=settings.token_mask_is_threshold_high,
        scope=cast(SequenceScope, algorithm.sequence_scope),
        trajectory_ids=batch.trajectory_ids,
        cu_seqlens=batch.cu_responses,
    )
    logged = {}
    for name, value in metrics.items():
        logged[f"policy/{name}"] = float(value)
    # Without importance weights the mask is the weight.
    if weights is None:
        kept = mask.to(batch.old_logprobs.dtype)
    else:
        kept = weights
    if batch.token_weights is not None:
        kept = kept * batch.token_weights
    return batch.with_(token_weights=kept), logged


def warn_of_stale_tokens(config: Config) -> None:
    """Warn if tokens of older policies are trained as if the current one had sampled them."""
    algorithm = config.trainer.algorithm
    is_corrected = (
        algorithm.off_policy_correction.enabled
        or algorithm.old_logprobs == "rollout"
        or is_ratio_to_rollout(algorithm)
    )
    if config.max_staleness and not is_corrected:
        logger.warning(
            "tokens up to %d policy versions old are trained as if the current policy had sampled "
            "them; trainer.algorithm.off_policy_correction.tis_ratio_type=token adds importance "
            "weights",
            config.max_staleness,
        )
