"""Triton kernels of log-probabilities and of losses from logits; `ops/_triton.py` launches them.

Shapes: M rows of V logits. Row r starts at element (r // inner) * outer_stride + (r % inner) *
inner_stride. z = logit * scale with scale = log2(e) / temperature; sums are those of 2^(z - max).
Per-row arithmetic is float64: it is one number per row, and exp(x) - 1 needs no series then.

A row's columns are HEAD single ones up to a boundary of 16 elements, blocks of BLOCK, whose loads
need no mask and move 16 bytes per thread, and single ones again: `rest` are those of both ends.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from skyrl_fast.ops.policy_loss.triton_kernels import token_kl, token_loss

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _row(row, inner, outer_stride, inner_stride):
    return (row // inner) * outer_stride + (row % inner) * inner_stride


@triton.jit
def _split(first, vocab, BLOCK: tl.constexpr):
    """Where a row's blocks start, which is aligned, how many they are, and the columns before."""
    # A mask that varies within a vector would make Triton load element by element: only the ends of
    # a row have one.
    aligned = tl.multiple_of((first + 15) // 16 * 16, 16)
    head = tl.minimum(aligned - first, vocab)
    return aligned, ((vocab - head) // BLOCK).to(tl.int32), head


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
def _add(x, scale, largest, total, weighted, HAS_ENTROPY: tl.constexpr):
    """Add logits (L, W) to the sums of L lanes; a lane adds W adjacent ones without a barrier."""
    z = x.to(tl.float32) * scale
    new = tl.maximum(largest, tl.max(z, 1))
    # While all logits are -inf the sums are 0 (or NaN), and 0 can be the reference.
    reference = tl.where(new == float("-inf"), 0.0, new)
    shift = largest - reference
    decay = tl.exp2(shift)
    y = z - reference[:, None]
    e = tl.exp2(y)
    if HAS_ENTROPY:  # 2^-126 is the smallest normal number: below it a term is 0, not 0 * -inf
        weighted = decay * (weighted + tl.maximum(shift, -126.0) * total)
        weighted += tl.sum(tl.maximum(y, -126.0) * e, 1)
    return new, total * decay + tl.sum(e, 1), weighted


@triton.jit
def _row_sums(
    logits, first, vocab, scale, kept_ids, begin, end, has_set,
    HAS_KEPT: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted sum of a row, or of its kept logits, in one pass."""
    WIDTH: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth  # of 16 bytes
    # Each lane keeps sums of its own columns, so that a block of them needs no barrier.
    LANES: tl.constexpr = BLOCK // WIDTH
    largest = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.full((LANES,), 0.0, tl.float32)
    weighted = tl.full((LANES,), 0.0, tl.float32)
    columns = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    num_columns = vocab
    if HAS_KEPT:
        num_columns = tl.where(has_set, 0, vocab)
        num_ids = tl.where(has_set, end, begin)
        for start in range(begin, num_ids, BLOCK):
            place = start + columns
            inside = place < num_ids
            ids = tl.load(kept_ids + place, mask=inside, other=0).to(tl.int64)
            # Ids that do not ascend, or are none, make the row NaN: a GPU cannot raise an error.
            before = tl.load(kept_ids + place - 1, mask=inside & (place > begin), other=-1)
            is_wrong = inside & ((ids <= before) | (ids >= vocab))
            x = tl.load(logits + first + ids, mask=inside & (is_wrong == 0), other=float("-inf"))
            x = tl.where(is_wrong, float("nan"), x.to(tl.float32))
            largest, total, weighted = _add(x, scale, largest, total, weighted, HAS_ENTROPY)
    block = tl.full((), BLOCK, tl.int64)
    aligned, num_blocks, head = _split(first, num_columns, BLOCK)
    for i in range(0, num_blocks):
        x = tl.load(logits + aligned + (i * block + columns))
        largest, total, weighted = _add(x, scale, largest, total, weighted, HAS_ENTROPY)
    for start in range(0, num_columns - num_blocks * BLOCK, BLOCK):
        place = start + columns
        # The columns before the blocks, then those behind them.
        column = tl.where(place < head, place, place + num_blocks * block)
        x = tl.load(logits + first + column, mask=column < num_columns, other=float("-inf"))
        largest, total, weighted = _add(x, scale, largest, total, weighted, HAS_ENTROPY)
    most = tl.max(largest, 0)
    shift = largest - tl.where(most == float("-inf"), 0.0, most)
    decay = tl.exp2(shift)
    weighted = tl.sum(decay * (weighted + tl.maximum(shift, -126.0) * total), 0)
    return most, tl.sum(decay * total, 0), weighted


@triton.jit
def _target_logit(logits, first, target, vocab, is_kept):
    """A row's logit at its target, float64; NaN where that is out of range or not kept."""
    inside = (target >= 0) & (target < vocab) & is_kept
    x = tl.load(logits + first + target, mask=inside, other=0.0).to(tl.float64)
    return tl.where(inside, x, float("nan"))


@triton.jit
def _row_results(target_x, scale, largest, total, weighted):
    """Log-probability of the target, log-sum-exp and entropy, float64."""
    z = target_x * scale
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
    # 64 bits: the elements of all rows are more than 32 can count.
    row = tl.program_id(0).to(tl.int64)
    keep = True
    if HAS_MASK:
        keep = tl.load(mask + row) != 0
    if keep:
        first = _row(row, inner, outer_stride, inner_stride)
        begin = tl.full((), 0, tl.int64)
        end = tl.full((), 0, tl.int64)
        has_set = False
        is_kept = True
        target = tl.load(targets + row)
        if HAS_KEPT:
            begin, end, has_set = _kept_range(kept_ranges, num_kept, row, vocab)
            is_kept = _is_kept(kept_ids, begin, end, target, has_set)
        target_x = _target_logit(logits, first, target, vocab, is_kept)
        largest, total, weighted = _row_sums(
            logits, first, vocab, scale, kept_ids, begin, end, has_set, HAS_KEPT, HAS_ENTROPY, BLOCK
        )
        logprob, lse, entropy = _row_results(target_x, scale, largest, total, weighted)
        tl.store(logprob_out + row, logprob.to(tl.float32))
        tl.store(lse_out + row, lse)
        if HAS_ENTROPY:
            tl.store(entropy_out + row, entropy.to(tl.float32))
    else:
        # Outputs are not zeroed before.
        tl.store(logprob_out + row, 0.0)
        tl.store(lse_out + row, 0.0)
        if HAS_ENTROPY:
            tl.store(entropy_out + row, 0.0)


@triton.jit
def _gradient(
    x, is_target, scale, lse, entropy, grad_logprob, grad_entropy, inv_temperature,
    HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Gradient of logits; all others are scalars of the row."""
    offset = (lse * LOG2E).to(tl.float32)
    # In float32 the offset is exact to 1e-7 of its size: `low` is the rest.
    low = (lse * LOG2E - offset.to(tl.float64)).to(tl.float32)
    correction = tl.exp2(-low)  # of 2^y, for what the float32 offset lacks
    y = x.to(tl.float32) * scale - offset
    p = tl.exp2(y)
    slope = grad_logprob
    if HAS_ENTROPY:
        log_p = (tl.maximum(y, -126.0) - low) * LN2
        slope = grad_logprob + grad_entropy * (log_p + entropy)
    d = p * (slope * (-inv_temperature * correction))
    return tl.where(is_target, d + grad_logprob * inv_temperature, d)


@triton.jit
def _store_gradient(
    logits, grad, element, out_element, inside, target_element, scale, lse, entropy, grad_logprob,
    grad_entropy, inv_temperature, HAS_ENTROPY: tl.constexpr, IS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the elements `inside` the row; in a block all are."""
    if IS_BLOCK:
        x = tl.load(logits + element)
    else:
        x = tl.load(logits + element, mask=inside, other=0.0)
    d = _gradient(
        x, element == target_element, scale, lse, entropy, grad_logprob, grad_entropy,
        inv_temperature, HAS_ENTROPY,
    )  # fmt: skip
    if IS_BLOCK:
        tl.store(grad + out_element, d.to(grad.dtype.element_ty))
    else:
        tl.store(grad + out_element, d.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def _store_part(
    logits, grad, first, out_first, vocab, part, target, scale, lse, entropy, grad_logprob,
    grad_entropy, inv_temperature,
    SAME_ROWS: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row's block `part`, or of the columns outside the blocks."""
    lanes = tl.arange(0, BLOCK)
    block = tl.full((), BLOCK, tl.int64)
    aligned, num_blocks, head = _split(first, vocab, BLOCK)
    if part < num_blocks:
        element = aligned + (part * block + lanes)
        out_element = element
        if SAME_ROWS == 0:
            out_element = element - first + out_first
        _store_gradient(
            logits, grad, element, out_element, lanes < BLOCK, first + target, scale, lse, entropy,
            grad_logprob, grad_entropy, inv_temperature, HAS_ENTROPY, True,
        )  # fmt: skip
    if part == num_blocks:
        for start in range(0, vocab - num_blocks * BLOCK, BLOCK):
            place = start + lanes
            column = tl.where(place < head, place, place + num_blocks * block)
            _store_gradient(
                logits, grad, first + column, out_first + column, column < vocab, first + target,
                scale, lse, entropy, grad_logprob, grad_entropy, inv_temperature, HAS_ENTROPY,
                False,
            )  # fmt: skip


@triton.jit
def _store_zeros(grad, out_first, vocab, part, BLOCK: tl.constexpr):
    """Write zeros to a row's block `part`, or to the columns outside the blocks."""
    lanes = tl.arange(0, BLOCK)
    zeros = tl.full((BLOCK,), 0.0, tl.float32).to(grad.dtype.element_ty)
    block = tl.full((), BLOCK, tl.int64)
    aligned, num_blocks, head = _split(out_first, vocab, BLOCK)
    if part < num_blocks:
        tl.store(grad + aligned + (part * block + lanes), zeros)
    if part == num_blocks:
        for start in range(0, vocab - num_blocks * BLOCK, BLOCK):
            place = start + lanes
            column = tl.where(place < head, place, place + num_blocks * block)
            tl.store(grad + out_first + column, zeros, mask=column < vocab)


@triton.jit
def _store_kept_gradient(
    out, row_ptr, kept_ids, place, end, start, vocab, scale, target, lse, entropy,
    grad_logprob, grad_entropy, inv_temperature,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one block of columns from `start`: zeros, then the gradients of the ids from `place`.

    Returns the place of the first id behind the block.
    """
    # The ids ascend, so that a block has at most BLOCK of them.
    lanes = tl.arange(0, BLOCK)
    ids = tl.load(kept_ids + place + lanes, mask=place + lanes < end, other=-1).to(tl.int64)
    here = (ids >= start) & (ids < start + BLOCK) & (ids < vocab)
    x = tl.load(row_ptr + ids, mask=here, other=0.0)
    d = _gradient(
        x, ids == target, scale, lse, entropy, grad_logprob, grad_entropy, inv_temperature,
        HAS_ENTROPY,
    )  # fmt: skip
    # All threads have read their logits, which may be where the gradient goes.
    tl.debug_barrier()
    zeros = tl.full((BLOCK,), 0.0, tl.float32).to(out.dtype.element_ty)
    tl.store(out + start + lanes, zeros, mask=start + lanes < vocab)
    # Zeros first: the gradients of other threads follow in the same columns.
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
    HAS_ENTROPY: tl.constexpr, SAME_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and block of columns; grad may be logits."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    # Defined before the branch that sets them, with the types that they have there: Triton wants
    # both.
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
    first = _row(row, inner, outer_stride, inner_stride)
    out_first = first
    if SAME_ROWS == 0:
        out_first = _row(row, inner, grad_outer_stride, grad_inner_stride)
    begin = tl.full((), 0, tl.int64)
    end = tl.full((), 0, tl.int64)
    has_set = False
    if HAS_KEPT:
        begin, end, has_set = _kept_range(kept_ranges, num_kept, row, vocab)
    # Masked, or clipped by the loss: the row is not read.
    if (grad_logprob == 0) & (grad_entropy == 0):
        _store_zeros(grad, out_first, vocab, part, BLOCK)
    elif has_set:
        start = part.to(tl.int64) * BLOCK
        place = _first_at_least(kept_ids, begin, end, start)
        _store_kept_gradient(
            grad + out_first, logits + first, kept_ids, place, end, start, vocab, scale,
            tl.load(targets + row), tl.load(lse_in + row), entropy, grad_logprob, grad_entropy,
            inv_temperature, HAS_ENTROPY, BLOCK,
        )  # fmt: skip
    else:
        _store_part(
            logits, grad, first, out_first, vocab, part, tl.load(targets + row),
            scale, tl.load(lse_in + row), entropy, grad_logprob, grad_entropy,
            inv_temperature, SAME_ROWS, HAS_ENTROPY, BLOCK,
        )  # fmt: skip


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
    HAS_GRAD: tl.constexpr, SAME_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: its sums, then its loss's gradient by a second read."""
    row = tl.program_id(0).to(tl.int64)
    first = _row(row, inner, outer_stride, inner_stride)
    logprob = tl.full((), 0.0, tl.float64)
    lse = tl.full((), 0.0, tl.float64)
    entropy = tl.full((), 0.0, tl.float64)
    slope = tl.full((), 0.0, tl.float64)
    target = tl.load(targets + row)
    begin = tl.full((), 0, tl.int64)
    end = tl.full((), 0, tl.int64)
    has_set = False
    is_kept = True
    if HAS_KEPT:
        begin, end, has_set = _kept_range(kept_ranges, num_kept, row, vocab)
        is_kept = _is_kept(kept_ids, begin, end, target, has_set)
    keep = True
    if HAS_MASK:
        keep = tl.load(mask + row) != 0
    if keep:
        # Before the barriers of the sums: with grad in place of logits, a warp that has passed the
        # last one overwrites it.
        target_x = _target_logit(logits, first, target, vocab, is_kept)
        largest, total, weighted = _row_sums(
            logits, first, vocab, scale, kept_ids, begin, end, has_set, HAS_KEPT, HAS_ENTROPY, BLOCK
        )
        logprob, lse, entropy = _row_results(target_x, scale, largest, total, weighted)
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
            # 0 drops the token, even where its loss is NaN; likewise for the KL.
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
        out_first = first
        if SAME_ROWS == 0:
            out_first = _row(row, inner, grad_outer_stride, grad_inner_stride)
        # Masked, clipped or without an advantage: the row is not read again.
        if slope == 0:
            for part in range(0, vocab // BLOCK + 1):
                _store_zeros(grad, out_first, vocab, part, BLOCK)
        elif has_set:
            place = begin
            for start in range(0, vocab, BLOCK):
                place = _store_kept_gradient(
                    grad + out_first, logits + first, kept_ids, place, end, start, vocab, scale,
                    target, lse, 0.0, slope.to(tl.float32), 0.0, inv_temperature, False, BLOCK,
                )  # fmt: skip
        else:
            for part in range(0, vocab // BLOCK + 1):
                _store_part(
                    logits, grad, first, out_first, vocab, part, target, scale, lse, 0.0,
                    slope.to(tl.float32), 0.0, inv_temperature, SAME_ROWS, False, BLOCK,
                )  # fmt: skip
