"""Logits to policy loss in one visit. Shapes: cells are (N, R) or, ragged, (A,); V vocab."""

from __future__ import annotations

from typing import NamedTuple

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob import (
    KERNEL_DTYPES,
    ON_GPU,
    as_uint8,
    check_logits,
    check_no_overlap,
    check_selection,
    check_targets,
    kernel_rows,
)
from skyrl_fast.ops.masked_logprob_loss_op import Call, Result, visit
from skyrl_fast.ops.policy_loss_op import KL_ESTIMATORS, LOSSES, PARAMS
from skyrl_fast.ops.reference import logprob as logprob_reference
from skyrl_fast.ops.reference import policy_loss as loss_reference

OP = "masked_logprob_loss"
SEQUENCE_LOSSES = ("gspo", "clip_cov", "kl_cov")
TOKEN_LOSSES = tuple(name for name in LOSSES if name not in SEQUENCE_LOSSES)


class MaskedLogprobLoss(NamedTuple):
    """What the visit saw. Only `loss` has a gradient."""

    loss: torch.Tensor  # 0-dimensional float32 (float64 for float64 logits)
    logprobs: torch.Tensor  # cells, float32 (float64 for float64), 0 where masked
    entropy: torch.Tensor | None  # the same, or None
    metrics: dict[str, torch.Tensor]  # 0-dimensional float64: policy_loss's, perhaps "entropy"


def masked_logprob_loss(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    anchor_logprobs: torch.Tensor | None,
    advantages: torch.Tensor | None,
    *,
    loss_mask: torch.Tensor | None = None,
    loss: str = "regular",
    loss_weights: torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
    temperature: float = 1.0,
    ref_logprobs: torch.Tensor | None = None,
    kl_estimator: str | None = None,
    kl_coef: float = 0.001,
    clip_low: float = 0.8,
    clip_high: float = 1.2,
    clip_ratio_c: float = 3.0,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    return_entropy: bool = False,
    inplace: bool = False,
    backend: str | None = None,
) -> MaskedLogprobLoss:
    """Return the policy loss of logits, with the gradient made while each row is in the cache.

    loss = sum over trained tokens of loss_weight * (token_weight * policy loss + kl_coef * KL), as
    `policy_loss` defines them. A weight per token that is known beforehand is what makes one visit
    enough: a row's log-probability gives its derivative, and the row is turned into its gradient
    at once. Rows of mask 0 are never read, rows whose derivative is 0 (clipped, advantage 0) are
    not read again; the gradient of both is 0. Under torch.no_grad no gradient is made.

    The losses of whole sequences or batches (gspo, clip_cov, kl_cov, sequence masks) need every
    log-probability before any derivative: use `selected_logprob` and `policy_loss` for them.

    `metrics` are those of `policy_loss` (ratios, shares of clipped tokens, KL, number of tokens
    and the parts of the loss, see there), made from the log-probabilities of the visit; with
    `return_entropy` also `entropy`, its mean over trained tokens.

    Args:
        logits: cells + (V,) float32, bfloat16 or float16; the last dimension contiguous. float64
            is computed by torch.
        target_ids: cells, integers; in [0, V) where the mask is 1.
        anchor_logprobs: cells, what the ratio is taken against (old or rollout log-probabilities).
            None: the current ones, ratio 1.
        advantages: cells; may be None for "cross_entropy" alone.
        loss_mask: cells of any dtype, or None: all ones. A token is trained where it is not 0.
        loss: "regular", "dual_clip", "cispo", "rollout_is", "sapo", "dppo_tv", "dppo_kl",
            "cross_entropy" or "importance_sampling".
        loss_weights: cells, the reduction: each token's weight in the mini-batch's loss (with
            `reduction_weights`, its row's). None: one over the number of trained tokens here.
        token_weights: cells; multiply the policy loss, not the KL. None: ones.
        temperature: divides the logits.
        ref_logprobs, kl_estimator, kl_coef: KL penalty: "k1", "abs", "k2" or "k3".
        clip_low, clip_high: bounds of the ratio itself (regular, dual_clip, cispo, rollout_is).
        clip_ratio_c, tau_pos, tau_neg, delta_low, delta_high: dual_clip, sapo, dppo.
        return_entropy: also give the entropy, without a gradient.
        inplace: write the gradient over the logits, during this call; whoever else saved them
            for a backward gets an error of autograd's. A function compiled by torch.compile, and
            backend "torch", allocate the gradient all the same.
        backend: "native", "triton" (GPUs), "torch", or None to choose.

    Raises:
        ValueError: an unknown or sequence-level loss, shapes that disagree, a target out of range
            where the mask is 1, or a device or dtype without a kernel.
        RuntimeError: a forward-mode derivative, which backend="torch" alone has.

    Example:
        >>> logits, targets = torch.zeros(1, 4), torch.tensor([2])
        >>> masked_logprob_loss(logits, targets, None, None, loss="cross_entropy").loss
        tensor(1.3863)
    """
    _check_loss(loss, kl_estimator, ref_logprobs, advantages)
    check_logits(OP, logits)
    check_selection(OP, logits, "logits", target_ids, loss_mask, temperature)
    chosen = _backend.select(OP, logits, target_ids, backend=backend, available_on_gpu=ON_GPU)
    if logits.dtype not in KERNEL_DTYPES:
        chosen = "torch"
    shape = target_ids.shape
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    anchor = _cells("anchor_logprobs", anchor_logprobs, shape, dtype)
    adv = _cells("advantages", None if loss == "cross_entropy" else advantages, shape, dtype)
    reference = _cells("ref_logprobs", ref_logprobs if kl_estimator else None, shape, dtype)
    factors = _cells("token_weights", token_weights, shape, dtype)
    weights = _cells("loss_weights", loss_weights, shape, dtype)
    targets = target_ids.reshape(-1).to(torch.int64).contiguous()
    mask = as_uint8(loss_mask)
    if weights is None:
        weights = _token_mean(targets, mask, dtype)
    params = {
        "clip_low": clip_low, "clip_high": clip_high, "clip_ratio_c": clip_ratio_c,
        "tau_pos": tau_pos, "tau_neg": tau_neg, "delta_low": delta_low, "delta_high": delta_high,
        "ppo_kl_coef": 0.0, "kl_coef": kl_coef,
    }  # fmt: skip
    call = Call(
        targets, mask, float(temperature), LOSSES[loss],
        0 if kl_estimator is None else KL_ESTIMATORS[kl_estimator],
        [float(params[name]) for name in PARAMS], anchor, adv, reference, factors, weights,
        return_entropy, chosen == "triton",
    )  # fmt: skip
    if chosen == "torch":
        result = _torch(logits, call, loss, kl_estimator)
    else:
        rows = kernel_rows(OP, logits)
        if inplace and torch.is_grad_enabled() and logits.requires_grad:
            check_no_overlap(OP, rows)
        result = visit(rows, call, inplace)
    metrics = dict(zip(loss_reference.METRICS, result.metrics.unbind(), strict=True))
    if not return_entropy:
        return MaskedLogprobLoss(result.loss, result.logprobs.view(shape), None, metrics)
    total = result.entropy.sum(dtype=torch.float64)  # 0 where masked
    metrics["entropy"] = total / metrics["num_tokens"].clamp(min=1)
    entropy = result.entropy.view(shape)
    return MaskedLogprobLoss(result.loss, result.logprobs.view(shape), entropy, metrics)


