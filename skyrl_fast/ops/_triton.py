"""Launchers of the Triton kernels, with the arguments of the native ones; imported on use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton

from skyrl_fast.ops.logprob import triton_kernels as kernels
from skyrl_fast.ops.policy_loss import triton_kernels as losses
from skyrl_fast.ops.policy_loss.losses import KERNEL_PARAMS

PPO_KL_COEF = KERNEL_PARAMS.index("ppo_kl_coef")  # follows those that token losses read
LOG2E = 1.4426950408889634
MIN_BLOCK, MAX_BLOCK = 32, 4096  # columns per iteration: up to 16 per thread of 8 warps
NUM_WARPS = 8
LOSS_BLOCK = 512  # cells of one partial sum: 4 per thread of 4 warps

Tensor = torch.Tensor


def _strides(rows: Tensor) -> tuple[int, int, int]:
    """Return inner rows, outer and inner stride of (M, V) or (outer, inner, V)."""
    # 1 where there are no rows, as the kernels divide by it.
    if rows.dim() == 3:
        return max(rows.shape[1], 1), rows.stride(0), rows.stride(1)
    return max(rows.shape[0], 1), 0, rows.stride(0)


def _block(vocab: int) -> int:
    """Return columns per iteration; those of a row outside its blocks are fewer than two."""
    return max(MIN_BLOCK, min(int(triton.next_power_of_2(vocab)) // 2, MAX_BLOCK))


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    # A placeholder for a missing tensor, whose HAS_ flag keeps the kernel from reading it.
    return other if tensor is None else tensor


def selected_logprob(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    kept_ids: Tensor | None,
    kept_ranges: Tensor | None,
    temperature: float,
    logprob: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
) -> None:
    vocab = logits.shape[-1]
    # A launch without programs is an error.
    if targets.numel() == 0:
        return
    kernels.forward_kernel[(targets.numel(),)](
        logits,
        targets,
        _or(mask, targets),
        _or(kept_ids, targets),
        _or(kept_ranges, targets),
        logprob,
        lse,
        _or(entropy, logprob),
        vocab,
        0 if kept_ids is None else kept_ids.numel(),
        *_strides(logits),
        # Temperature and base in one factor: the kernel's exponent is a single multiply-add.
        LOG2E / temperature,
        HAS_MASK=mask is not None,
        HAS_KEPT=kept_ids is not None,
        HAS_ENTROPY=entropy is not None,
        BLOCK=_block(vocab),
        num_warps=NUM_WARPS,
    )


def selected_logprob_backward(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    kept_ids: Tensor | None,
    kept_ranges: Tensor | None,
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
    strides, grad_strides = _strides(logits), _strides(grad)
    # Per row one program for each block, and one for the columns outside of them.
    kernels.backward_kernel[(targets.numel(), vocab // block + 1)](
        logits,
        targets,
        _or(mask, targets),
        _or(kept_ids, targets),
        _or(kept_ranges, targets),
        lse,
        _or(entropy, lse),
        _or(grad_logprob, lse),
        _or(grad_entropy, lse),
        grad,
        vocab,
        0 if kept_ids is None else kept_ids.numel(),
        *strides,
        *grad_strides[1:],
        LOG2E / temperature,
        1.0 / temperature,
        HAS_MASK=mask is not None,
        HAS_KEPT=kept_ids is not None,
        HAS_LOGPROB=grad_logprob is not None,
        HAS_ENTROPY=grad_entropy is not None,
        # Then one offset serves the read and the write.
        SAME_ROWS=strides == grad_strides,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )


def masked_logprob_loss(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    kept_ids: Tensor | None,
    kept_ranges: Tensor | None,
    temperature: float,
    loss: int,
    kl: int,
    params: Sequence[float],
    old_logprobs: Tensor | None,
    advantages: Tensor | None,
    reference: Tensor | None,
    token_weights: Tensor | None,
    cross_entropy_weights: Tensor | None,
    kl_weights: Tensor | None,
    row_weights: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    grad: Tensor | None,
) -> None:
    vocab = logits.shape[-1]
    if targets.numel() == 0:
        return
    out = _or(grad, logits)
    strides, grad_strides = _strides(logits), _strides(out)
    kernels.masked_loss_kernel[(targets.numel(),)](
        logits,
        targets,
        _or(mask, targets),
        _or(kept_ids, targets),
        _or(kept_ranges, targets),
        _or(old_logprobs, row_weights),
        _or(advantages, row_weights),
        _or(reference, row_weights),
        _or(token_weights, row_weights),
        _or(cross_entropy_weights, row_weights),
        _or(kl_weights, row_weights),
        row_weights,
        logprob,
        _or(entropy, logprob),
        out,
        vocab,
        0 if kept_ids is None else kept_ids.numel(),
        *strides,
        *grad_strides[1:],
        LOG2E / temperature,
        1.0 / temperature,
        *params[:PPO_KL_COEF],
        params[-1],
        LOSS=loss,
        KL=kl,
        HAS_MASK=mask is not None,
        HAS_KEPT=kept_ids is not None,
        HAS_OLD=old_logprobs is not None,
        HAS_ADVANTAGE=advantages is not None,
        HAS_TOKEN_WEIGHT=token_weights is not None,
        HAS_CROSS_ENTROPY=cross_entropy_weights is not None,
        HAS_KL_WEIGHT=kl_weights is not None,
        HAS_ENTROPY=entropy is not None,
        HAS_GRAD=grad is not None,
        SAME_ROWS=strides == grad_strides,
        BLOCK=_block(vocab),
        num_warps=NUM_WARPS,
    )


def _as_bytes(mask: Tensor) -> Tensor:
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def policy_loss(
    current: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor | None,
    mask: Tensor,
    row_weights: Tensor,
    cu_seqlens: Tensor | None,
    reference: Tensor | None,
    token_weights: Tensor | None,
    cross_entropy_weights: Tensor | None,
    kl_weights: Tensor | None,
    selected: Tensor | None,
    sequence_delta: Tensor | None,
    loss: int,
    kl: int,
    params: Sequence[float],
    grad: Tensor | None,
    metrics: Tensor,
) -> None:
    num_cells, num_rows = current.numel(), row_weights.numel()
    num_programs = math.ceil(num_cells / LOSS_BLOCK)
    # A sum per program, added up by a second launch: atomic additions would have another order, and
    # other bits, each time.
    partial = metrics.new_empty((losses.NUM_SUMS, num_programs))
    if num_cells > 0:
        losses.loss_kernel[(num_programs,)](
            current,
            _or(old_logprobs, current),
            _or(advantages, current),
            _as_bytes(mask),
            row_weights,
            _or(cu_seqlens, current),
            _or(reference, current),
            _or(token_weights, current),
            _or(cross_entropy_weights, current),
            _or(kl_weights, current),
            _or(selected, current),
            _or(sequence_delta, current),
            _or(grad, current),
            partial,
            num_cells,
            current.shape[-1],
            num_rows,
            *params,
            LOSS=loss,
            KL=kl,
            HAS_OLD=old_logprobs is not None,
            HAS_ADVANTAGE=advantages is not None,
            HAS_TOKEN_WEIGHT=token_weights is not None,
            HAS_CROSS_ENTROPY=cross_entropy_weights is not None,
            HAS_KL_WEIGHT=kl_weights is not None,
            HAS_SELECTED=selected is not None,
            HAS_GRAD=grad is not None,
            RAGGED=cu_seqlens is not None,
            # So many halvings find the row of any cell.
            STEPS=num_rows.bit_length(),
            BLOCK=LOSS_BLOCK,
        )
    # Without cells, too: it writes the zeros of their metrics.
    losses.fold_kernel[(1,)](
        partial, metrics, num_programs, params[-1], LOSS=loss, BLOCK=LOSS_BLOCK
    )


def delta_sums(a: Tensor, b: Tensor, mask: Tensor, cu_seqlens: Tensor | None, sums: Tensor) -> None:
    """Write each row's sum of a - b over its trained cells, and their number."""
    if sums.shape[0] == 0:
        return
    losses.delta_kernel[(sums.shape[0],)](
        a,
        b,
        _as_bytes(mask),
        _or(cu_seqlens, a),
        sums,
        a.shape[-1],
        RAGGED=cu_seqlens is not None,
        BLOCK=LOSS_BLOCK,
    )


def kl_penalty(
    current: Tensor, reference: Tensor, mask: Tensor, kl: int, grad_out: Tensor | None, out: Tensor
) -> None:
    """Write each cell's penalty, or, with `grad_out`, its gradient."""
    if current.numel() == 0:
        return
    losses.kl_kernel[(math.ceil(current.numel() / LOSS_BLOCK),)](
        current,
        reference,
        _as_bytes(mask),
        _or(grad_out, current),
        out,
        current.numel(),
        KL=kl,
        HAS_GRAD_OUT=grad_out is not None,
        BLOCK=LOSS_BLOCK,
    )
