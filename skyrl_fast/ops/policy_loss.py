"""Policy losses. Shapes: N rows (steps), R padded cells, A ragged cells; "cells" is (N, R) or (A,).

Formulas, with A the advantage, d = logprob - anchor, r = exp(clamp(d, -20, 20)) and sg() a value
without gradient (each is summed over trained tokens with the weight of its row):

regular              -min(r A, clip(r, 1-low, 1+high) A)              PPO, arXiv:1707.06347
dual_clip            the same, at most -c A where A < 0               arXiv:1912.09729
gspo                 regular, with d the sequence's mean of d         arXiv:2507.18071 (GSPO-token)
cispo                -sg(clip(r, 1-low, 1+high)) A logprob            arXiv:2506.13585
rollout_is           -sg(r inside (1-low, 1+high), else 0) A logprob  anchor: rollout
clip_cov, kl_cov     regular without, or -r A with |d| on, the tokens
                     of high covariance of A and logprob              arXiv:2505.22617
sapo                 -A sigmoid(tau (r - 1)) 4 / tau                  arXiv:2511.20347
dppo                 -r A, 0 where the probability moved too far      arXiv:2602.04879
cross_entropy        -logprob
importance_sampling  -r A
"""

from __future__ import annotations

from typing import Any

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops.off_policy import off_policy_correction
from skyrl_fast.ops.policy_loss_op import (
    KL_ESTIMATORS,
    LOSSES,
    PARAMS,
    KlPenalty,
    loss_and_metrics,
)
from skyrl_fast.ops.reduction import (
    SCOPES,
    RowIds,
    Scope,
    checked_offsets,
    native_mask,
    reduction_weights,
    sequences_of,
)
from skyrl_fast.ops.reference import policy_loss as reference

__all__ = ["kl_penalty", "off_policy_correction", "policy_loss", "reduction_weights"]