def _torch(logits: torch.Tensor, call: Call, loss: str, kl_estimator: str | None) -> Result:
    """Log-probabilities, then the loss, by the references."""
    rows = logits.reshape(-1, logits.shape[-1])
    live = torch.ones_like(call.targets, dtype=torch.bool) if call.mask is None else call.mask != 0
    check_targets(OP, call.targets, call.mask, rows.shape[-1])
    logprobs, entropy = logprob_reference.selected_logprob(
        rows, call.targets, live, call.temperature
    )
    total, metrics = loss_reference.policy_loss(
        loss,
        dict(zip(PARAMS, call.params, strict=True)),
        logprobs,
        call.anchor,
        call.advantages,
        live,
        torch.arange(live.numel(), device=live.device),
        call.weights,
        ref_logprobs=call.reference,
        kl_estimator=kl_estimator,
        token_weights=call.token_weights,
    )
    return Result(total, logprobs.detach(), entropy.detach(), metrics)


def _token_mean(
    targets: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return (M,), one over the number of trained tokens; waits for no device."""
    ones = torch.ones(targets.shape, dtype=dtype, device=targets.device)
    if mask is None:
        return ones / max(targets.numel(), 1)
    return ones / mask.count_nonzero().clamp(min=1)


def _check_loss(
    loss: str,
    kl_estimator: str | None,
    ref_logprobs: torch.Tensor | None,
    advantages: torch.Tensor | None,
) -> None:
    if loss in SEQUENCE_LOSSES:
        raise ValueError(
            f"{OP}: loss {loss!r} needs the log-probabilities of a whole sequence or batch before "
            "any derivative; use selected_logprob and policy_loss"
        )
    if loss not in TOKEN_LOSSES:
        raise ValueError(f"{OP}: loss must be one of {TOKEN_LOSSES}, got {loss!r}")
    if kl_estimator is not None and kl_estimator not in KL_ESTIMATORS:
        raise ValueError(
            f"{OP}: kl_estimator must be one of {tuple(KL_ESTIMATORS)} or None, "
            f"got {kl_estimator!r}"
        )
    if kl_estimator is not None and ref_logprobs is None:
        raise ValueError(f"{OP}: kl_estimator {kl_estimator!r} needs ref_logprobs, got None")
    if loss != "cross_entropy" and advantages is None:
        raise ValueError(f"{OP}: loss {loss!r} needs advantages, got None")


def _cells(
    name: str, value: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{OP}: {name} must be a torch tensor, got {type(value).__name__}")
    if value.shape != shape:
        raise ValueError(f"{OP}: {name} must be of shape {tuple(shape)}, got {tuple(value.shape)}")
    return value.detach().to(dtype).reshape(-1).contiguous()
