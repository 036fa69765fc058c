"""Triton kernels of log-probabilities and of losses from logits; `ops/_triton.py` launches them.

Shapes: M rows of V logits. Row r starts at element (r // inner) * outer_stride + (r % inner) *
inner_stride. z = logit * scale with scale = log2(e) / temperature; sums are those of 2^(z - max).
Per-row arithmetic is float64: it is one number per row, and exp(x) - 1 needs no series then.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from skyrl_fast.ops.policy_loss.triton_kernels import token_kl, token_loss

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _row(base, row, inner, outer_stride, inner_stride):
    return base + (row // inner) * outer_stride + (row % inner) * inner_stride


@triton.jit
def _row_sums(row_ptr, vocab, scale, BLOCK: tl.constexpr):
    """Maximum, sum and weighted sum of a row, in one pass."""
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    columns = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        z = tl.load(row_ptr + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        z = z * scale
        new = tl.maximum(largest, tl.max(z, 0))
        # While all logits are -inf the sums are 0 (or NaN), and 0 can be the reference.
        reference = tl.where(new == float("-inf"), 0.0, new)
        shift = tl.where(largest == float("-inf"), 0.0, largest - reference)
        decay = tl.where(largest == float("-inf"), 0.0, tl.exp2(shift))
        y = z - reference
        e = tl.exp2(y)
        kept = tl.where(total != total, total, total * decay)  # NaN stays
        weighted = decay * (weighted + shift * total) + tl.sum(tl.where(e > 0, y * e, 0.0), 0)
        total = kept + tl.sum(e, 0)
        largest = new
    return largest, total, weighted


@triton.jit
def _row_results(row_ptr, target, vocab, scale, largest, total, weighted):
    """Log-probability of the target, log-sum-exp and entropy, float64."""
    inside = (target >= 0) & (target < vocab)
    x = tl.load(row_ptr + target, mask=inside, other=0.0).to(tl.float32)
    z = tl.where(inside, x.to(tl.float64) * scale, float("nan"))
    log2_sum = tl.log2(total.to(tl.float64))
    logprob = (z - largest.to(tl.float64) - log2_sum) * LN2
    lse = (largest.to(tl.float64) + log2_sum) * LN2
    entropy = (log2_sum - weighted.to(tl.float64) / total.to(tl.float64)) * LN2
    logprob = tl.where(logprob > 0, 0.0, logprob)  # rounding, where all mass is on the target
    entropy = tl.where(entropy < 0, 0.0, entropy)
    return logprob, lse, entropy


@triton.jit
def forward_kernel(
    logits, targets, mask, logprob_out, lse_out, entropy_out,
    vocab, inner, outer_stride, inner_stride, scale,
    HAS_MASK: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    keep = True
    if HAS_MASK:
        keep = tl.load(mask + row) != 0
    if keep:
        row_ptr = _row(logits, row, inner, outer_stride, inner_stride)
        largest, total, weighted = _row_sums(row_ptr, vocab, scale, BLOCK)
        target = tl.load(targets + row)
        logprob, lse, entropy = _row_results(
            row_ptr, target, vocab, scale, largest, total, weighted
        )
        tl.store(logprob_out + row, logprob.to(tl.float32))
        tl.store(lse_out + row, lse)
        if HAS_ENTROPY:
            tl.store(entropy_out + row, entropy.to(tl.float32))
    else:
        tl.store(logprob_out + row, 0.0)
        tl.store(lse_out + row, 0.0)
        if HAS_ENTROPY:
            tl.store(entropy_out + row, 0.0)


@triton.jit
def _gradient(z, is_target, lse, entropy, grad_logprob, grad_entropy, inv_temperature):
    """Gradient of a block of logits; lse and entropy are scalars."""
    offset = (lse * LOG2E).to(tl.float32)
    low = (lse * LOG2E - offset.to(tl.float64)).to(tl.float32)
    y = (z - offset) - low
    p = tl.exp2(y)
    log_p = y * LN2
    d = -p * grad_logprob
    finite = tl.where(p > 0, log_p, 0.0)
    d = d - grad_entropy * p * (finite + entropy)
    d = tl.where(is_target, d + grad_logprob, d)
    return d * inv_temperature


@triton.jit
def backward_kernel(
    logits, targets, mask, lse_in, entropy_in, grad_logprob_in, grad_entropy_in, grad,
    vocab, inner, outer_stride, inner_stride, grad_outer_stride, grad_inner_stride,
    scale, inv_temperature,
    HAS_MASK: tl.constexpr, HAS_LOGPROB: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and block of columns; grad may be logits."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    grad_logprob = tl.full((), 0.0, tl.float32)
    grad_entropy = tl.full((), 0.0, tl.float32)
    entropy = tl.full((), 0.0, tl.float32)
    keep = True
    if HAS_MASK:
        keep = tl.load(mask + row) != 0
    if keep:
        if HAS_LOGPROB:
            grad_logprob = tl.load(grad_logprob_in + row)
        if HAS_ENTROPY:
            grad_entropy = tl.load(grad_entropy_in + row)
            entropy = tl.load(entropy_in + row)
    out = _row(grad, row, inner, grad_outer_stride, grad_inner_stride) + columns
    if (grad_logprob == 0) & (grad_entropy == 0):
        tl.store(out, tl.full((BLOCK,), 0.0, tl.float32).to(grad.dtype.element_ty), mask=inside)
    else:
        row_ptr = _row(logits, row, inner, outer_stride, inner_stride)
        z = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32) * scale
        d = _gradient(
            z, columns == tl.load(targets + row), tl.load(lse_in + row), entropy,
            grad_logprob, grad_entropy, inv_temperature,
        )  # fmt: skip
        tl.store(out, d.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def masked_loss_kernel(
    logits, targets, mask, old_logprobs_in, advantage_in, reference_in, token_weight_in, weight_in,
    logprob_out, entropy_out, grad,
    vocab, inner, outer_stride, inner_stride, grad_outer_stride, grad_inner_stride,
    scale, inv_temperature,
    low, high, ratio_c, tau_pos, tau_neg, delta_low, delta_high, kl_coef,
    LOSS: tl.constexpr, KL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_OLD: tl.constexpr,
    HAS_ADVANTAGE: tl.constexpr, HAS_TOKEN_WEIGHT: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: its sums, then its loss's gradient by a second read."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = _row(logits, row, inner, outer_stride, inner_stride)
    columns = tl.arange(0, BLOCK)
    logprob = tl.full((), 0.0, tl.float64)
    lse = tl.full((), 0.0, tl.float64)
    entropy = tl.full((), 0.0, tl.float64)
    slope = tl.full((), 0.0, tl.float64)
    target = tl.load(targets + row)
    keep = True
    if HAS_MASK:
        keep = tl.load(mask + row) != 0
    if keep:
        largest, total, weighted = _row_sums(row_ptr, vocab, scale, BLOCK)
        logprob, lse, entropy = _row_results(
            row_ptr, target, vocab, scale, largest, total, weighted
        )
        old_logprob = logprob
        if HAS_OLD:
            old_logprob = tl.load(old_logprobs_in + row).to(tl.float64)
        advantage = tl.full((), 0.0, tl.float64)
        if HAS_ADVANTAGE:
            advantage = tl.load(advantage_in + row).to(tl.float64)
        _, slope, _, _, _ = token_loss(
            logprob, old_logprob, logprob - old_logprob, advantage, False, low, high, ratio_c,
            tau_pos, tau_neg, delta_low, delta_high, 0.0, LOSS,
        )  # fmt: skip
        if HAS_TOKEN_WEIGHT:
            token_weight = tl.load(token_weight_in + row).to(tl.float64)
            slope = tl.where(token_weight == 0, 0.0, token_weight * slope)
        if KL != 0:
            _, kl_slope = token_kl(logprob, tl.load(reference_in + row).to(tl.float64), KL)
            slope = slope + kl_coef * kl_slope
        slope = slope * tl.load(weight_in + row).to(tl.float64)
    tl.store(logprob_out + row, logprob.to(tl.float32))
    if HAS_ENTROPY:
        tl.store(entropy_out + row, entropy.to(tl.float32))
    if HAS_GRAD:
        out = _row(grad, row, inner, grad_outer_stride, grad_inner_stride)
        if slope == 0:
            zeros = tl.full((BLOCK,), 0.0, tl.float32).to(grad.dtype.element_ty)
            for start in range(0, vocab, BLOCK):
                tl.store(out + start + columns, zeros, mask=start + columns < vocab)
        else:
            for start in range(0, vocab, BLOCK):
                inside = start + columns < vocab
                z = tl.load(row_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
                d = _gradient(
                    z * scale, start + columns == target, lse, 0.0, slope.to(tl.float32), 0.0,
                    inv_temperature,
                )  # fmt: skip
                tl.store(out + start + columns, d.to(grad.dtype.element_ty), mask=inside)
