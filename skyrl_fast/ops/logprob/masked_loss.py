"""Policy loss from logits in one pass. Shapes: cells are (N, R) or, ragged, (A,); V vocab.

Design: docs/design/005-policy-loss.md.
"""

from __future__ import annotations

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops._offsets import check_offsets
from skyrl_fast.ops.logprob import reference as logprob_reference
from skyrl_fast.ops.logprob.kept import KeptSets, check_kept, kept_sets
from skyrl_fast.ops.logprob.masked_loss_autograd import LossCall, Result, visit
from skyrl_fast.ops.logprob.selected import (
    KERNEL_DTYPES,
    ON_GPU,
    as_uint8,
    check_logits,
    check_no_overlap,
    check_selection,
    check_targets,
    kernel_rows,
)
from skyrl_fast.ops.policy_loss import reference as loss_reference
from skyrl_fast.ops.policy_loss.autograd import PolicyLoss
from skyrl_fast.ops.policy_loss.losses import (
    KERNEL_PARAMS,
    KL_ESTIMATORS,
    LOSS_CODES,
    POLICY_LOSSES,
    LossSettings,
    LossSpec,
    kernel_kind,
    kernel_params,
    loss_and_settings,
    ratio_logprobs,
)

OP = "masked_logprob_loss"
TOKEN_LOSSES = tuple(name for name, spec in POLICY_LOSSES.items() if spec.scope == "token")


