"""The torch operators under `policy_loss` and `kl_penalty`: kernels, fakes, autograd.

Shapes: N rows; "cells" is (N, R) or, with offsets, (A,).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops._derivatives import first_derivative_only
from skyrl_fast.ops.policy_loss.reference import METRICS

# csrc/policy_loss/policy_loss_cuda.h: cells per partial sum on a GPU, and the numbers in each
CELLS_PER_SUM = 2048
NUM_LOSS_SUMS = 16

_library = torch.library.Library("skyrl_fast", "FRAGMENT")
_library.define(
    "policy_loss(Tensor logprobs, Tensor? old_logprobs, Tensor? advantages, Tensor loss_mask, "
    "Tensor row_weights, Tensor? cu_seqlens, Tensor? ref_logprobs, Tensor? token_weights, "
    "Tensor? cross_entropy_weights, Tensor? kl_weights, Tensor? selected, Tensor? sequence_delta, "
    "int loss, int kl, float[] params, bool use_triton, bool with_grad) -> "
    "(Tensor metrics, Tensor grad)"
)
_library.define(
    "kl_penalty(Tensor logprobs, Tensor ref_logprobs, Tensor loss_mask, Tensor? grad_out, int kl, "
    "bool use_triton=False) -> Tensor"
)
# An operator, so that gspo can be part of a compiled graph.
_library.define(
    "delta_sums(Tensor a, Tensor b, Tensor loss_mask, Tensor? cu_seqlens, bool use_triton=False) "
    "-> Tensor"
)


class PolicyLoss(NamedTuple):
    """A policy loss. Only `loss` has a gradient.

    Args:
        loss: 0-dimensional float32 (float64 for float64 inputs).
        metrics: 0-dimensional float64 each, see `policy_loss`; "entropy" if requested.
        logprobs: cells, float32 (float64), 0 where masked; if the op computed them from logits.
        entropy: likewise, if requested.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


