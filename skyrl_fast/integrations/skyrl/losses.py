"""SkyRL's policy losses and loss reduction. N rows, R padded cells.

SkyRL scales the advantages, so that a loss is a plain sum over the trained tokens; therefore every
row has weight 1 here. `skyrl_fast.policy_loss` computes float32 tensors on the CPU and on GPUs that
it has kernels for, SkyRL all others. The off-policy corrections and their metrics are SkyRL's own:
they are passed as a weight per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from skyrl_fast.integrations.skyrl.replacement import (
    ORIGINALS,
    UnsupportedInputError,
    replaces,
    require,
)
from skyrl_fast.ops import _backend
from skyrl_fast.ops.pack.cell_rows import count_nonzeros, divide_rows
from skyrl_fast.ops.policy_loss.loss import ON_GPU, PolicyLoss, policy_loss
from skyrl_fast.ops.policy_loss.losses import (
    Cispo,
    ClipCov,
    CrossEntropy,
    Dppo,
    DualClip,
    Gspo,
    ImportanceSampling,
    KlCov,
    LossSettings,
    Regular,
    RolloutIs,
    Sapo,
    loss_and_settings,
)

REDUCTION = "apply_loss_reduction_to_advantages_minibatch"
Loss = tuple[torch.Tensor, dict[str, float]]
SkyRLLoss = Callable[..., Loss]
Tensor = torch.Tensor
FLOAT32_COUNTS = 1 << 24  # smaller counts are exact in float32, in any order of summation


@replaces(REDUCTION)
def apply_loss_reduction_to_advantages_minibatch(
    advantages: Tensor,
    loss_mask: Tensor,
    loss_reduction: str,
    micro_batch_size: int,
    max_seq_len: int,
    prompt_boundaries: list[tuple[int, int]] | None = None,
) -> Tensor:
    """Return the advantages scaled so that their sum is the reduction, as SkyRL's function.

    Args:
        advantages, loss_mask: (N, R) of a mini-batch.
        loss_reduction: "token_mean", "sequence_mean", "seq_mean_token_sum_norm" or "prompt_mean";
            others are passed to SkyRL.
        micro_batch_size: read only by SkyRL's legacy reduction.
        max_seq_len: for "seq_mean_token_sum_norm".
        prompt_boundaries: (start, end) rows of each prompt, all rows in order; for "prompt_mean".
    """
    out = _backend.empty(advantages.shape, advantages.dtype)
    reduce_into(out, advantages, loss_mask, loss_reduction, max_seq_len, prompt_boundaries)
    return out


def reduce_into(
    out: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    loss_reduction: str,
    max_seq_len: int,
    prompt_boundaries: list[tuple[int, int]] | None,
) -> None:
    """Write the scaled advantages to `out`; both are (N, R)."""
    require(advantages.dtype == torch.float32 == loss_mask.dtype, "unsupported dtype")
    require(
        advantages.device.type == "cpu" and advantages.shape == loss_mask.shape, "different shapes"
    )
    num_rows = len(advantages)
    counts, _, others = count_nonzeros(loss_mask)
    total = int(counts.sum())
    require(not others and total < FLOAT32_COUNTS, "a mask whose sums depend on their order")
    tokens = counts.float()
    if loss_reduction == "token_mean":
        divisor = torch.tensor([float(max(total, 1))], dtype=torch.float32, device="cpu")
    elif loss_reduction == "sequence_mean":
        divisor = num_rows * tokens.clamp(min=1)
    elif loss_reduction == "seq_mean_token_sum_norm":
        divisor = torch.tensor([float(num_rows * max_seq_len)], dtype=torch.float32, device="cpu")
    else:
        require(loss_reduction == "prompt_mean", "unsupported reduction")
        divisor = _prompt_mean_divisor(counts, prompt_boundaries)
    divide_rows(advantages.detach(), divisor, out)


def _prompt_mean_divisor(counts: Tensor, boundaries: list[tuple[int, int]] | None) -> Tensor:
    """Return (N,): number of prompts times the trained tokens of each row's prompt."""
    require(bool(boundaries), "no prompts")
    assert boundaries is not None
    starts, ends = (list(edge) for edge in zip(*boundaries, strict=True))
    require(starts == [0, *ends[:-1]] and ends[-1] == len(counts), "rows outside of prompts")
    sizes = torch.tensor(ends, device="cpu") - torch.tensor(starts, device="cpu")
    prompt = torch.arange(len(ends), device="cpu").repeat_interleave(sizes)
    totals = torch.zeros(len(ends), dtype=torch.int64, device="cpu")
    totals.index_add_(0, prompt, counts)
    return (len(boundaries) * totals.float().clamp(min=1))[prompt]


