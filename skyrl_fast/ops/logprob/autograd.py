"""The torch operators of the log-probability functions: kernels, fakes, autograd.

Shapes: M rows, K ids of a row, V vocab. Logits are (M, V), or (outer, inner, V) where rows have two
strides.
"""

from __future__ import annotations

from typing import Any

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops._derivatives import refuse_second_derivative

# A fragment: the other ops add their operators to the same namespace.
_lib = torch.library.Library("skyrl_fast", "FRAGMENT")
# The backend is chosen outside, so that a compiled graph holds the choice as a constant.
_lib.define(
    "selected_logprob(Tensor logits, Tensor target_ids, Tensor? mask, float temperature, "
    "bool return_entropy, bool inplace_backward, bool use_triton=False, Tensor? kept_ids=None, "
    "Tensor? kept_ranges=None) -> (Tensor, Tensor, Tensor)"
)
_lib.define(
    "selected_logprob_backward(Tensor logits, Tensor target_ids, Tensor? mask, "
    "float temperature, Tensor lse, Tensor entropy, Tensor? grad_logprob, Tensor? grad_entropy, "
    "bool use_triton=False, Tensor? kept_ids=None, Tensor? kept_ranges=None) -> Tensor"
)


def forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    temperature: float,
    return_entropy: bool,
    use_triton: bool = False,
    kept_ids: torch.Tensor | None = None,
    kept_ranges: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (M,) log-probabilities, entropies (empty unless requested) and log-sum-exps."""
    num_rows = targets.numel()
    logprob = logits.new_empty(num_rows, dtype=torch.float32)
    # The gradient needs 2^(z - lse) to the last digit of a float, for logits of any size.
    lse = logits.new_empty(num_rows, dtype=torch.float64)
    entropy = logits.new_empty(num_rows if return_entropy else 0, dtype=torch.float32)
    entropy_out = entropy if return_entropy else None
    selection = (targets, mask, kept_ids, kept_ranges, temperature)
    args = (logits.detach(), *selection, logprob, lse, entropy_out)
    _backend.run_kernel("selected_logprob", use_triton, logits, *args)
    return logprob, entropy, lse


def _forward_impl(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return forward(*arguments[:5], *arguments[6:])  # only the backward reads `inplace_backward`


def _forward_fake(
    logits: torch.Tensor, targets: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows = targets.shape[0]
    return_entropy = arguments[2]
    logprob = logits.new_empty(num_rows, dtype=torch.float32)
    entropy = logits.new_empty(num_rows if return_entropy else 0, dtype=torch.float32)
    return logprob, entropy, logits.new_empty(num_rows, dtype=torch.float64)


def write_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    temperature: float,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprob: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    grad: torch.Tensor,
    use_triton: bool = False,
    kept_ids: torch.Tensor | None = None,
    kept_ranges: torch.Tensor | None = None,
) -> None:
    """Write the gradient of log-probability and entropy into `grad`, which may be `logits`."""
    args = (
        logits.detach(),
        targets,
        mask,
        kept_ids,
        kept_ranges,
        temperature,
        lse,
        entropy if grad_entropy is not None else None,
        # The gradient of a sum is one number with strides 0.
        grad_logprob.contiguous() if grad_logprob is not None else None,
        grad_entropy.contiguous() if grad_entropy is not None else None,
        grad.detach(),
    )
    _backend.run_kernel("selected_logprob_backward", use_triton, logits, *args)


def _backward_impl(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
    grad = _backend.empty(logits.shape, logits.dtype, logits.device)
    before = arguments[:7]
    after: tuple[Any, ...] = (grad, *arguments[7:])
    write_gradient(logits, *before, *after)
    return grad


def _backward_fake(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    logits, targets, mask, temperature, return_entropy, inplace, use_triton, *kept = inputs
    _, entropy, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(logits, targets, mask, entropy, lse, *kept)
    ctx.temperature = temperature
    ctx.return_entropy = return_entropy
    ctx.inplace = inplace
    ctx.use_triton = use_triton


def _autograd(
    ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor, grad_lse: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    logits, targets, mask, entropy, lse, *kept = ctx.saved_tensors
    # Autograd gives zeros for outputs without a gradient, also for the empty entropy.
    entropy_part = grad_entropy if ctx.return_entropy else None
    args = (logits, targets, mask, ctx.temperature, lse, entropy, grad_logprob, entropy_part)
    # While a graph is traced the logits are a tensor subclass without memory.
    if ctx.inplace and type(logits) in (torch.Tensor, torch.nn.Parameter):
        grad = logits.detach()
        with torch.no_grad():
            write_gradient(*args, grad, ctx.use_triton, *kept)
        # Another op that saved these logits then raises an error, where it would read a gradient.
        torch.autograd.graph.increment_version(logits)
        sources = (logits, grad_logprob, entropy_part)
        (grad,) = refuse_second_derivative("selected_logprob", sources, (grad,))
    else:
        grad = torch.ops.skyrl_fast.selected_logprob_backward(*args, ctx.use_triton, *kept)
    return grad, *(None,) * 8


def _no_second_derivative(ctx: Any, *gradients: torch.Tensor) -> None:
    raise RuntimeError("selected_logprob: no second derivative; use backend='torch'")


# One function for both: the launcher goes by the tensor's device.
for _key in ("CPU", "CUDA"):
    _lib.impl("selected_logprob", _forward_impl, _key)
    _lib.impl("selected_logprob_backward", _backward_impl, _key)
torch.library.register_fake("skyrl_fast::selected_logprob", _forward_fake, lib=_lib)
torch.library.register_fake("skyrl_fast::selected_logprob_backward", _backward_fake, lib=_lib)
torch.library.register_autograd(
    "skyrl_fast::selected_logprob", _autograd, setup_context=_setup_context, lib=_lib
)
torch.library.register_autograd(
    "skyrl_fast::selected_logprob_backward", _no_second_derivative, lib=_lib
)


# --- several tokens per row, on CPUs

_lib.define(
    "gathered_logprob(Tensor logits, Tensor target_ids, Tensor? mask, float temperature) "
    "-> (Tensor, Tensor)"
)
_lib.define(
    "gathered_logprob_backward(Tensor logits, Tensor target_ids, Tensor? mask, float temperature, "
    "Tensor lse, Tensor grad_logprob) -> Tensor"
)


def _gathered_impl(
    logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (M, K) log-probabilities and (M,) log-sum-exps."""
    logprob, lse = _gathered_fake(logits, targets, mask, temperature)
    args = (logits.detach(), targets, mask, temperature, logprob, lse)
    _backend.run_kernel("gathered_logprob", False, logits, *args)
    return logprob, lse


