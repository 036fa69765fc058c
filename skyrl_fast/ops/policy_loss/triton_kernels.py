"""Triton kernels of policy losses; `ops/_triton.py` launches them.

Losses and penalties have the codes of csrc/policy_loss/token_loss.h; sums are in the order of
loss_sums.h, metrics in that of policy_loss.h. Arithmetic is float64, so exp(x) - 1 needs no series;
the hyper-parameters reach a kernel as float32.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from skyrl_fast.ops.policy_loss.losses import KL_ESTIMATORS, LOSS_CODES

NUM_SUMS = 16
DUAL_CLIP = tl.constexpr(LOSS_CODES["dual_clip"])
GSPO = tl.constexpr(LOSS_CODES["gspo"])
CISPO = tl.constexpr(LOSS_CODES["cispo"])
ROLLOUT_IS = tl.constexpr(LOSS_CODES["rollout_is"])
CLIP_COV = tl.constexpr(LOSS_CODES["clip_cov"])
KL_COV = tl.constexpr(LOSS_CODES["kl_cov"])
SAPO = tl.constexpr(LOSS_CODES["sapo"])
DPPO_TV = tl.constexpr(LOSS_CODES["dppo_tv"])
DPPO_KL = tl.constexpr(LOSS_CODES["dppo_kl"])
CROSS_ENTROPY = tl.constexpr(LOSS_CODES["cross_entropy"])
IMPORTANCE_SAMPLING = tl.constexpr(LOSS_CODES["importance_sampling"])
K1 = tl.constexpr(KL_ESTIMATORS["k1"])
ABS = tl.constexpr(KL_ESTIMATORS["abs"])
K2 = tl.constexpr(KL_ESTIMATORS["k2"])


@triton.jit
def _clamp(x, low, high):
    x = tl.where(x < low, low, x)  # NaN stays NaN
    return tl.where(x > high, high, x)


@triton.jit
def _surrogate(ratio, slope, advantage, low, high):
    """PPO's value and derivative, and where the bound took effect."""
    free = -advantage * ratio
    bound = -advantage * _clamp(ratio, low, high)
    # PPO takes the smaller objective, so the larger loss.
    clipped = bound > free
    return tl.where(clipped, bound, free), tl.where(clipped, 0.0, -advantage * slope), clipped


@triton.jit
def _too_far(logprob, old_logprob, delta_low, delta_high, BY_KL: tl.constexpr):
    """Whether dppo's probability has moved too far down, and up."""
    prob = tl.exp(_clamp(logprob, -80.0, 20.0))
    old_prob = tl.exp(_clamp(old_logprob, -80.0, 20.0))
    if BY_KL:
        # The reference's PROBABILITY_EPSILON.
        rest = (1.0 - old_prob + 1e-8) / (1.0 - prob + 1e-8)
        rest_log = tl.where(rest > 0, tl.log(tl.where(rest > 0, rest, 1.0)), float("nan"))
        kl = old_prob * (old_logprob - logprob) + (1.0 - old_prob) * rest_log
        low = (prob < old_prob) & (kl > delta_low)
        high = (prob > old_prob) & (kl > delta_high)
    else:
        low = old_prob - prob > delta_low
        high = prob - old_prob > delta_high
    return low, high