def _loss_of(*, corrected: bool = True) -> Callable[[Callable[[Any], LossSettings]], SkyRLLoss]:
    def decorate(settings: Callable[[Any], LossSettings]) -> SkyRLLoss:
        name = settings.__name__

        def loss(
            log_probs: Tensor,
            old_log_probs: Tensor,
            advantages: Tensor,
            config: Any,
            loss_mask: Tensor | None = None,
            rollout_logprobs: Tensor | None = None,
        ) -> Loss:
            sampled = rollout_logprobs if corrected else None
            given = (log_probs, old_log_probs, advantages, loss_mask, sampled)
            return _loss(name, settings(config), config, *given)

        loss.__name__ = name
        loss.__qualname__ = name
        loss.__doc__ = settings.__doc__
        return replaces(name)(loss)

    return decorate


@_loss_of()
def ppo_policy_loss(config: Any) -> LossSettings:
    """Return SkyRL's "regular" or "dual_clip" loss and its metrics, by `config.policy_loss_type`.

    Args (of all losses here):
        log_probs, old_log_probs, advantages, loss_mask, rollout_logprobs: (N, R).
        config: SkyRL's AlgorithmConfig.
    """
    kind = str(config.policy_loss_type)
    require(kind in ("regular", "dual_clip"), "unsupported loss")
    if kind == "dual_clip":
        return DualClip(*_clip(config), config.clip_ratio_c)
    return Regular(*_clip(config))


@_loss_of()
def sapo_policy_loss(config: Any) -> LossSettings:
    """Return SkyRL's SAPO loss and its metrics."""
    require(config.loss_reduction == "sequence_mean", "a reduction of which SkyRL warns")
    return Sapo(config.sapo.tau_pos, config.sapo.tau_neg)


@_loss_of()
def gspo_policy_loss(config: Any) -> LossSettings:
    """Return SkyRL's GSPO loss and its metrics."""
    require(config.loss_reduction == "sequence_mean", "a reduction of which SkyRL warns")
    return Gspo(*_clip(config))


@_loss_of()
def compute_policy_loss_cispo(config: Any) -> LossSettings:
    """Return SkyRL's CISPO loss and its metrics."""
    anchor = str(getattr(config.cispo, "cispo_anchor", "old"))  # up to 0.3.0 there is none
    require(anchor in ("old", "rollout"), "an unsupported anchor")
    corrected = anchor == "rollout" and config.off_policy_correction.tis_ratio_type is not None
    require(not corrected, "a correction of corrected ratios, which SkyRL refuses")
    return Cispo(config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high, anchor)


@_loss_of()
def rollout_is_policy_loss(config: Any) -> LossSettings:
    """Return SkyRL's importance-weighted loss against the sampler's policy, and its metrics."""
    return RolloutIs(*_clip(config))


@_loss_of()
def dppo_policy_loss(config: Any) -> LossSettings:
    """Return SkyRL's DPPO loss and its metrics."""
    return Dppo(config.dppo.dppo_type, config.dppo.delta_low, config.dppo.delta_high)


@_loss_of(corrected=False)
def compute_policy_loss_clip_cov(config: Any) -> LossSettings:
    """Return SkyRL's Clip-Cov loss and its metrics; tokens are drawn with torch's generator."""
    chosen = config.clip_cov
    return ClipCov(chosen.clip_ratio, chosen.clip_cov_lb, chosen.clip_cov_ub, *_clip(config))


@_loss_of(corrected=False)
def compute_policy_loss_kl_cov(config: Any) -> LossSettings:
    """Return SkyRL's KL-Cov loss and its metrics."""
    return KlCov(config.kl_cov.kl_cov_frac, config.kl_cov.ppo_kl_coef)


