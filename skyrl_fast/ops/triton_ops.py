"""Launches of the Triton kernels, with the arguments of the native ones. Imported when used."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
import triton

from skyrl_fast.ops import triton_kernels as kernels

LOG2E = 1.4426950408889634
MAX_BLOCK = 4096  # columns of one step: 16 per thread of 8 warps
NUM_WARPS = 8

Tensor = torch.Tensor


def _strides(rows: Tensor) -> tuple[int, int, int]:
    """Return inner rows, outer and inner stride of (M, V) or (outer, inner, V)."""
    if rows.dim() == 3:
        return max(rows.shape[1], 1), rows.stride(0), rows.stride(1)
    return max(rows.shape[0], 1), 0, rows.stride(0)


def _block(vocab: int) -> int:
    return min(int(triton.next_power_of_2(vocab)), MAX_BLOCK)


def _current(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU the current one: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return what a kernel is given for a pointer that it does not read."""
    return other if tensor is None else tensor


def selected_logprob(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    temperature: float,
    logprob: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
) -> None:
    """Write log-probabilities, log-sum-exps and entropies."""
    vocab = logits.shape[-1]
    if targets.numel() == 0:
        return
    with _current(logits):
        kernels.forward_kernel[(targets.numel(),)](
            logits,
            targets,
            _or(mask, targets),
            logprob,
            lse,
            _or(entropy, logprob),
            vocab,
            *_strides(logits),
            LOG2E / temperature,
            HAS_MASK=mask is not None,
            HAS_ENTROPY=entropy is not None,
            BLOCK=_block(vocab),
            num_warps=NUM_WARPS,
        )


def selected_logprob_backward(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    temperature: float,
    lse: Tensor,
    entropy: Tensor | None,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    grad: Tensor,
) -> None:
    """Write the gradient of the logits; `grad` may be `logits`."""
    vocab = logits.shape[-1]
    if targets.numel() == 0:
        return
    block = _block(vocab)
    _, *grad_strides = _strides(grad)
    with _current(logits):
        kernels.backward_kernel[(targets.numel(), math.ceil(vocab / block))](
            logits,
            targets,
            _or(mask, targets),
            lse,
            _or(entropy, lse),
            _or(grad_logprob, lse),
            _or(grad_entropy, lse),
            grad,
            vocab,
            *_strides(logits),
            *grad_strides,
            LOG2E / temperature,
            1.0 / temperature,
            HAS_MASK=mask is not None,
            HAS_LOGPROB=grad_logprob is not None,
            HAS_ENTROPY=grad_entropy is not None,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )


def masked_logprob_loss(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    temperature: float,
    loss: int,
    kl: int,
    params: Sequence[float],
    anchor: Tensor | None,
    advantages: Tensor | None,
    reference: Tensor | None,
    token_weights: Tensor | None,
    weights: Tensor,
    logprob: Tensor,
    losses: Tensor,
    entropy: Tensor | None,
    grad: Tensor | None,
) -> None:
    """Write log-probabilities, weighted losses, entropies and the gradient of the losses' sum."""
    vocab = logits.shape[-1]
    if targets.numel() == 0:
        return
    out = _or(grad, logits)
    _, *grad_strides = _strides(out)
    with _current(logits):
        kernels.masked_loss_kernel[(targets.numel(),)](
            logits,
            targets,
            _or(mask, targets),
            _or(anchor, weights),
            _or(advantages, weights),
            _or(reference, weights),
            _or(token_weights, weights),
            weights,
            logprob,
            losses,
            _or(entropy, logprob),
            out,
            vocab,
            *_strides(logits),
            *grad_strides,
            LOG2E / temperature,
            1.0 / temperature,
            *params[:7],
            params[8],
            LOSS=loss,
            KL=kl,
            HAS_MASK=mask is not None,
            HAS_ANCHOR=anchor is not None,
            HAS_ADVANTAGE=advantages is not None,
            HAS_TOKEN_WEIGHT=token_weights is not None,
            HAS_ENTROPY=entropy is not None,
            HAS_GRAD=grad is not None,
            BLOCK=_block(vocab),
            num_warps=NUM_WARPS,
        )