@triton.jit
def token_loss(
    logprob, old_logprob, delta, advantage, selected, low, high, ratio_c, tau_pos, tau_neg,
    delta_low, delta_high, ppo_kl_coef, LOSS: tl.constexpr,
):  # fmt: skip
    """A token's loss and its derivative; whether it was clipped low, clipped high, chosen."""
    ratio = tl.exp(_clamp(delta, -20.0, 20.0))
    # Where the clamp took effect the ratio is constant.
    slope = tl.where((delta > 20.0) | (delta < -20.0), 0.0, ratio)
    # False for every cell; a Python bool would not have their shape.
    never = (advantage > 0) & (advantage < 0)
    clipped_low = never
    clipped_high = never
    chosen = never
    if LOSS == CROSS_ENTROPY:
        value = -logprob
        grad = tl.where(never, 0.0, -1.0)
    elif LOSS == CISPO:
        clipped_low = ratio < low
        clipped_high = ratio > high
        grad = -advantage * _clamp(ratio, low, high)
        value = grad * logprob
    elif LOSS == ROLLOUT_IS:
        clipped_low = ratio <= low
        clipped_high = (ratio >= high) & (ratio > low)  # counted once where the bounds meet
        grad = -advantage * tl.where(clipped_low | clipped_high, 0.0, ratio)
        value = grad * logprob
    elif LOSS == SAPO:
        tau = tl.where(advantage > 0, tau_pos, tau_neg)
        # Beyond 80 the gate is 1, or as good as 0.
        gate = 1.0 / (1.0 + tl.exp(-_clamp(tau * (ratio - 1.0), -80.0, 80.0)))
        value = -advantage * gate * (4.0 / tau)
        grad = -advantage * 4.0 * gate * (1.0 - gate) * slope
    elif (LOSS == DPPO_TV) | (LOSS == DPPO_KL):
        far_low, far_high = _too_far(logprob, old_logprob, delta_low, delta_high, LOSS == DPPO_KL)
        clipped_low = (advantage < 0) & far_low
        clipped_high = (advantage > 0) & far_high
        dropped = clipped_low | clipped_high
        value = tl.where(dropped, 0.0, -advantage * ratio)
        grad = tl.where(dropped, 0.0, -advantage * slope)
    elif (LOSS == KL_COV) | (LOSS == IMPORTANCE_SAMPLING):
        value = -advantage * ratio
        grad = -advantage * slope
        if LOSS == KL_COV:
            moved = logprob - old_logprob
            sign = tl.where(moved > 0, 1.0, tl.where(moved < 0, -1.0, 0.0))
            chosen = selected
            value = value + tl.where(selected, ppo_kl_coef * moved * sign, 0.0)
            grad = grad + tl.where(selected, ppo_kl_coef * sign, 0.0)
    else:  # regular, dual_clip, gspo, clip_cov
        value, grad, clipped = _surrogate(ratio, slope, advantage, low, high)
        clipped_low = clipped & (advantage < 0)
        clipped_high = clipped & (advantage > 0)
        if LOSS == DUAL_CLIP:
            ceiling = -advantage * ratio_c
            chosen = (advantage < 0) & (ceiling < value)
            value = tl.where(chosen, ceiling, value)
            grad = tl.where(chosen, 0.0, grad)
        if LOSS == CLIP_COV:
            chosen = selected
            value = tl.where(selected, 0.0, value)
            grad = tl.where(selected, 0.0, grad)
    return value, grad, clipped_low, clipped_high, chosen


@triton.jit
def token_kl(logprob, reference, KL: tl.constexpr):
    """Value and derivative of one token's KL penalty."""
    d = logprob - reference
    sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))
    if KL == K1:
        value = d
        # NaN where d is.
        grad = 1.0 + 0.0 * d
    elif KL == ABS:
        value = d * sign
        grad = sign
    elif KL == K2:
        value = 0.5 * d * d
        grad = d
    else:
        x = _clamp(-d, -20.0, 20.0)
        raw = tl.exp(x) - 1.0 - x
        value = _clamp(raw, -10.0, 10.0)
        # Where a bound took effect the value is constant.
        grad = tl.where((x == -d) & (value == raw), 1.0 - tl.exp(x), 0.0)
        grad = tl.where(d != d, d, grad)
    return value, grad


@triton.jit
def _row_of(cell, cu, width, num_rows, RAGGED: tl.constexpr, STEPS: tl.constexpr):
    """Row of each cell, by bisection: the last one that begins there or before."""
    if RAGGED:
        row = tl.zeros_like(cell)
        above = tl.zeros_like(cell) + num_rows
        for _ in range(STEPS):
            middle = (row + above) // 2
            # All cells take the same number of halvings: those that are done change nothing.
            open_ = above - row > 1
            is_behind = tl.load(cu + middle, mask=open_, other=0) <= cell
            row = tl.where(open_ & is_behind, middle, row)
            above = tl.where(open_ & (is_behind == 0), middle, above)
    else:
        row = cell // width
    return row


@triton.jit
def _cells(pointer, cell, live):
    # Masked cells are not read: they may be NaN.
    return tl.load(pointer + cell, mask=live, other=0.0).to(tl.float64)