def loss_and_metrics(
    current: torch.Tensor, call: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, differentiable by `current`, and the metrics, (len(METRICS),) float64.

    Args:
        call: the operator's other arguments, up to `with_grad`.
    """
    if not (torch.is_grad_enabled() and current.requires_grad):
        metrics, _ = torch.ops.skyrl_fast.policy_loss(current, *call, False)
        return _loss_of(metrics, current), metrics
    if torch.compiler.is_compiling():
        return _CompiledPolicyLoss.apply(current, *call)
    return _EagerPolicyLoss.apply(current, *call)


def _loss_of(metrics: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    # A copy, also of float64: callers may scale a loss in place.
    return metrics[0].to(current.dtype, copy=True)


class _EagerPolicyLoss(torch.autograd.Function):
    """The gradient is computed with the loss and moved out at the first backward."""

    # So nothing is copied and autograd may keep it as `.grad`; another backward through a retained
    # graph recomputes it.

    @staticmethod
    def forward(ctx: Any, current: torch.Tensor, *call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        metrics, ctx.grad = torch.ops.skyrl_fast.policy_loss(current, *call, True)
        ctx.save_for_backward(current, *call[:11])
        ctx.rest = call[11:]
        ctx.mark_non_differentiable(metrics)
        return _loss_of(metrics, current), metrics

    @staticmethod
    @first_derivative_only("policy_loss")
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        grad = ctx.grad
        ctx.grad = None
        if grad is None:
            _, grad = torch.ops.skyrl_fast.policy_loss(*saved, *ctx.rest, True)
        use_triton = ctx.rest[-1]
        if _backend.on_gpu(grad) and not use_triton:  # the kernel checks whether the factor is 1
            _backend.run_kernel("scale_cells", False, grad, grad, grad_loss.reshape(1))
        # Reading the factor costs nothing on a CPU; on a GPU it would wait.
        elif _backend.on_gpu(grad) or float(grad_loss) != 1.0:
            grad.mul_(grad_loss)
        return (grad,) + (None,) * (len(saved) - 1 + len(ctx.rest))


class _CompiledPolicyLoss(torch.autograd.Function):
    """The same for a compiled graph, which cannot mutate its context."""

    @staticmethod
    def forward(ctx: Any, current: torch.Tensor, *call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        metrics, grad = torch.ops.skyrl_fast.policy_loss(current, *call, True)
        ctx.save_for_backward(grad)
        ctx.num_inputs = 1 + len(call)
        ctx.mark_non_differentiable(metrics)
        return _loss_of(metrics, current), metrics

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * grad_loss,) + (None,) * (ctx.num_inputs - 1)


class KlPenalty(torch.autograd.Function):
    """Each token's penalty, differentiable by the current log-probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        current: torch.Tensor,
        ref: torch.Tensor,
        mask: torch.Tensor,
        kl: int,
        use_triton: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(current, ref, mask)
        ctx.how = (kl, use_triton)
        return torch.ops.skyrl_fast.kl_penalty(current, ref, mask, None, kl, use_triton)

    @staticmethod
    @first_derivative_only("kl_penalty")
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        grad_out = grad_out.contiguous()
        grad = torch.ops.skyrl_fast.kl_penalty(*ctx.saved_tensors, grad_out, *ctx.how)
        return grad, None, None, None, None


def _policy_loss(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, use_triton, with_grad = args
    current = inputs[0]
    metrics = current.new_empty(len(METRICS), dtype=torch.float64)
    # An operator returns tensors: without a gradient an empty one, which costs nothing.
    if with_grad:
        shape = current.shape
    else:
        shape = (0,)
    grad = _backend.empty(shape, current.dtype, current.device)
    outputs = [grad if with_grad else None, metrics]
    if _backend.on_gpu(current) and not use_triton:
        # One group of sums per block of cells, which the last launch adds up in order.
        num_sums = -(-current.numel() // CELLS_PER_SUM) * NUM_LOSS_SUMS
        outputs.append(metrics.new_empty(num_sums))
    _backend.run_kernel("policy_loss", use_triton, current, *inputs, *outputs)
    return metrics, grad


def _policy_loss_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    current = args[0]
    with_grad = args[-1]
    metrics = current.new_empty(len(METRICS), dtype=torch.float64)
    return metrics, current.new_empty(current.shape if with_grad else (0,))


def _kl_penalty(
    current: torch.Tensor,
    ref: torch.Tensor,
    mask: torch.Tensor,
    grad_out: torch.Tensor | None,
    kl: int,
    use_triton: bool = False,
) -> torch.Tensor:
    out = _backend.empty(current.shape, current.dtype, current.device)
    _backend.run_kernel("kl_penalty", use_triton, current, current, ref, mask, kl, grad_out, out)
    return out


def _delta_sums(
    a: torch.Tensor,
    b: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    use_triton: bool = False,
) -> torch.Tensor:
    sums = _delta_sums_fake(a, b, mask, cu_seqlens)
    _backend.run_kernel("delta_sums", use_triton, a, a, b, mask, cu_seqlens, sums)
    return sums


def _delta_sums_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    use_triton: bool = False,
) -> torch.Tensor:
    if cu_seqlens is None:
        num_rows = a.shape[0]
    else:
        num_rows = cu_seqlens.shape[0] - 1
    return a.new_empty((num_rows, 2), dtype=torch.float64)


for _key in ("CPU", "CUDA"):
    _library.impl("policy_loss", _policy_loss, _key)
    _library.impl("delta_sums", _delta_sums, _key)
    _library.impl("kl_penalty", _kl_penalty, _key)
torch.library.register_fake("skyrl_fast::policy_loss", _policy_loss_fake, lib=_library)
torch.library.register_fake(
    "skyrl_fast::kl_penalty", lambda current, *_: current.new_empty(current.shape), lib=_library
)
torch.library.register_fake("skyrl_fast::delta_sums", _delta_sums_fake, lib=_library)
