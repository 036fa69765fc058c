"""Policy losses of users in plain torch: their inputs, outputs and registration.

N rows, A cells of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

import torch

from skyrl_fast.ops.policy_loss.autograd import PolicyLoss
from skyrl_fast.ops.policy_loss.losses import POLICY_LOSSES, LossScope, LossSpec
from skyrl_fast.ops.policy_loss.reference import (
    cell_row_ids,
    mask_values,
    name_metrics,
    weighted_loss,
)
from skyrl_fast.registry import Function, Registry, call_function, check_result

CLIP_METRICS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "chosen_ratio")
SUMS = ("loss", "policy_loss", "kl_loss", "num_tokens")
LOSS_SCOPES = ("token", "sequence", "mini_batch")


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a policy loss. Cells are 0 where `loss_mask` is False.

    Args:
        logprobs: (A,) float, the current policy's, which the loss is differentiated by.
        old_logprobs: (A,), the old policy's; the values of `logprobs` where the batch has none.
        rollout_logprobs: (A,), the sampler's, or None.
        ref_logprobs: (A,), the reference policy's, or None without a KL penalty.
        advantages: (A,).
        loss_mask: (A,) bool, the trained tokens (without those that are only supervised).
        cu_seqlens: (N + 1,) int64 offsets of the rows' cells.
        sequence_ids: (N,) int64, the sequence of each row: a sequence is a row or a trajectory
            (`trainer.algorithm.sequence_scope`).
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    sequence_ids: torch.Tensor

    @property
    def row_ids(self) -> torch.Tensor:
        """(A,) int64, the row of each cell."""
        return cell_row_ids(self.logprobs, self.cu_seqlens)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The result of a policy loss; a bare tensor counts as `token_losses`.

    Args:
        token_losses: (A,) float, each token's loss before any weight; masked cells are ignored.
            Reduction, `token_weights`, KL penalty and entropy bonus are applied afterwards.
        metrics: name -> (A,) values, whose mean over trained tokens is logged as
            `policy/<name>`, or single values, averaged over micro-batches by their tokens.
            For names that end in `_max` or `_min`, the largest or smallest is logged.
    """

    token_losses: torch.Tensor
    metrics: Mapping[str, torch.Tensor | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A user's policy loss.

    Args:
        name: for errors and `trainer.algorithm.policy_loss_type`.
        function: gets `LossInputs` and the settings, returns `LossOutput` or (A,) losses.
        scope: what must be computed in one call: "token" (any split works), "sequence" (all
            tokens of a sequence) or "mini_batch".
        zero_where_advantage_is_zero: declares that loss and gradient of a token vanish with its
            advantage, so that rows without an advantage need no forward pass.
        settings: keyword arguments.
    """

    name: str
    function: Callable[..., LossOutput | torch.Tensor]
    scope: LossScope = "token"
    zero_where_advantage_is_zero: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


_registry: Registry[LossSpec, CustomLoss] = Registry(
    "policy loss", POLICY_LOSSES, lambda name, function: CustomLoss(name, function)
)


@overload
def register_policy_loss(
    function: Callable[..., LossOutput | torch.Tensor],
    *,
    name: str | None = None,
    scope: LossScope = "token",
    zero_where_advantage_is_zero: bool = False,
) -> str: ...


@overload
def register_policy_loss(
    function: str,
    *,
    scope: LossScope = "token",
    zero_where_advantage_is_zero: bool = False,
) -> Callable[[Function], Function]: ...


def register_policy_loss(
    function: Callable[..., LossOutput | torch.Tensor] | str,
    *,
    name: str | None = None,
    scope: LossScope = "token",
    zero_where_advantage_is_zero: bool = False,
) -> str | Callable[[Function], Function]:
    """Register a function as a policy loss; return its name for `policy_loss_type`.

    Called with a name, it is a decorator that returns the function.

    Args:
        function: gets `LossInputs` and, as keyword arguments, `policy_loss_kwargs`; returns
            `LossOutput` or (A,) losses per token. Plain, differentiable torch.
        name: None: the function's name.
        scope, zero_where_advantage_is_zero: see `CustomLoss`.

    Returns:
        `module:function` where the function can be imported, so that every process of a run finds
        it; else the name, which is registered only in this process.

    Raises:
        ValueError: an unknown scope, or the name of a built-in loss.

    Example:
        @register_policy_loss("reinforce")
        def reinforce(inputs):
            return -inputs.advantages * inputs.logprobs
    """
    if scope not in LOSS_SCOPES:
        raise ValueError(f"register_policy_loss: scope must be one of {LOSS_SCOPES}, got {scope!r}")

    def make(name: str, function: Callable[..., Any]) -> CustomLoss:
        return CustomLoss(name, function, scope, zero_where_advantage_is_zero)

    return _registry.register(function, name, make)


def find_policy_loss(name: str) -> LossSpec | CustomLoss:
    """Return the loss of a name, or of a function by `module:function`."""
    return _registry.find(name)


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
            f"{op}: token_losses must be on {logprobs.device}, got {output.token_losses.device}"
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
            f"policy_loss: {loss}: metric {name!r} must be one number or of shape "
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