@_loss_of(corrected=False)
def cross_entropy_loss(config: Any) -> LossSettings:
    """Return SkyRL's cross entropy and its metrics; only log_probs and loss_mask are read."""
    return CrossEntropy()


@_loss_of(corrected=False)
def importance_sampling_loss(config: Any) -> LossSettings:
    """Return SkyRL's importance-sampling loss and its metrics.

    SkyRL does not bound the ratio here; if it is outside exp(-20) to exp(20), SkyRL computes it.
    """
    return ImportanceSampling()


def _clip(config: Any) -> tuple[float, float]:
    return config.eps_clip_low, config.eps_clip_high


# Losses whose ratio SkyRL does not bound, while the kernel bounds it by exp(+-20).
UNBOUNDED = ("gspo", "clip_cov", "kl_cov", "importance_sampling")
LARGEST_LOG_RATIO = {"gspo": 10.0}
DEFAULT_LARGEST = 20.0
LOG_PROBS_ALONE = ("cross_entropy",)
NOT_OF_NO_TOKENS = ("importance_sampling", "cispo")  # of a mask of zeros, SkyRL logs other numbers
DRAWING = ("clip_cov",)
LOGGED_UNCLIPPED = ("sapo", "kl_cov", "cross_entropy")  # SkyRL logs a clip_ratio of 0 for them
UNREAD = ("sapo", "cross_entropy")  # SkyRL reads no number of them, so on a GPU it does not wait
METRICS = ("num_tokens", "clip_ratio", "ratio_mean", "ratio_min", "ratio_max")


def _loss(
    name: str,
    settings: LossSettings,
    config: Any,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor | None,
    loss_mask: Tensor | None,
    rollout_logprobs: Tensor | None,
) -> Loss:
    try:
        spec = loss_and_settings(name, settings)[0]
    except ValueError as error:
        raise UnsupportedInputError(str(error)) from error
    kind = spec.name
    reads_old = spec.ratio_to == "old"
    if spec.ratio_to == "rollout_where_given":
        reads_old = rollout_logprobs is None
    if isinstance(settings, Cispo) and settings.cispo_ratio == "rollout":
        require(rollout_logprobs is not None, "no log-probabilities of the sampler")
        reads_old = False
    require(old_log_probs is not None or not reads_old, "no old log-probabilities")
    require(isinstance(log_probs, torch.Tensor) and loss_mask is not None, "no loss mask")
    assert loss_mask is not None
    if kind in LOG_PROBS_ALONE:
        old_log_probs = advantages = None
    others = [t for t in (old_log_probs, advantages, rollout_logprobs) if t is not None]
    require(log_probs.ndim == 2, "unsupported shape")
    require(all(t.device == log_probs.device for t in (loss_mask, *others)), "several devices")
    backend = _backend.select("policy_loss", log_probs, loss_mask, available_on_gpu=ON_GPU)
    require(backend != "torch", "a device without kernels")
    require(not any(t.requires_grad for t in others), "gradients of more than log_probs")
    require(
        all(t.dtype == torch.float32 for t in (log_probs, loss_mask, *others)), "unsupported dtypes"
    )
    require(all(t.shape == log_probs.shape for t in (loss_mask, *others)), "different shapes")
    weights: Tensor | None = None
    metrics: dict[str, float] = {}
    if rollout_logprobs is not None:
        weights, metrics = _correction(name, old_log_probs, rollout_logprobs, loss_mask, config)
    waits = kind not in UNREAD or not _backend.on_gpu(log_probs)
    if not waits:  # the mask's numbers are not known: they are weights, as in SkyRL
        if weights is None:
            weights = loss_mask
        else:
            weights = weights * loss_mask
    if kind in DRAWING:
        drawn = torch.get_rng_state()
    else:
        drawn = None
    out = policy_loss(
        log_probs,
        old_log_probs,
        advantages,
        loss_mask,
        loss=settings,
        scope="row",
        rollout_logprobs=rollout_logprobs,
        token_weights=weights,
        row_weights=torch.ones(len(log_probs), dtype=torch.float32, device=log_probs.device),
    )
    if not waits:
        return out.loss, {"clip_ratio": 0.0, **metrics}
    mean = None
    if isinstance(settings, Cispo) and hasattr(config.cispo, "cispo_anchor"):
        if settings.cispo_ratio == "rollout":
            behavior = rollout_logprobs
        else:
            behavior = old_log_probs
        mean = _mean_clamped_ratio(settings, log_probs.detach(), behavior, loss_mask)
    try:
        return out.loss, {**_skyrl_metrics(kind, out, loss_mask, mean), **metrics}
    except UnsupportedInputError:
        if drawn is not None:
            torch.set_rng_state(drawn)  # so that SkyRL draws the same tokens
        raise


