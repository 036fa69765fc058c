"""`linear_logprob` as one operator of a compiled graph. N rows, M of mask 1, V vocab, H hidden.

Which rows are computed depends on the mask's values, so the operator is opaque to the graph. It
saves log-sum-exps and entropies; the backward recomputes the logits from them.
"""

from __future__ import annotations

from typing import Any

import torch

from skyrl_fast.ops import _backend
from skyrl_fast.ops.logprob import linear_rows, selected
from skyrl_fast.ops.logprob.linear_rows import Options

_lib = torch.library.Library("skyrl_fast", "FRAGMENT")
# An operator's schema has no records, so that `Options` travels as its fields.
_OPTIONS = (
    "float temperature, float logit_scale, float? soft_cap, bool return_entropy, "
    "SymInt? chunk_rows, bool use_triton"
)
_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target_ids, Tensor? loss_mask"
_lib.define(f"linear_logprob({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
_lib.define(
    f"linear_logprob_backward({_INPUTS}, Tensor entropy, Tensor lse, Tensor? grad_logprob, "
    f"Tensor? grad_entropy, bool[3] wanted, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
NUM_TENSORS = 5


def call(*arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return what `linear_logprob` does; the arguments are those of the operator."""
    return_entropy = arguments[NUM_TENSORS + 3]
    logprob, entropy, _ = torch.ops.skyrl_fast.linear_logprob(*arguments)
    return (logprob, entropy) if return_entropy else logprob


def _rows(
    hidden: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return hidden (M, H) and targets (M,) of the rows of mask 1, and the rows; None: all."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    targets = targets.reshape(-1).to(torch.int64)
    if mask is None:
        return hidden, targets, None
    rows = (mask.reshape(-1) != 0).nonzero().squeeze(1).to(hidden.device)
    return hidden[rows], targets[rows], rows


def _options(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: float,
    logit_scale: float,
    soft_cap: float | None,
    return_entropy: bool,
    chunk_rows: int | None,
    use_triton: bool,
) -> Options:
    on_gpu = _backend.on_gpu(hidden)
    chunk = chunk_rows or linear_rows.default_chunk_rows(weight, len(hidden), on_gpu=on_gpu)
    return Options(temperature, logit_scale, soft_cap, return_entropy, chunk, use_triton)


def _forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = target_ids.shape
    hidden, targets, rows = _rows(hidden, target_ids, loss_mask)
    # On a GPU this would wait for the device; a wrong target gives NaN there.
    if not _backend.on_gpu(hidden):
        keep = selected.as_uint8(loss_mask)
        selected.check_targets(linear_rows.OP, target_ids.reshape(-1), keep, weight.shape[0])
    chosen = _options(hidden, weight, *options)
    logprob, entropy, lse, _ = linear_rows.forward_rows(hidden, weight, bias, targets, None, chosen)
    # In the shape of the targets: a graph cannot know how many rows the mask selects. The backward
    # finds the rows again.
    if chosen.return_entropy:
        entropy = linear_rows.spread(entropy, rows, shape)
    return linear_rows.spread(logprob, rows, shape), entropy, linear_rows.spread(lse, rows, shape)


def _forward_fake(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = target_ids.shape
    return_entropy = options[3]
    logprob = hidden.new_empty(shape, dtype=torch.float32)
    entropy = hidden.new_empty(shape if return_entropy else (0,), dtype=torch.float32)
    return logprob, entropy, hidden.new_empty(shape, dtype=torch.float64)


def _backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    entropy: torch.Tensor,
    lse: torch.Tensor,
    grad_logprob: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    wanted: list[bool],
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = hidden.shape
    hidden, targets, rows = _rows(hidden, target_ids, loss_mask)

    def of_rows(values: torch.Tensor) -> torch.Tensor:
        if rows is None:
            return values.reshape(-1)
        return values.reshape(-1)[rows]

    # options[3] is `return_entropy`: without it the entropy is empty, and no row has one.
    d_hidden, d_weight, d_bias = linear_rows.backward_rows(
        hidden,
        weight,
        bias,
        targets,
        of_rows(entropy) if options[3] else entropy,
        of_rows(lse),
        None,
        _options(hidden, weight, *options),
        None,
        None if grad_logprob is None else of_rows(grad_logprob),
        None if grad_entropy is None else of_rows(grad_entropy),
        wanted=wanted,
    )
    if d_hidden is not None and rows is not None:
        zeros = d_hidden.new_zeros(target_ids.numel(), shape[-1])
        d_hidden = zeros.index_copy_(0, rows, d_hidden)
    # An operator returns tensors: an empty one stands for a gradient that is not wanted.
    found = (None if d_hidden is None else d_hidden.view(shape), d_weight, d_bias)
    return tuple(hidden.new_empty(0) if x is None else x for x in found)  # type: ignore[return-value]


def _backward_fake(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wanted = others[6]
    inputs = (hidden, weight, bias)
    return tuple(  # type: ignore[return-value]
        hidden.new_empty(x.shape if x is not None and want else (0,))
        for x, want in zip(inputs, wanted, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, entropy, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:NUM_TENSORS], entropy, lse)
    ctx.options = inputs[NUM_TENSORS:]


def _autograd(
    ctx: Any, grad_logprob: Any, grad_entropy: Any, grad_lse: Any
) -> tuple[torch.Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    if not ctx.options[3]:
        grad_entropy = None
    found = torch.ops.skyrl_fast.linear_logprob_backward(
        *ctx.saved_tensors, grad_logprob, grad_entropy, wanted, *ctx.options
    )
    gradients = (x if want else None for x, want in zip(found, wanted, strict=True))
    return *gradients, *(None,) * (NUM_TENSORS - 3 + len(ctx.options))


def _no_second_derivative(ctx: Any, *gradients: torch.Tensor) -> None:
    raise RuntimeError(f"{linear_rows.OP}: no second derivative; use backend='torch'")


for _key in ("CPU", "CUDA"):
    _lib.impl("linear_logprob", _forward, _key)
    _lib.impl("linear_logprob_backward", _backward, _key)
torch.library.register_fake("skyrl_fast::linear_logprob", _forward_fake, lib=_lib)
torch.library.register_fake("skyrl_fast::linear_logprob_backward", _backward_fake, lib=_lib)
torch.library.register_autograd(
    "skyrl_fast::linear_logprob", _autograd, setup_context=_setup_context, lib=_lib
)
torch.library.register_autograd(
    "skyrl_fast::linear_logprob_backward", _no_second_derivative, lib=_lib
)
