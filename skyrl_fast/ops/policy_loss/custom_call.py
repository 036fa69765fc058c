"""The call of a user's policy loss: clean inputs, the weighted sum of its tokens, and its metrics.

N rows, A cells of all rows.
"""

from __future__ import annotations

import torch

from skyrl_fast.ops.policy_loss.autograd import PolicyLoss
from skyrl_fast.ops.policy_loss.custom import CustomLoss, LossInputs, LossOutput
from skyrl_fast.ops.policy_loss.reference import mask_values, name_metrics, weighted_loss
from skyrl_fast.registry import call_function, check_result

CLIP_METRICS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "chosen_ratio")
SUMS = ("loss", "policy_loss", "kl_loss", "num_tokens")


def custom_policy_loss(
    loss: CustomLoss,
    inputs: LossInputs,
    *,
    live: torch.Tensor,
    row_weights: torch.Tensor,
    token_weights: torch.Tensor | None,
    cross_entropy_weights: torch.Tensor | None,
    kl_weights: torch.Tensor | None,
    kl_estimator: str | None,
    kl_coef: float,
) -> PolicyLoss:
    """Return the weighted sum of a user's token losses and the other streams, with metrics.

    Args:
        inputs: cells as given to `policy_loss`; masked cells may hold any value.
        live: (A,) bool, the tokens of all streams.
        row_weights: (N,). token_weights, cross_entropy_weights, kl_weights: (A,).
    """
    stream = inputs.loss_mask
    logprobs = inputs.logprobs
    clean_inputs = _mask_inputs(inputs, None if loss.scope != "token" else token_weights)
    op = f"policy_loss: {loss.name}"
    output = call_function(op, loss.function, clean_inputs, loss.settings, LossOutput)
    check_result(op, "token_losses", output.token_losses, tuple(logprobs.shape))
    if output.token_losses.device != logprobs.device:
        raise ValueError(
            f"{op}: token_losses: expected a tensor on {logprobs.device}, got "
            f"{output.token_losses.device}"
        )
    # A masked cell may hold NaN, which a product with 0 would keep.
    value = mask_values(output.token_losses.to(logprobs.dtype), stream)
    if token_weights is not None:
        factor = mask_values(token_weights, stream)
        # A factor of 0 drops the token, even where its loss is NaN.
        value = mask_values(value, factor != 0) * factor
    no = torch.zeros_like(live)
    total, loss_metrics = weighted_loss(
        value,
        logprobs,
        live,
        stream,
        row_weights[inputs.row_ids],
        delta=(clean_inputs.logprobs - clean_inputs.old_logprobs).detach(),
        flags=(no, no, no, no),
        ref_logprobs=inputs.ref_logprobs,
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        cross_entropy_weights=cross_entropy_weights,
        kl_weights=kl_weights,
    )
    metrics = name_metrics(
        loss_metrics,
        has_cross_entropy=cross_entropy_weights is not None,
        has_kl_weights=kl_weights is not None,
    )
    for name in CLIP_METRICS:  # the function decides what counts as clipped
        del metrics[name]
    with torch.no_grad():
        for name, values in output.metrics.items():
            metrics[name] = _metric(loss.name, name, values, stream)
    return PolicyLoss(total, metrics)


def _mask_inputs(inputs: LossInputs, token_weights: torch.Tensor | None) -> LossInputs:
    """Return the inputs with 0 where masked; no gradient flows there, nor to dropped tokens."""
    live = inputs.loss_mask
    logprobs = mask_values(inputs.logprobs, live)
    if token_weights is not None:
        # A function may read a dropped token, in a mean over its sequence, say; it is not trained.
        logprobs = torch.where(token_weights != 0, logprobs, logprobs.detach())

    def clean(cells: torch.Tensor | None) -> torch.Tensor | None:
        if cells is None:
            return None
        return mask_values(cells, live)

    return LossInputs(
        logprobs,
        mask_values(inputs.old_logprobs, live),
        clean(inputs.rollout_logprobs),
        clean(inputs.ref_logprobs),
        mask_values(inputs.advantages, live),
        live,
        inputs.cu_seqlens,
        inputs.sequence_ids,
    )


def _metric(loss: str, name: str, values: torch.Tensor | float, live: torch.Tensor) -> torch.Tensor:
    """Return one number, float64: the mean over trained tokens (`_max`, `_min`: the extreme)."""
    if name in SUMS:
        raise ValueError(f"policy_loss: {loss}: metric {name!r} is computed from token_losses")
    values = torch.as_tensor(values, device=live.device).detach().double()
    if values.numel() == 1 and values.shape != live.shape:
        return values.reshape(())
    if values.shape != live.shape:
        raise ValueError(
            f"policy_loss: {loss}: metric {name!r}: expected one number or shape "
            f"{tuple(live.shape)}, got {tuple(values.shape)}"
        )
    trained = values[live]
    if trained.numel() == 0:
        return values.new_zeros(())
    if name.endswith("_max"):
        return trained.max()
    if name.endswith("_min"):
        return trained.min()
    return trained.mean()
