"""Logits to policy loss in one visit. Shapes: cells are (N, R) or, ragged, (A,); V vocab."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob import (
    KERNEL_DTYPES,
    ON_GPU,
    as_uint8,
    check_logits,
    check_no_overlap,
    check_selection,
    kernel_rows,
)

OP = "masked_logprob_loss"
TOKEN_LOSSES = {
    "regular": 0,
    "dual_clip": 1,
    "cispo": 3,
    "rollout_is": 4,
    "sapo": 7,
    "dppo_tv": 8,
    "dppo_kl": 9,
    "cross_entropy": 10,
    "importance_sampling": 11,
}
SEQUENCE_LOSSES = ("gspo", "clip_cov", "kl_cov")
KL_ESTIMATORS = {None: 0, "k1": 1, "abs": 2, "k2": 3, "k3": 4}


class MaskedLogprobLoss(NamedTuple):
    """What the visit saw. Only `loss` has a gradient."""

    loss: torch.Tensor  # 0-dimensional float32
    logprobs: torch.Tensor  # cells, float32, 0 where masked
    entropy: torch.Tensor | None  # cells, float32, or None


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
    log-probability before any derivative: use `selected_logprob` and `policy_loss` for them. Give
    `logprobs` of the result to `policy_loss` under torch.no_grad for its metrics.

    Args:
        logits: cells + (V,) float32, bfloat16 or float16; the last dimension contiguous.
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
            for a backward gets an error of autograd's.
        backend: "native", "triton" (GPUs), or None to choose.

    Raises:
        ValueError: an unknown or sequence-level loss, shapes that disagree, a target out of range
            where the mask is 1, or a device or dtype without a kernel.

    Example:
        >>> logits, targets = torch.zeros(1, 4), torch.tensor([2])
        >>> masked_logprob_loss(logits, targets, None, None, loss="cross_entropy").loss
        tensor(1.3863)
    """
    _check_loss(loss, kl_estimator, ref_logprobs, advantages)
    check_logits(OP, logits)
    check_selection(OP, logits, "logits", target_ids, loss_mask, temperature)
    chosen = _backend.select(OP, logits, target_ids, backend=backend, available_on_gpu=ON_GPU)
    if chosen == "torch" or logits.dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"{OP}: logits must be float32, bfloat16 or float16 where a kernel is compiled in, got "
            f"{logits.dtype} on {logits.device}; use selected_logprob and policy_loss"
        )
    cells = {
        "anchor": _cells("anchor_logprobs", anchor_logprobs, target_ids.shape),
        "advantages": _cells("advantages", advantages, target_ids.shape),
        "reference": _cells("ref_logprobs", ref_logprobs, target_ids.shape),
        "token_weights": _cells("token_weights", token_weights, target_ids.shape),
        "weights": _cells("loss_weights", loss_weights, target_ids.shape),
    }
    targets = target_ids.reshape(-1).to(torch.int64).contiguous()
    mask = as_uint8(loss_mask)
    if cells["weights"] is None:
        cells["weights"] = _token_mean(targets, mask)
    params = [clip_low, clip_high, clip_ratio_c, tau_pos, tau_neg, delta_low, delta_high]
    params += [0.0, kl_coef]  # between them is the coefficient of a sequence loss
    call = (
        TOKEN_LOSSES[loss],
        KL_ESTIMATORS[kl_estimator],
        params,
        *(cells[name] for name in ("anchor", "advantages", "reference", "token_weights")),
        cells["weights"],
    )
    rows = kernel_rows(OP, logits)
    wants_grad = torch.is_grad_enabled() and logits.requires_grad
    if inplace and wants_grad:
        check_no_overlap(OP, rows)
    total, logprobs, entropy = _Visit.apply(
        *(rows, targets, mask, temperature, call, return_entropy, inplace, wants_grad),
        chosen == "triton",
    )
    shape = target_ids.shape
    return MaskedLogprobLoss(
        total, logprobs.view(shape), entropy.view(shape) if return_entropy else None
    )


def _token_mean(targets: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return (M,) float32, one over the number of trained tokens; waits for no device."""
    ones = torch.ones(targets.shape, dtype=torch.float32, device=targets.device)
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
        raise ValueError(f"{OP}: loss must be one of {tuple(TOKEN_LOSSES)}, got {loss!r}")
    if kl_estimator not in KL_ESTIMATORS:
        raise ValueError(
            f"{OP}: kl_estimator must be one of {tuple(KL_ESTIMATORS)}, got {kl_estimator!r}"
        )
    if kl_estimator is not None and ref_logprobs is None:
        raise ValueError(f"{OP}: kl_estimator {kl_estimator!r} needs ref_logprobs, got None")
    if loss != "cross_entropy" and advantages is None:
        raise ValueError(f"{OP}: loss {loss!r} needs advantages, got None")


def _cells(name: str, value: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{OP}: {name} must be a torch tensor, got {type(value).__name__}")
    if value.shape != shape:
        raise ValueError(f"{OP}: {name} must be of shape {tuple(shape)}, got {tuple(value.shape)}")
    return value.detach().to(torch.float32).reshape(-1).contiguous()


class _Visit(torch.autograd.Function):
    """The loss of rows of logits; the gradient is made in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        mask: torch.Tensor | None,
        temperature: float,
        call: tuple[Any, ...],
        return_entropy: bool,
        inplace: bool,
        wants_grad: bool,
        use_triton: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_rows = targets.numel()
        logprobs = logits.new_empty(num_rows, dtype=torch.float32)
        losses = torch.empty_like(logprobs)
        entropy = logprobs.new_empty(num_rows if return_entropy else 0)
        data, grad = logits.detach(), None
        if wants_grad:
            grad = data if inplace else _backend.empty(logits.shape, logits.dtype, logits.device)
        entropy_out = entropy if return_entropy else None
        arguments = (data, targets, mask, temperature, *call, logprobs, losses, entropy_out, grad)
        _backend.run_kernel(OP, use_triton, logits, *arguments)
        if grad is data:
            torch.autograd.graph.increment_version(logits)
        ctx.grad, ctx.use_triton = grad, use_triton
        ctx.mark_non_differentiable(logprobs, entropy)
        return losses.sum(dtype=torch.float64).to(torch.float32), logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_loss: torch.Tensor, *unused: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad, ctx.grad = ctx.grad, None
        if grad is None:
            raise RuntimeError(
                f"{OP}: a second backward through the same loss has no gradient left"
            )
        if not _backend.on_gpu(grad):
            if float(grad_loss) != 1.0:
                grad.mul_(grad_loss)
        elif ctx.use_triton:
            grad.mul_(grad_loss)
        else:  # asking whether it is 1 would wait for the device: the kernel asks
            factor = grad_loss.reshape(1).to(torch.float32)
            _backend.run_kernel("scale_rows", False, grad, grad, factor)
        return grad, *(None,) * 8