@triton.jit
def loss_kernel(
    logprobs, old_logprobs_in, advantages, mask, row_weights, cu, reference, token_weights,
    cross_entropy_weights, kl_weights, selected_in, sequence_delta, grad, partial,
    num_cells, width, num_rows,
    low, high, ratio_c, tau_pos, tau_neg, delta_low, delta_high, ppo_kl_coef, kl_coef,
    LOSS: tl.constexpr, KL: tl.constexpr, HAS_OLD: tl.constexpr, HAS_ADVANTAGE: tl.constexpr,
    HAS_TOKEN_WEIGHT: tl.constexpr, HAS_CROSS_ENTROPY: tl.constexpr, HAS_KL_WEIGHT: tl.constexpr,
    HAS_SELECTED: tl.constexpr, HAS_GRAD: tl.constexpr, RAGGED: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK cells: their gradient, and one column of `partial` (NUM_SUMS, P)."""
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < num_cells
    live = inside & (tl.load(mask + cell, mask=inside, other=0) != 0)
    row = _row_of(cell, cu, width, num_rows, RAGGED, STEPS)
    logprob = _cells(logprobs, cell, live)
    old_logprob = logprob
    if HAS_OLD:
        old_logprob = _cells(old_logprobs_in, cell, live)
    advantage = tl.zeros_like(logprob)
    if HAS_ADVANTAGE:
        advantage = _cells(advantages, cell, live)
    selected = logprob != logprob
    if HAS_SELECTED:
        selected = tl.load(selected_in + cell, mask=live, other=0) != 0
    delta = logprob - old_logprob
    if LOSS == GSPO:
        delta = tl.load(sequence_delta + row, mask=live, other=0.0)
    if LOSS == CROSS_ENTROPY:  # has no ratio
        delta = tl.zeros_like(logprob)
    value, slope, clipped_low, clipped_high, chosen = token_loss(
        logprob, old_logprob, delta, advantage, selected, low, high, ratio_c, tau_pos, tau_neg,
        delta_low, delta_high, ppo_kl_coef, LOSS,
    )  # fmt: skip
    row_weight = tl.load(row_weights + row, mask=live, other=0.0).to(tl.float64)
    token_weight = live.to(tl.float64)
    if HAS_TOKEN_WEIGHT:
        token_weight = _cells(token_weights, cell, live)
    counts = token_weight != 0  # weight 0 drops the token, even where its loss is NaN
    stream = live & counts if HAS_CROSS_ENTROPY else live
    value = tl.where(counts, value * (row_weight * token_weight), 0.0)
    slope = tl.where(counts, slope * (row_weight * token_weight), 0.0)
    kl = tl.zeros_like(logprob)
    kl_weight = live.to(tl.float64)
    if HAS_KL_WEIGHT:
        kl_weight = _cells(kl_weights, cell, live)
    has_kl = live & (kl_weight != 0) & (KL != 0)
    if KL != 0:
        kl, kl_slope = token_kl(logprob, _cells(reference, cell, live), KL)
        slope = slope + tl.where(has_kl, row_weight * kl_coef * kl_weight * kl_slope, 0.0)
    supervised = tl.zeros_like(logprob)
    if HAS_CROSS_ENTROPY:
        supervised = _cells(cross_entropy_weights, cell, live)
        slope = slope - row_weight * supervised
    is_supervised = supervised != 0
    if HAS_GRAD:
        tl.store(grad + cell, slope.to(grad.dtype.element_ty), mask=inside)

    clamped = _clamp(delta, -20.0, 20.0)
    ratio = tl.exp(clamped)
    # NaN counts in the means below, not in the extremes.
    is_number = stream & (ratio == ratio)
    # Rows of `partial`: the weighted loss and KL; numbers of tokens, clipped low and high, chosen;
    # ratio - 1 and the estimate k3 of it; KL; the largest and smallest ratio; tokens of the policy
    # stream and of the KL; of the cross-entropy its sum, weighted sum and tokens.
    out = partial + tl.program_id(0)
    step = tl.num_programs(0)
    tl.store(out, tl.sum(value, 0))
    tl.store(out + step, tl.sum(tl.where(has_kl, row_weight * kl_weight * kl, 0.0), 0))
    tl.store(out + 2 * step, tl.sum(live.to(tl.float64), 0))
    tl.store(out + 3 * step, tl.sum((stream & clipped_low).to(tl.float64), 0))
    tl.store(out + 4 * step, tl.sum((stream & clipped_high).to(tl.float64), 0))
    tl.store(out + 5 * step, tl.sum((stream & chosen).to(tl.float64), 0))
    tl.store(out + 6 * step, tl.sum(tl.where(stream, ratio - 1.0, 0.0), 0))
    tl.store(out + 7 * step, tl.sum(tl.where(stream, ratio - 1.0 - clamped, 0.0), 0))
    tl.store(out + 8 * step, tl.sum(tl.where(has_kl, kl, 0.0), 0))
    tl.store(out + 9 * step, tl.max(tl.where(is_number, ratio, 0.0), 0))
    tl.store(out + 10 * step, tl.min(tl.where(is_number, ratio, float("inf")), 0))
    tl.store(out + 11 * step, tl.sum(stream.to(tl.float64), 0))
    tl.store(out + 12 * step, tl.sum(has_kl.to(tl.float64), 0))
    tl.store(out + 13 * step, tl.sum(tl.where(is_supervised, -logprob, 0.0), 0))
    weighted = tl.where(is_supervised, -logprob * row_weight * supervised, 0.0)
    tl.store(out + 14 * step, tl.sum(weighted, 0))
    tl.store(out + 15 * step, tl.sum(is_supervised.to(tl.float64), 0))


@triton.jit
def _total(partial, which: tl.constexpr, count, BLOCK: tl.constexpr):
    """Sum of one row of `partial`; largest and smallest for the ratios' extremes."""
    start_value = float("inf") if which == 10 else 0.0
    # Added in a fixed order, so that the bits are the same each time.
    total = tl.full((BLOCK,), start_value, tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(partial + which * count + i, mask=i < count, other=start_value)
        if which == 9:
            total = tl.maximum(total, x)
        elif which == 10:
            total = tl.minimum(total, x)
        else:
            total += x
    if which == 9:
        result = tl.max(total, 0)
    elif which == 10:
        result = tl.min(total, 0)
    else:
        result = tl.sum(total, 0)
    return result


@triton.jit
def fold_kernel(partial, metrics, count, kl_coef, LOSS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: compute the metrics from the partial sums."""
    policy = _total(partial, 0, count, BLOCK)
    kl_weighted = _total(partial, 1, count, BLOCK)
    tokens = _total(partial, 2, count, BLOCK)
    low = _total(partial, 3, count, BLOCK)
    high = _total(partial, 4, count, BLOCK)
    chosen = _total(partial, 5, count, BLOCK)
    policy_tokens = _total(partial, 11, count, BLOCK)
    kl_tokens = _total(partial, 12, count, BLOCK)
    supervised = _total(partial, 14, count, BLOCK)
    supervised_tokens = _total(partial, 15, count, BLOCK)
    any_ = policy_tokens > 0
    number = tl.where(any_, policy_tokens, 1.0)
    clipped = chosen if LOSS == CLIP_COV else low + high
    kl_loss = tl.where(kl_weighted != 0, kl_coef * kl_weighted, 0.0)
    tl.store(metrics, policy + kl_loss + supervised)
    tl.store(metrics + 1, policy)
    tl.store(metrics + 2, kl_weighted)
    tl.store(metrics + 3, tokens)
    tl.store(metrics + 4, clipped / number)
    tl.store(metrics + 5, low / number)
    tl.store(metrics + 6, high / number)
    tl.store(metrics + 7, chosen / number)
    tl.store(metrics + 8, tl.where(any_, 1.0 + _total(partial, 6, count, BLOCK) / number, 0.0))
    tl.store(metrics + 9, tl.where(any_, _total(partial, 9, count, BLOCK), 0.0))
    tl.store(metrics + 10, tl.where(any_, _total(partial, 10, count, BLOCK), 0.0))
    tl.store(metrics + 11, _total(partial, 7, count, BLOCK) / number)
    tl.store(metrics + 12, _total(partial, 8, count, BLOCK) / tl.maximum(kl_tokens, 1.0))
    tl.store(metrics + 13, kl_tokens)
    tl.store(metrics + 14, policy_tokens)
    tl.store(metrics + 15, supervised)
    mean = _total(partial, 13, count, BLOCK) / tl.maximum(supervised_tokens, 1.0)
    tl.store(metrics + 16, mean)
    tl.store(metrics + 17, supervised_tokens)


@triton.jit
def delta_kernel(a, b, mask, cu, sums, width, RAGGED: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row: the sum of a - b over its trained cells, and their number."""
    row = tl.program_id(0).to(tl.int64)
    begin = row * width
    end = begin + width
    if RAGGED:
        begin = tl.load(cu + row).to(tl.int64)
        end = tl.load(cu + row + 1).to(tl.int64)
    total = tl.full((BLOCK,), 0.0, tl.float64)
    count = tl.full((BLOCK,), 0.0, tl.float64)
    for start in range(begin, end, BLOCK):
        cell = start + tl.arange(0, BLOCK)
        inside = cell < end
        live = inside & (tl.load(mask + cell, mask=inside, other=0) != 0)
        total += _cells(a, cell, live) - _cells(b, cell, live)
        count += live.to(tl.float64)
    tl.store(sums + 2 * row, tl.sum(total, 0))
    tl.store(sums + 2 * row + 1, tl.sum(count, 0))


@triton.jit
def kl_kernel(
    logprobs, reference, mask, grad_out, out, num_cells,
    KL: tl.constexpr, HAS_GRAD_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK cells: their penalty, or its gradient."""
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < num_cells
    live = inside & (tl.load(mask + cell, mask=inside, other=0) != 0)
    value, slope = token_kl(_cells(logprobs, cell, live), _cells(reference, cell, live), KL)
    if HAS_GRAD_OUT:
        value = slope * _cells(grad_out, cell, live)
    tl.store(out + cell, tl.where(live, value, 0.0).to(out.dtype.element_ty), mask=inside)