OP = "policy_loss"
LOSS_NAMES = (*(name for name in LOSSES if not name.startswith("dppo")), "dppo")
DPPO_TYPES = {"binary_tv": "dppo_tv", "binary_kl": "dppo_kl"}
ON_GPU = ("native", "triton", "torch")


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor | None,
    loss_mask: torch.Tensor,
    *,
    loss: str = "regular",
    rollout_logprobs: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
    kl_estimator: str | None = None,
    kl_coef: float = 0.001,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    anchor: str = "old",
    cispo_eps_clip_low: float = 1.0,
    cispo_eps_clip_high: float = 4.0,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    kl_cov_frac: float = 0.2,
    ppo_kl_coef: float = 1.0,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    dppo_type: str = "binary_tv",
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    row_weights: torch.Tensor | None = None,
    reduction: str = "token_mean",
    max_seq_len: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    group_ids: RowIds | None = None,
    trajectory_ids: RowIds | None = None,
    scope: Scope | None = None,
    token_weights: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of the current logprobs, with its gradient, and what to log about it.

    loss = sum over trained tokens of row_weight * (token_weight * policy loss + kl_coef * KL). The
    module's docstring has each loss's formula and source; the parameters' names and defaults are
    SkyRL's. Nothing is read where the mask is 0 (NaN may stand there) and the gradient there is
    exactly 0; a mask of zeros gives loss 0, connected to the graph. NaN at a trained token gives
    a NaN loss, and NaN in the gradient of that token alone.

    Args:
        logprobs: cells, float32; the current policy's. float64 is computed in float64. bfloat16
            and float16 are upcast first, and only their gradient is rounded back.
        old_logprobs: cells; the anchor of the ratio. None: `logprobs` themselves (ratio 1).
        advantages: cells; may be None for "cross_entropy" alone.
        loss_mask: cells of any dtype; a token is trained where it is not 0 (its size is no
            weight: give `token_weights` for that).
        loss: one of `LOSS_NAMES`.
        rollout_logprobs: cells; the anchor of "rollout_is", of "dppo" where given, and of "cispo"
            with anchor="rollout".
        ref_logprobs: cells; the reference policy's, for the KL penalty.
        kl_estimator: None (no penalty), "k1", "abs", "k2" or "k3".
        kl_coef: weight of the penalty.
        eps_clip_low, eps_clip_high: the ratio's bounds are 1 - low and 1 + high.
        clip_ratio_c: "dual_clip"; above 1.
        anchor, cispo_eps_clip_low, cispo_eps_clip_high: "cispo"; its bounds are by default 0
            and 5 (ScaleRL, arXiv:2510.13786), as in SkyRL's main; SkyRL 0.3.0 has 1 and 6.
        clip_cov_ratio, clip_cov_lb, clip_cov_ub, generator: "clip_cov": share of tokens to drop,
            bounds of their covariance, and what draws among them. The covariance is taken over
            the tokens of this call, so this loss depends on the split into micro-batches.
        kl_cov_frac, ppo_kl_coef: "kl_cov": share of tokens, weight of |d|. As above.
        tau_pos, tau_neg: "sapo".
        dppo_type, delta_low, delta_high: "dppo": "binary_tv" or "binary_kl", and how far the
            probability may move for negative and positive advantages.
        row_weights: (N,) from `reduction_weights` over the whole mini-batch. None: taken from
            this call's mask with `reduction`, `group_ids`, `trajectory_ids` and `max_seq_len`.
        cu_seqlens: (N + 1,) offsets of the rows' cells, for (A,) data.
        trajectory_ids: N ints or strings, the trajectory of each row.
        scope: what "gspo" takes as a sequence: "row", or "trajectory" with all its rows; None:
            trajectory where `trajectory_ids` are given. A trajectory's rows must then be in one
            call. The other losses look at single tokens.
        token_weights: cells, from `off_policy_correction`; they weigh the policy loss, not the KL.
            A token of weight 0 has no policy loss, even where that would be NaN.
        backend: "native", "triton" (GPUs), "torch", or None to choose.

    Returns:
        The loss (0-dimensional, float32, or float64 for float64 logprobs), and a dict of
        0-dimensional float64 tensors: loss, policy_loss, kl_loss (weighted; before kl_coef),
        num_tokens; means over trained tokens: clip_ratio, clip_ratio_low, clip_ratio_high,
        chosen_ratio (dual_clip: where c took effect; clip_cov, kl_cov: selected), ratio_mean,
        approx_kl (of r - 1 - d, an estimate of KL(anchor || current)), kl; and ratio_max,
        ratio_min. All 0 without trained tokens.

    Raises:
        ValueError, TypeError: an unknown name, an argument that the loss needs and that is
            missing, or shapes, dtypes or devices that disagree.
        RuntimeError: a forward-mode derivative, which backend="torch" alone has.

    Example:
        >>> logprobs = torch.log(torch.tensor([[0.6, 0.5]])).requires_grad_()
        >>> old = torch.log(torch.tensor([[0.4, 0.5]]))
        >>> loss, metrics = policy_loss(logprobs, old, torch.ones(1, 2), torch.ones(1, 2))
        >>> loss  # ratios 1.5 (clipped to 1.2) and 1, token mean
        tensor(-1.1000, grad_fn=<PolicyLossBackward>)
    """
    kind = _loss_kind(loss, dppo_type)
    if kl_estimator is not None:
        _one_of(OP, "kl_estimator", kl_estimator, KL_ESTIMATORS)
        _needed(kl_estimator, "ref_logprobs", ref_logprobs)
    _one_of(OP, "scope", scope, (None, *SCOPES))
    is_cispo = kind == "cispo"
    low, high = eps_clip_low, eps_clip_high
    if is_cispo:
        low, high = cispo_eps_clip_low, cispo_eps_clip_high
    p = {
        "clip_low": 1.0 - low,
        "clip_high": 1.0 + high,
        "clip_ratio_c": clip_ratio_c,
        "tau_pos": tau_pos,
        "tau_neg": tau_neg,
        "delta_low": delta_low,
        "delta_high": delta_high,
        "ppo_kl_coef": ppo_kl_coef,
        "kl_coef": kl_coef,
        "kl_cov_frac": kl_cov_frac,
        "clip_cov_ratio": clip_cov_ratio,
        "clip_cov_lb": clip_cov_lb,
        "clip_cov_ub": clip_cov_ub,
    }
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"{OP}: tau_pos and tau_neg must be above 0, got {tau_pos}, {tau_neg}")
    if not isinstance(logprobs, torch.Tensor) or not logprobs.is_floating_point():
        got = logprobs.dtype if isinstance(logprobs, torch.Tensor) else type(logprobs).__name__
        raise TypeError(f"{OP}: logprobs must be a floating-point tensor, got {got}")
    cu_seqlens = checked_offsets(OP, logprobs, cu_seqlens)
    if cu_seqlens is not None:
        cu_seqlens = _backend.beside(cu_seqlens, logprobs)
    num_rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    base = _anchor(kind, anchor, old_logprobs, rollout_logprobs)
    if kind != "cross_entropy":
        _needed(loss, "advantages", advantages)
    current = logprobs if logprobs.dtype == torch.float64 else logprobs.to(torch.float32)
    current = current.contiguous()
    base = _like(current, "old_logprobs", base)
    adv = None if kind == "cross_entropy" else _like(current, "advantages", advantages)
    ref = _like(current, "ref_logprobs", ref_logprobs) if kl_estimator is not None else None
    tokens = _like(current, "token_weights", token_weights)
    mask = native_mask(OP, loss_mask)
    if mask.shape != current.shape:
        raise ValueError(
            f"{OP}: loss_mask must be of shape {tuple(current.shape)}, got {tuple(mask.shape)}"
        )
    chosen = _backend.select(OP, current, mask, backend=backend, available_on_gpu=ON_GPU)
    if row_weights is None:
        row_weights = reduction_weights(
            mask,
            reduction=reduction,
            cu_seqlens=cu_seqlens,
            group_ids=group_ids,
            trajectory_ids=trajectory_ids,
            max_seq_len=max_seq_len,
            backend="torch" if chosen == "torch" else None,
        )
    weights = row_weights.detach().to(current.device, torch.float32).contiguous()
    if weights.shape != (num_rows,):
        raise ValueError(
            f"{OP}: row_weights must be of shape ({num_rows},), got {tuple(weights.shape)}"
        )
    segment = sequences_of(OP, scope, trajectory_ids, num_rows) if kind == "gspo" else None
    selected = None
    if kind in ("clip_cov", "kl_cov"):
        assert adv is not None
        then = current if base is None else base
        selected = reference.select_by_covariance(kind, p, current, then, adv, mask != 0, generator)
    if chosen == "torch":
        total, metrics = _torch(
            kind, p, current, base, adv, mask, weights, cu_seqlens, segment, ref, kl_estimator,
            tokens, selected,
        )  # fmt: skip
    else:
        use_triton = chosen == "triton"
        sequence = None
        if kind == "gspo":
            sequence = _sequence_delta(current, base, mask, cu_seqlens, segment, use_triton)
        call = (
            base, adv, mask, weights, cu_seqlens, ref, tokens,
            None if selected is None else selected.view(torch.uint8), sequence, LOSSES[kind],
            0 if kl_estimator is None else KL_ESTIMATORS[kl_estimator],
            [float(p[name]) for name in PARAMS], use_triton,
        )  # fmt: skip
        total, metrics = loss_and_metrics(current, call)
    return total, dict(zip(reference.METRICS, metrics.unbind(), strict=True))


def kl_penalty(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    *,
    estimator: str = "k3",
    loss_mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return each token's estimate of KL(current || reference), with its gradient.

    With d = logprob - reference: "k1" d, "abs" |d|, "k2" d^2 / 2, "k3" exp(x) - 1 - x with x = -d
    clamped to +-20 and the result to +-10 (http://joschu.net/blog/kl-approx.html). 0 where
    masked, whatever stands there.

    Args:
        logprobs: float cells of any shape; the gradient goes to them alone.
        ref_logprobs: the same shape.
        estimator: "k1", "abs", "k2" or "k3".
        loss_mask: the same shape, or None: every cell counts.
        backend: "native", "triton" (GPUs), "torch", or None to choose.

    Returns:
        float32 (float64 for float64 logprobs) in the shape of `logprobs`.

    Raises:
        ValueError: an unknown estimator or shapes that disagree.
        RuntimeError: a forward-mode derivative, which backend="torch" alone has.

    Example:
        >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-2.0]), estimator="k1")
        tensor([1.])
    """
    op = "kl_penalty"
    _one_of(op, "estimator", estimator, KL_ESTIMATORS)
    current = logprobs if logprobs.dtype == torch.float64 else logprobs.to(torch.float32)
    current = current.contiguous()
    ref = _like(current, "ref_logprobs", ref_logprobs, op)
    assert ref is not None
    if loss_mask is None:
        loss_mask = torch.ones_like(current, dtype=torch.bool)
    mask = native_mask(op, loss_mask)
    if mask.shape != current.shape:
        raise ValueError(
            f"{op}: loss_mask must be of shape {tuple(current.shape)}, got {tuple(mask.shape)}"
        )
    chosen = _backend.select(op, current, mask, backend=backend, available_on_gpu=ON_GPU)
    if chosen == "torch":
        return reference.kl_penalty(current, ref, mask != 0, estimator)
    return KlPenalty.apply(current, ref, mask, KL_ESTIMATORS[estimator], chosen == "triton")