def _gathered_fake(
    logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprob = logits.new_empty(targets.shape, dtype=torch.float32)
    return logprob, logits.new_empty(targets.shape[0], dtype=torch.float64)


def _gathered_backward_impl(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    temperature: float,
    lse: torch.Tensor,
    grad_logprob: torch.Tensor,
) -> torch.Tensor:
    grad = _backend.empty(logits.shape, logits.dtype, logits.device)
    gradients = grad_logprob.contiguous()  # that of a sum is one number with strides 0
    args = (logits.detach(), targets, mask, temperature, lse, gradients, grad)
    _backend.run_kernel("gathered_logprob_backward", False, logits, *args)
    return grad


def _setup_gathered(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    logits, targets, mask, temperature = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(logits, targets, mask, lse)
    ctx.temperature = temperature


def _gathered_autograd(
    ctx: Any, grad_logprob: torch.Tensor, grad_lse: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    logits, targets, mask, lse = ctx.saved_tensors
    grad = torch.ops.skyrl_fast.gathered_logprob_backward(
        logits, targets, mask, ctx.temperature, lse, grad_logprob
    )
    return grad, None, None, None


def _no_second_gathered(ctx: Any, *gradients: torch.Tensor) -> None:
    raise RuntimeError("gathered_logprob: no second derivative; use backend='torch'")


_lib.impl("gathered_logprob", _gathered_impl, "CPU")
_lib.impl("gathered_logprob_backward", _gathered_backward_impl, "CPU")
torch.library.register_fake("skyrl_fast::gathered_logprob", _gathered_fake, lib=_lib)
torch.library.register_fake("skyrl_fast::gathered_logprob_backward", _backward_fake, lib=_lib)
torch.library.register_autograd(
    "skyrl_fast::gathered_logprob", _gathered_autograd, setup_context=_setup_gathered, lib=_lib
)
torch.library.register_autograd(
    "skyrl_fast::gathered_logprob_backward", _no_second_gathered, lib=_lib
)
