"""The torch operator of `masked_logprob_loss`: kernels, fake, autograd.

Shapes: M rows, V vocab. Logits are (M, V), or (outer, inner, V) where rows have two strides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops._derivatives import first_derivative_only
from skyrl_fast.ops.logprob import autograd as autograd  # registers selected_logprob
from skyrl_fast.ops.policy_loss.autograd import loss_and_metrics

Tensor = torch.Tensor

_library = torch.library.Library("skyrl_fast", "FRAGMENT")
_library.define(
    "masked_logprob_loss(Tensor logits, Tensor target_ids, Tensor? mask, Tensor? kept_ids, "
    "Tensor? kept_ranges, float temperature, int loss, int kl, float[] params, "
    "Tensor? old_logprobs, Tensor? advantages, Tensor? ref_logprobs, Tensor? token_weights, "
    "Tensor? cross_entropy_weights, Tensor? kl_weights, Tensor row_weights, bool return_entropy, "
    "bool use_triton, bool with_grad) -> (Tensor logprobs, Tensor entropy, Tensor grad)"
)


class LossCall(NamedTuple):
    """The operator's arguments between the logits and `with_grad`."""

    targets: Tensor  # (M,) int64
    mask: Tensor | None  # (M,) uint8
    kept_ids: Tensor | None  # the ids of KeptSets
    kept_ranges: Tensor | None
    temperature: float
    loss: int
    kl: int
    params: list[float]  # values of losses.kernel_params
    old_logprobs: Tensor | None  # this and the following: (M,) float32
    advantages: Tensor | None
    ref_logprobs: Tensor | None
    token_weights: Tensor | None
    cross_entropy_weights: Tensor | None
    kl_weights: Tensor | None
    row_weights: Tensor
    return_entropy: bool
    use_triton: bool


class Result(NamedTuple):
    """The results of the pass; only the loss is differentiable."""

    loss: Tensor  # 0-dimensional float32
    logprobs: Tensor  # (M,) float32
    entropy: Tensor  # (M,) float32, empty unless requested
    metrics: Tensor  # those of policy_loss, float64


def visit(logits: Tensor, call: LossCall, inplace_backward: bool) -> Result:
    """Return the loss of rows of logits; its gradient, if required, is computed with it."""
    if not (torch.is_grad_enabled() and logits.requires_grad):
        logprobs, entropy, _ = torch.ops.skyrl_fast.masked_logprob_loss(logits, *call, False)
        return _with_loss(logprobs, entropy, call)
    if logits.dtype == torch.float16:
        # Its small range needs a scaled loss (`torch.amp.GradScaler`): the gradient is rounded to
        # 16 bits in the backward, where the scale is known.
        logprobs, entropy, _ = torch.ops.skyrl_fast.selected_logprob(
            logits,
            call.targets,
            call.mask,
            call.temperature,
            call.return_entropy,
            inplace_backward,
            call.use_triton,
            call.kept_ids,
            call.kept_ranges,
        )
        loss, _, _, metrics = _with_loss(logprobs, entropy, call)
        return Result(loss, logprobs.detach(), entropy.detach(), metrics)
    if torch.compiler.is_compiling():
        loss, *others = _CompiledVisit.apply(logits, *call)
        return Result(loss, *(tensor.detach() for tensor in others))
    return Result(*_Visit.apply(logits, call, inplace_backward))


def _with_loss(logprobs: Tensor, entropy: Tensor, call: LossCall) -> Result:
    def column(cells: Tensor | None) -> Tensor | None:
        if cells is None:
            return None
        return cells.view(-1, 1)

    live = call.mask
    if live is None:
        live = torch.ones_like(logprobs, dtype=torch.uint8)
    # By the operator of policy_loss, for rows of one cell: each metric has one definition.
    others = (
        column(call.old_logprobs),
        column(call.advantages),
        column(live),
        call.row_weights,
        None,
        column(call.ref_logprobs),
        column(call.token_weights),
        column(call.cross_entropy_weights),
        column(call.kl_weights),
        None,
        None,
        call.loss,
        call.kl,
        call.params,
        call.use_triton,
    )
    loss, metrics = loss_and_metrics(logprobs.view(-1, 1), others)
    return Result(loss, logprobs, entropy, metrics)


