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
def _kept_range(kept_ranges, num_kept, row, vocab):
    """Where a row's kept ids begin and end, and whether it has a set; else all columns."""
    first = tl.load(kept_ranges + 2 * row)
    last = tl.load(kept_ranges + 2 * row + 1)
    has_set = first >= 0
    inside = (first <= last) & (last <= num_kept)  # else the set counts as one without ids
    begin = tl.where(has_set & inside, first, 0)
    end = tl.where(has_set, tl.where(inside, last, 0), vocab)
    return begin, end, has_set


@triton.jit
def _first_at_least(kept_ids, begin, end, limit):
    """Place of the first id that is not below `limit`."""
    low = begin
    high = end
    while low < high:
        middle = (low + high) // 2
        below = tl.load(kept_ids + middle) < limit
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _is_kept(kept_ids, begin, end, target, has_set):
    """Whether the target is in the row's set, or the row has none."""
    found = has_set == 0
    if has_set:
        place = _first_at_least(kept_ids, begin, end, target)
        found = tl.load(kept_ids + place, mask=place < end, other=-1) == target
    return found


@triton.jit
def _row_sums(
    row_ptr, vocab, scale, kept_ids, begin, end, has_set,
    HAS_KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted sum of a row, or of its kept logits, in one pass."""
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    columns = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        inside = start + columns < end
        column = start + columns
        if HAS_KEPT:
            is_id = tl.where(has_set, inside, False)
            ids = tl.load(kept_ids + column, mask=is_id, other=0).to(tl.int64)
            before = tl.load(kept_ids + column - 1, mask=is_id & (column > begin), other=-1)
            is_wrong = is_id & ((ids <= before) | (ids >= vocab))
            column = tl.where(is_id, ids, column)
            is_right = inside & (is_wrong == 0)
            z = tl.load(row_ptr + column, mask=is_right, other=float("-inf")).to(tl.float32)
            z = tl.where(is_wrong, float("nan"), z)
        else:
            z = tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
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
def _row_results(row_ptr, target, is_kept, vocab, scale, largest, total, weighted):
    """Log-probability of the target, log-sum-exp and entropy, float64."""
    inside = (target >= 0) & (target < vocab) & is_kept
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
    logits, targets, mask, kept_ids, kept_ranges, logprob_out, lse_out, entropy_out,
    vocab, num_kept, inner, outer_stride, inner_stride, scale,
    HAS_MASK: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    keep = True
    if HAS_MASK:
        keep = tl.load(mask + row) != 0
    if keep:
        row_ptr = _row(logits, row, inner, outer_stride, inner_stride)
        begin = 0
        end = vocab
        has_set = False
        if HAS_KEPT:
            begin, end, has_set = _kept_range(kept_ranges, num_kept, row, vocab)
        largest, total, weighted = _row_sums(
            row_ptr, vocab, scale, kept_ids, begin, end, has_set, HAS_KEPT, BLOCK
        )
        target = tl.load(targets + row)
        is_kept = True
        if HAS_KEPT:
            is_kept = _is_kept(kept_ids, begin, end, target, has_set)
        logprob, lse, entropy = _row_results(
            row_ptr, target, is_kept, vocab, scale, largest, total, weighted
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
def _store_kept_gradient(
    out, row_ptr, kept_ids, place, end, start, vocab, scale, target, lse, entropy,
    grad_logprob, grad_entropy, inv_temperature, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one block of columns from `start`: zeros, then the gradients of the ids from `place`.

    The ids ascend, so that a block has at most BLOCK of them. `out` may be `row_ptr`: all are read
    before the first is written. Returns the place of the first id behind the block.
    """
    lanes = tl.arange(0, BLOCK)
    ids = tl.load(kept_ids + place + lanes, mask=place + lanes < end, other=-1).to(tl.int64)
    here = (ids >= start) & (ids < start + BLOCK) & (ids < vocab)
    z = tl.load(row_ptr + ids, mask=here, other=0.0).to(tl.float32) * scale
    d = _gradient(z, ids == target, lse, entropy, grad_logprob, grad_entropy, inv_temperature)
    tl.debug_barrier()
    zeros = tl.full((BLOCK,), 0.0, tl.float32).to(out.dtype.element_ty)
    tl.store(out + start + lanes, zeros, mask=start + lanes < vocab)
    tl.debug_barrier()
    tl.store(out + ids, d.to(out.dtype.element_ty), mask=here)
    tl.debug_barrier()
    return place + tl.sum(here.to(tl.int64), 0)


@triton.jit
def backward_kernel(
    logits, targets, mask, kept_ids, kept_ranges, lse_in, entropy_in, grad_logprob_in,
    grad_entropy_in, grad,
    vocab, num_kept, inner, outer_stride, inner_stride, grad_outer_stride, grad_inner_stride,
    scale, inv_temperature,
    HAS_MASK: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_LOGPROB: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
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
    out_row = _row(grad, row, inner, grad_outer_stride, grad_inner_stride)
    out = out_row + columns
    row_ptr = _row(logits, row, inner, outer_stride, inner_stride)
    begin = 0
    end = vocab
    has_set = False
    if HAS_KEPT:
        begin, end, has_set = _kept_range(kept_ranges, num_kept, row, vocab)
    if (grad_logprob == 0) & (grad_entropy == 0):
        tl.store(out, tl.full((BLOCK,), 0.0, tl.float32).to(grad.dtype.element_ty), mask=inside)
    elif has_set:
        start = tl.program_id(1).to(tl.int64) * BLOCK
        place = _first_at_least(kept_ids, begin, end, start)
        _store_kept_gradient(
            out_row, row_ptr, kept_ids, place, end, start, vocab, scale, tl.load(targets + row),
            tl.load(lse_in + row), entropy, grad_logprob, grad_entropy, inv_temperature, BLOCK,
        )  # fmt: skip
    else:
        z = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32) * scale
        d = _gradient(
            z, columns == tl.load(targets + row), tl.load(lse_in + row), entropy,
            grad_logprob, grad_entropy, inv_temperature,
        )  # fmt: skip
        tl.store(out, d.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def masked_loss_kernel(
    logits, targets, mask, kept_ids, kept_ranges, old_logprobs_in, advantage_in, reference_in,
    token_weight_in, cross_entropy_weight_in, kl_weight_in, weight_in,
    logprob_out, entropy_out, grad,
    vocab, num_kept, inner, outer_stride, inner_stride, grad_outer_stride, grad_inner_stride,
    scale, inv_temperature,
    low, high, ratio_c, tau_pos, tau_neg, delta_low, delta_high, kl_coef,
    LOSS: tl.constexpr, KL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_KEPT: tl.constexpr,
    HAS_OLD: tl.constexpr, HAS_ADVANTAGE: tl.constexpr, HAS_TOKEN_WEIGHT: tl.constexpr,
    HAS_CROSS_ENTROPY: tl.constexpr, HAS_KL_WEIGHT: tl.constexpr, HAS_ENTROPY: tl.constexpr,
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
    begin = 0
    end = vocab
    has_set = False
    if HAS_KEPT:
        begin, end, has_set = _kept_range(kept_ranges, num_kept, row, vocab)
    keep = True
    if HAS_MASK:
        keep = tl.load(mask + row) != 0
    if keep:
        largest, total, weighted = _row_sums(
            row_ptr, vocab, scale, kept_ids, begin, end, has_set, HAS_KEPT, BLOCK
        )
        is_kept = True
        if HAS_KEPT:
            is_kept = _is_kept(kept_ids, begin, end, target, has_set)
        logprob, lse, entropy = _row_results(
            row_ptr, target, is_kept, vocab, scale, largest, total, weighted
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
            if HAS_KL_WEIGHT:
                kl_weight = tl.load(kl_weight_in + row).to(tl.float64)
                kl_slope = tl.where(kl_weight == 0, 0.0, kl_weight * kl_slope)
            slope = slope + kl_coef * kl_slope
        if HAS_CROSS_ENTROPY:
            slope = slope - tl.load(cross_entropy_weight_in + row).to(tl.float64)
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
        elif has_set:
            place = begin
            for start in range(0, vocab, BLOCK):
                place = _store_kept_gradient(
                    out, row_ptr, kept_ids, place, end, start, vocab, scale, target, lse, 0.0,
                    slope.to(tl.float32), 0.0, inv_temperature, BLOCK,
                )  # fmt: skip
        else:
            for start in range(0, vocab, BLOCK):
                inside = start + columns < vocab
                z = tl.load(row_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
                d = _gradient(
                    z * scale, start + columns == target, lse, 0.0, slope.to(tl.float32), 0.0,
                    inv_temperature,
                )  # fmt: skip
                tl.store(out + start + columns, d.to(grad.dtype.element_ty), mask=inside)