def _one_of(op: str, name: str, value: object, allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {tuple(allowed)}, got {value!r}")


def _needed(by: str, name: str, value: object) -> None:
    if value is None:
        raise ValueError(f"{OP}: {by!r} needs {name}, got None")


def _loss_kind(loss: str, dppo_type: str) -> str:
    _one_of(OP, "loss", loss, LOSS_NAMES)
    if loss != "dppo":
        return loss
    _one_of(OP, "dppo_type", dppo_type, DPPO_TYPES)
    return DPPO_TYPES[dppo_type]


def _anchor(
    kind: str,
    anchor: str,
    old_logprobs: torch.Tensor | None,
    rollout_logprobs: torch.Tensor | None,
) -> torch.Tensor | None:
    _one_of(OP, "anchor", anchor, ("old", "rollout"))
    if kind == "cross_entropy":
        return None
    if kind == "rollout_is" or (kind == "cispo" and anchor == "rollout"):
        _needed(kind, "rollout_logprobs", rollout_logprobs)
        return rollout_logprobs
    if kind.startswith("dppo") and rollout_logprobs is not None:
        return rollout_logprobs
    return old_logprobs


def _like(
    current: torch.Tensor, name: str, value: torch.Tensor | None, op: str = OP
) -> torch.Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{op}: {name} must be a floating-point tensor, got {got}")
    if value.shape != current.shape:
        raise ValueError(
            f"{op}: {name} must be of shape {tuple(current.shape)}, got {tuple(value.shape)}"
        )
    if value.device != current.device:
        raise ValueError(f"{op}: {name} must be on {current.device}, got {value.device}")
    return value.detach().to(current.dtype).contiguous()


def _sequence_delta(
    current: torch.Tensor,
    base: torch.Tensor | None,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    segment: torch.Tensor | None,
    use_triton: bool,
) -> torch.Tensor:
    """(N,) float64: the mean of d over the trained tokens of each row's sequence."""
    then = current if base is None else base
    sums = torch.ops.skyrl_fast.delta_sums(
        current.detach(), then.detach(), mask, cu_seqlens, use_triton
    )
    if segment is not None:
        segment = _backend.beside(segment, current)
        # index_put_ sorts the rows on a GPU, so that sums have the same bits
        sums = torch.zeros_like(sums).index_put_((segment,), sums, accumulate=True)[segment]
    return sums[:, 0] / sums[:, 1].clamp(min=1)


def _torch(
    kind: str,
    p: dict[str, float],
    current: torch.Tensor,
    base: torch.Tensor | None,
    adv: torch.Tensor | None,
    mask: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    segment: torch.Tensor | None,
    ref: torch.Tensor | None,
    kl_estimator: str | None,
    tokens: torch.Tensor | None,
    selected: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    def flat(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.reshape(-1)

    return reference.policy_loss(
        kind,
        p,
        current.reshape(-1),
        flat(base),
        flat(adv),
        mask.reshape(-1) != 0,
        reference.row_of_cell(current, cu_seqlens),
        weights,
        segment_of_row=segment,
        ref_logprobs=flat(ref),
        kl_estimator=kl_estimator,
        token_weights=flat(tokens),
        selected=flat(selected),
    )