class _Visit(torch.autograd.Function):
    """The gradient is computed with the loss and moved out at the first backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, call: LossCall, inplace_backward: bool
    ) -> tuple[Tensor, ...]:
        data = logits.detach()
        if inplace_backward:
            # Not by the operator: its schema promises to change no argument.
            logprobs, entropy = _run(data, call, data)
            # Another op that saved these logits raises an error, where it would read a gradient.
            torch.autograd.graph.increment_version(logits)
            # The gradient is where the logits were.
            ctx.grad = data
        else:
            logprobs, entropy, ctx.grad = torch.ops.skyrl_fast.masked_logprob_loss(
                data, *call, True
            )
        ctx.use_triton = call.use_triton
        ctx.mark_non_differentiable(logprobs, entropy)
        result = _with_loss(logprobs, entropy, call)
        ctx.mark_non_differentiable(*result[1:])
        ctx.save_for_backward(result.loss)  # leads to the logits, which it does not keep
        return result

    @staticmethod
    @first_derivative_only("masked_logprob_loss")
    def backward(ctx: Any, grad_loss: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        # Moved out, so that autograd may keep it as `.grad` without a copy.
        grad = ctx.grad
        ctx.grad = None
        if grad is None:
            raise RuntimeError(
                "masked_logprob_loss: a second backward through the same loss has no gradient left"
            )
        if not _backend.on_gpu(grad):
            # Mostly it is 1, and nothing is touched. On a CPU reading it costs nothing.
            if float(grad_loss) != 1.0:
                grad.mul_(grad_loss)
        elif ctx.use_triton:
            grad.mul_(grad_loss)
        else:  # comparing it with 1 here would synchronize: the kernel does
            factor = grad_loss.reshape(1).to(torch.float32)
            _backend.run_kernel("scale_rows", False, grad, grad, factor)
        return grad, None, None


class _CompiledVisit(torch.autograd.Function):
    """The same for a compiled graph, which cannot mutate its context."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *call: Any) -> tuple[Tensor, ...]:
        logprobs, entropy, grad = torch.ops.skyrl_fast.masked_logprob_loss(logits, *call, True)
        ctx.save_for_backward(grad)
        ctx.num_inputs = 1 + len(call)
        return tuple(_with_loss(logprobs, entropy, LossCall(*call)))

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * grad_loss,) + (None,) * (ctx.num_inputs - 1)


def _run(logits: Tensor, call: LossCall, grad: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies; write `grad`, which may be `logits`."""
    num_rows = call.targets.numel()
    logprobs = logits.new_empty(num_rows, dtype=torch.float32)
    entropy = logprobs.new_empty(num_rows if call.return_entropy else 0)
    entropy_out = entropy if call.return_entropy else None
    outputs = (logprobs, entropy_out, grad)
    _backend.run_kernel(
        "masked_logprob_loss", call.use_triton, logits, logits, *call[:-2], *outputs
    )
    return logprobs, entropy


def _impl(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *call, with_grad = arguments
    shape = logits.shape if with_grad else (0,)
    grad = _backend.empty(shape, logits.dtype, logits.device)
    return *_run(logits.detach(), LossCall(*call), grad if with_grad else None), grad


def _fake(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *fields, with_grad = arguments
    call = LossCall(*fields)
    logprobs = logits.new_empty(call.targets.shape[0], dtype=torch.float32)
    entropy = logprobs.new_empty(call.targets.shape[0] if call.return_entropy else 0)
    return logprobs, entropy, logits.new_empty(logits.shape if with_grad else (0,))


for _key in ("CPU", "CUDA"):
    _library.impl("masked_logprob_loss", _impl, _key)
torch.library.register_fake("skyrl_fast::masked_logprob_loss", _fake, lib=_library)