def masked_logprob_loss(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor | None,
    loss_mask: torch.Tensor | None = None,
    *,
    loss: str | LossSettings = "regular",
    rollout_logprobs: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
    kl_estimator: str | None = None,
    kl_coef: float = 0.001,
    row_weights: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
    cross_entropy_weights: torch.Tensor | None = None,
    kl_weights: torch.Tensor | None = None,
    temperature: float = 1.0,
    kept_ids: torch.Tensor | None = None,
    cu_kept: torch.Tensor | None = None,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> PolicyLoss:
    """Return the policy loss of logits; each row's gradient is computed while it is in the cache.

    loss = sum over trained tokens of row_weight * (token_weight * policy loss
    + cross_entropy_weight * (-logprob) + kl_coef * kl_weight * KL), as `policy_loss` defines them.
    One pass is enough because the token weights are known in advance: a
    row's log-probability determines its derivative, and the row is turned into its gradient at
    once. Rows of mask 0 are never read, rows whose derivative is 0 (clipped, advantage 0) are not
    read again; the gradient of both is 0. Under torch.no_grad no gradient is computed.

    The losses of sequences or mini-batches (gspo, clip_cov, kl_cov, sequence masks) need every
    log-probability before any derivative: use `selected_logprob` and `policy_loss` for them.

    `metrics` are those of `policy_loss` (ratios, shares of clipped tokens, KL, number of tokens
    and the parts of the loss, see there), computed from the log-probabilities of that pass; with
    `return_entropy` also `entropy`, its mean over trained tokens.

    Args:
        logits: cells + (V,) float32, bfloat16 or float16; the last dimension contiguous. float64
            is computed by torch.
        target_ids: cells, integers; in [0, V) where the mask is 1.
        old_logprobs: cells, the denominator of the ratio. None: the current ones, ratio 1.
        advantages: cells; None only for "cross_entropy".
        loss_mask: cells of any dtype, or None: all ones. A token is trained where it is not 0.
        loss: one of `TOKEN_LOSSES`, with its defaults, or its settings: `Sapo(tau_pos=2.0)`.
        rollout_logprobs: cells; the sampler's, which take the place of `old_logprobs` in
            "rollout_is", in "dppo" where given, and in `Cispo(cispo_ratio="rollout")`.
        ref_logprobs, kl_estimator, kl_coef: KL penalty: "k1", "abs", "k2" or "k3".
        row_weights: (N,), each row's weight in the mini-batch's loss, from `reduction_weights`; or
            cells, each token's. None: one over the number of trained tokens here.
        cu_seqlens: (N + 1,) offsets of the rows' cells, for (N,) weights of (A,) cells.
        token_weights: cells; multiply the policy loss, not the other streams. None: ones.
        cross_entropy_weights, kl_weights: cells, the weights of the other streams, as in
            `policy_loss`. A token of token weight 0 is then only supervised.
        temperature: divides the logits; from 1e-6 to 1e30.
        kept_ids, cu_kept: as in `selected_logprob`.
        return_entropy: also return the entropy, without a gradient.
        inplace_backward: write the gradient over the logits, during this call; another op that
            saved them for its backward then raises an autograd error. That of float16 logits is
            written in the backward, after the loss is scaled. A function compiled by
            torch.compile, and backend "torch", still allocate the gradient.
        backend: "native", "triton" (GPUs), "torch", or None to choose.

    Returns:
        `PolicyLoss` with log-probabilities, and with the entropy if requested.

    Raises:
        ValueError: an unknown loss or one of sequences, a setting out of its limits, shapes
            that do not match, a target out of range where the mask is 1, kept sets as in
            `selected_logprob`, or a device or dtype without a kernel.
        RuntimeError: a second or a forward-mode derivative, which only backend="torch" has.

    Example:
        >>> logits, targets = torch.zeros(1, 4), torch.tensor([2])
        >>> masked_logprob_loss(logits, targets, None, None, loss="cross_entropy").loss
        tensor(1.3863)
    """
    spec, settings = loss_and_settings(OP, loss)
    _check_loss(spec, kl_estimator, ref_logprobs, advantages, kl_weights)
    check_logits(OP, logits)
    check_selection(OP, logits, "logits", target_ids, loss_mask, temperature)
    kept = kept_sets(OP, kept_ids, cu_kept, target_ids)
    optional = (old_logprobs, advantages, loss_mask, rollout_logprobs, ref_logprobs, row_weights)
    stream_weights = (token_weights, cross_entropy_weights, kl_weights)
    chosen = _backend.select(
        OP,
        logits,
        target_ids,
        *optional,
        *stream_weights,
        kept_ids,
        backend=backend,
        available_on_gpu=ON_GPU,
        transforms=("vmap",),
    )
    if logits.dtype not in KERNEL_DTYPES:
        # float64 is for checks of gradients; the kernels compute in float32.
        chosen = "torch"
    shape = target_ids.shape
    if logits.dtype == torch.float64:
        dtype = torch.float64
    else:
        dtype = torch.float32
    kind = kernel_kind(spec, settings)
    old = ratio_logprobs(OP, spec, settings, old_logprobs, rollout_logprobs)
    targets = target_ids.reshape(-1).to(torch.int64).contiguous()
    mask = as_uint8(loss_mask)
    weights = _weights(row_weights, cu_seqlens, shape, dtype)
    call = LossCall(
        targets,
        mask,
        kept and kept.ids,
        kept and kept.ranges,
        float(temperature),
        LOSS_CODES[kind],
        0 if kl_estimator is None else KL_ESTIMATORS[kl_estimator],
        kernel_params(settings, kl_coef),
        _cells("old_logprobs", old, shape, dtype),
        _cells("advantages", advantages if spec.needs_advantages else None, shape, dtype),
        _cells("ref_logprobs", ref_logprobs if kl_estimator else None, shape, dtype),
        _cells("token_weights", token_weights, shape, dtype),
        _cells("cross_entropy_weights", cross_entropy_weights, shape, dtype),
        _cells("kl_weights", kl_weights, shape, dtype),
        _token_mean(targets, mask, dtype) if weights is None else weights,
        return_entropy,
        chosen == "triton",
    )
    if chosen == "torch":
        result = _torch(logits, call, kind, kl_estimator, kept)
    else:
        rows = kernel_rows(OP, logits)
        if inplace_backward and torch.is_grad_enabled() and logits.requires_grad:
            # A row that shares memory with another would overwrite its logits before they are read.
            check_no_overlap(OP, rows)
        result = visit(rows, call, inplace_backward)
    metrics = loss_reference.name_metrics(
        result.metrics,
        has_cross_entropy=cross_entropy_weights is not None,
        has_kl_weights=kl_weights is not None,
    )
    entropy = None
    if return_entropy:
        total = result.entropy.sum(dtype=torch.float64)  # 0 where masked
        metrics["entropy"] = total / metrics["num_tokens"].clamp(min=1)
        entropy = result.entropy.view(shape)
    return PolicyLoss(result.loss, metrics, result.logprobs.view(shape), entropy)


def _torch(
    logits: torch.Tensor,
    call: LossCall,
    kind: str,
    kl_estimator: str | None,
    kept: KeptSets | None,
) -> Result:
    rows = logits.reshape(-1, logits.shape[-1])
    if call.mask is None:
        live = torch.ones_like(call.targets, dtype=torch.bool)
    else:
        live = call.mask != 0
    check_targets(OP, call.targets, call.mask, rows.shape[-1])
    check_kept(OP, kept, call.targets, call.mask, rows.shape[-1])
    logprobs, entropy = logprob_reference.selected_logprob(
        rows, call.targets, live, call.temperature, kept
    )
    total, metrics = loss_reference.policy_loss(
        kind,
        dict(zip((*KERNEL_PARAMS, "kl_coef"), call.params, strict=True)),
        logprobs,
        call.old_logprobs,
        call.advantages,
        live,
        # Each cell is a row, whose weight is its own.
        torch.arange(live.numel(), device=live.device),
        call.row_weights,
        ref_logprobs=call.ref_logprobs,
        kl_estimator=kl_estimator,
        token_weights=call.token_weights,
        cross_entropy_weights=call.cross_entropy_weights,
        kl_weights=call.kl_weights,
    )
    return Result(total, logprobs.detach(), entropy.detach(), metrics)


def _token_mean(
    targets: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return (M,), one over the number of trained tokens; does not synchronize."""
    ones = torch.ones(targets.shape, dtype=dtype, device=targets.device)
    if mask is None:
        return ones / max(targets.numel(), 1)
    # On the device: reading the count would wait for a GPU.
    return ones / mask.count_nonzero().clamp(min=1)


def _weights(
    row_weights: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    if not isinstance(row_weights, torch.Tensor) or row_weights.shape == shape:
        return _cells("row_weights", row_weights, shape, dtype)
    if len(shape) == 2:
        num_rows = shape[0]
    else:
        num_rows = None
    if cu_seqlens is not None:
        cu_seqlens = check_offsets(OP, "cu_seqlens", cu_seqlens, total=shape.numel())
        num_rows = cu_seqlens.numel() - 1
    if row_weights.shape != (num_rows,):
        wanted = f"{tuple(shape)}" + ("" if num_rows is None else f" or ({num_rows},)")
        raise ValueError(
            f"{OP}: row_weights: expected shape {wanted}, got {tuple(row_weights.shape)}"
        )
    weights = row_weights.detach().to(dtype)
    if cu_seqlens is None:
        return weights[:, None].expand(shape).reshape(-1)
    lengths = cu_seqlens.diff().to(weights.device, torch.int64)
    # The size is given, or torch would read the sum of the lengths from the device.
    return torch.repeat_interleave(weights, lengths, output_size=shape.numel())


def _check_loss(
    spec: LossSpec,
    kl_estimator: str | None,
    ref_logprobs: torch.Tensor | None,
    advantages: torch.Tensor | None,
    kl_weights: torch.Tensor | None,
) -> None:
    # The gradient is written in the pass that reads the logits, before other rows'
    # log-probabilities are known.
    if spec.scope != "token":
        raise ValueError(
            f"{OP}: loss {spec.name!r} needs the log-probabilities of a full sequence or batch "
            "before any derivative; use selected_logprob and policy_loss"
        )
    if kl_estimator is not None and kl_estimator not in KL_ESTIMATORS:
        raise ValueError(
            f"{OP}: kl_estimator: expected one of {tuple(KL_ESTIMATORS)} or None, "
            f"got {kl_estimator!r}"
        )
    if kl_estimator is not None and ref_logprobs is None:
        raise ValueError(f"{OP}: kl_estimator {kl_estimator!r} needs ref_logprobs, got None")
    if kl_weights is not None and kl_estimator is None:
        raise ValueError(f"{OP}: kl_weights need kl_estimator, got None")
    if spec.needs_advantages and advantages is None:
        raise ValueError(f"{OP}: loss {spec.name!r} needs advantages, got None")


def _cells(
    name: str, value: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{OP}: {name}: expected a torch tensor, got {type(value).__name__}")
    if value.shape != shape:
        raise ValueError(f"{OP}: {name}: expected shape {tuple(shape)}, got {tuple(value.shape)}")
    # A constant of the loss: only the logits have a gradient.
    return value.detach().to(dtype).reshape(-1).contiguous()