def _skyrl_metrics(
    kind: str, out: PolicyLoss, mask: Tensor, mean_clamped: Tensor | None
) -> dict[str, float]:
    """Return SkyRL's metrics of a loss; raise for a loss that SkyRL computes differently."""
    read = [out.loss, *(out.metrics[name] for name in METRICS), _is_zero_one(mask)]
    if mean_clamped is None:
        read += []
    else:
        read += [mean_clamped]
    # One transfer: each would wait for the GPU.
    numbers = torch.stack([t.detach().double() for t in read]).tolist()
    value, count, clip_ratio, ratio_mean, ratio_min, ratio_max, zero_one = numbers[:7]
    require(bool(zero_one), "a mask that is not 0 and 1")
    if kind in UNBOUNDED:
        limit = float(np.exp(LARGEST_LOG_RATIO.get(kind, DEFAULT_LARGEST))) * 0.99
        inside = 1 / limit < ratio_min and ratio_max < limit
        require(inside or not count, "ratios beyond the kernel's bounds")
    require(count > 0 or kind not in NOT_OF_NO_TOKENS, "a mask without trained tokens")
    require(bool(np.isfinite(value)), "a loss that is no number")
    if kind == "importance_sampling":
        return {"importance_ratio": ratio_mean}
    if kind in LOGGED_UNCLIPPED:
        return {"clip_ratio": 0.0}
    clipped = np.float32(round(clip_ratio * count)) / np.float32(max(count, 1.0))
    if mean_clamped is None:
        return {"clip_ratio": float(clipped)}
    return {
        "clip_ratio": float(clipped),
        "cispo/ratio_mean": ratio_mean,
        "cispo/ratio_clamped_mean": numbers[7],
        "cispo/ratio_max": ratio_max,
        "cispo/ratio_min": ratio_min,
    }


def _mean_clamped_ratio(
    settings: Cispo, log_probs: Tensor, behavior: Tensor | None, mask: Tensor
) -> Tensor:
    assert behavior is not None
    ratio = (log_probs - behavior).clamp_(-DEFAULT_LARGEST, DEFAULT_LARGEST).exp_()
    ratio.clamp_(1 - settings.cispo_eps_clip_low, 1 + settings.cispo_eps_clip_high)
    trained = mask != 0
    return ratio.masked_fill_(~trained, 0).sum() / trained.sum()


def _is_zero_one(mask: Tensor) -> Tensor:
    """Return whether all values are 0 or 1, as a 0-dimensional tensor."""
    # Only then are the sum, the sum of squares and the number of non-zeros of a mask equal: the sum
    # of squares is at least the squared sum over the number, with equality for equal values.
    flat = mask.reshape(-1)
    sums = torch.stack([flat.sum(), torch.dot(flat, flat)]).double()
    return (sums == torch.count_nonzero(flat)).all()


def _correction(
    name: str, old: Tensor | None, rollout: Tensor, mask: Tensor, config: Any
) -> tuple[Tensor | None, dict[str, float]]:
    apply = ORIGINALS.namespace(name)["apply_off_policy_correction"]
    is_enabled = apply.__globals__.get("off_policy_correction_enabled")
    settings = config.off_policy_correction
    if is_enabled is not None and not is_enabled(settings):
        return None, {}
    ratio, kept, metrics = apply(torch.ones_like(mask), old, rollout, mask, settings)
    return ratio * kept, metrics
