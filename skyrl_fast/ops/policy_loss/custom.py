"""Policy losses of users in plain torch: their inputs, outputs and registration.

N rows, A cells of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from skyrl_fast.ops.policy_loss.losses import POLICY_LOSSES, LossScope, LossSpec
from skyrl_fast.registry import Function, Registry

if TYPE_CHECKING:  # the settings name losses, and are checked before torch is imported
    import torch

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
        from skyrl_fast.ops.policy_loss.reference import cell_row_ids

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
        raise ValueError(
            f"register_policy_loss: scope: expected one of {LOSS_SCOPES}, got {scope!r}"
        )

    def make(name: str, function: Callable[..., Any]) -> CustomLoss:
        return CustomLoss(name, function, scope, zero_where_advantage_is_zero)

    return _registry.register(function, name, make)


def find_policy_loss(name: str) -> LossSpec | CustomLoss:
    """Return the loss of a name, or of a function by `module:function`."""
    return _registry.find(name)
