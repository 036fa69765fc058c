"""Plain-torch reference of losses and reductions. N rows, C cells, flat in row-major order.

All functions take flat cells with the row of each cell, are differentiable by autograd, and ignore
masked cells. The sources of the formulas are listed in `ops/policy_loss/losses.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from skyrl_fast.ops.policy_loss.losses import ClipCov, KlCov

MAX_DELTA = 20.0  # |delta| at which a ratio's exponent is clamped
MAX_K3 = 10.0
PROBABILITY_EPSILON = 1e-8  # offset in dppo's binary KL: no log of 0 at probability 1
METRICS = (
    "loss",
    "policy_loss",
    "kl_loss",
    "num_tokens",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "chosen_ratio",
    "ratio_mean",
    "ratio_max",
    "ratio_min",
    "approx_kl",
    "kl",
    "kl_tokens",
    "policy_tokens",
    "cross_entropy_loss",
    "cross_entropy",
    "cross_entropy_tokens",
)
# Reported only where these weights are given; the other metrics are those of the policy stream.
CROSS_ENTROPY_METRICS = (
    "policy_tokens",
    "cross_entropy_loss",
    "cross_entropy",
    "cross_entropy_tokens",
)
KL_WEIGHT_METRICS = ("kl_tokens",)


def name_metrics(
    values: torch.Tensor, *, has_cross_entropy: bool, has_kl_weights: bool
) -> dict[str, torch.Tensor]:
    """Return the metrics by name, without those of streams that were not given."""
    metrics = dict(zip(METRICS, values.unbind(), strict=True))
    absent = () if has_cross_entropy else CROSS_ENTROPY_METRICS
    for name in (*absent, *(() if has_kl_weights else KL_WEIGHT_METRICS)):
        del metrics[name]
    return metrics


def policy_stream(
    live: torch.Tensor,
    token_weights: torch.Tensor | None,
    cross_entropy_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Return bool cells, the trained tokens that have a policy loss."""
    # All are, even those that a correction dropped with a token weight of 0, unless
    # `cross_entropy_weights` are given: then tokens of token weight 0 are only supervised.
    if token_weights is None or cross_entropy_weights is None:
        return live
    return live & (token_weights != 0)


def cell_row_ids(like: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Return (C,) int64, the row of each cell of an (N, R) or ragged (A,) tensor."""
    if cu_seqlens is None:
        num_rows, width = like.shape
        return torch.arange(num_rows, device=like.device).repeat_interleave(width)
    lengths = cu_seqlens.diff().to(like.device, torch.int64)
    rows = torch.arange(lengths.numel(), device=like.device)
    # The size is given, or torch would read the sum of the lengths from the device.
    return torch.repeat_interleave(rows, lengths, output_size=like.numel())


def mask_values(values: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Return values with 0 where masked, even for NaN; no gradient flows to masked cells."""
    return torch.where(live, values, torch.zeros((), dtype=values.dtype, device=values.device))


def ratio_of(delta: torch.Tensor) -> torch.Tensor:
    """Return exp(clamp(delta, -20, 20)); NaN stays NaN, in the gradient too."""
    clamped = delta.clamp(-MAX_DELTA, MAX_DELTA)
    return torch.where(delta.isnan(), delta, clamped).exp()


def kl_penalty(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, live: torch.Tensor, estimator: str
) -> torch.Tensor:
    """Return the per-cell estimate of KL(current || reference), 0 where masked."""
    delta = mask_values(logprobs, live) - mask_values(ref_logprobs, live)
    if estimator == "k1":
        return delta
    if estimator == "abs":
        return delta.abs()
    if estimator == "k2":
        return 0.5 * delta.square()
    x = torch.where(delta.isnan(), delta, (-delta).clamp(-MAX_DELTA, MAX_DELTA))
    # exp(x) - 1 - x would have no digit left for small differences.
    value = torch.expm1(x) - x
    return torch.where(value.isnan(), value, value.clamp(-MAX_K3, MAX_K3))


def sequence_mean(
    values: torch.Tensor, live: torch.Tensor, cell_segments: torch.Tensor, num_segments: int
) -> torch.Tensor:
    """Return for each cell the mean of `values` over the trained cells of its segment."""
    sums = values.new_zeros(num_segments, dtype=torch.float64)
    sums.index_add_(0, cell_segments, values.double())
    counts = torch.zeros_like(sums).index_add_(0, cell_segments, live.double())
    return (sums / counts.clamp(min=1))[cell_segments].to(values.dtype)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return PPO's per-cell loss and where the lower and the upper bound took effect."""
    free = -advantages * ratio
    bound = -advantages * ratio.clamp(low, high)
    clipped = bound > free
    loss = torch.where(clipped, bound, free)
    # Only the lower bound can raise the loss of a negative advantage, only the upper one that of a
    # positive one.
    return loss, clipped & (advantages < 0), clipped & (advantages > 0)


def token_loss(
    loss: str,
    p: Mapping[str, float],
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    delta: torch.Tensor,
    advantages: torch.Tensor,
    selected: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return per cell: loss, clipped low, clipped high, chosen.

    Args:
        loss: one of `LOSS_CODES`: "dppo_tv" and "dppo_kl" for dppo's two variants.
        p: the numbers of `KERNEL_PARAMS` that the loss reads, by name.
        logprobs, old_logprobs, delta, advantages: (C,), 0 where masked.
        selected: (C,) bool for clip_cov and kl_cov.
    """
    no = torch.zeros_like(logprobs, dtype=torch.bool)
    if loss == "cross_entropy":
        return -logprobs, no, no, no
    ratio = ratio_of(delta)
    if loss in ("regular", "gspo", "dual_clip", "clip_cov"):
        value, low, high = clipped_surrogate(ratio, advantages, p["clip_low"], p["clip_high"])
        if loss == "dual_clip":
            ceiling = -advantages * p["clip_ratio_c"]
            chosen = (advantages < 0) & (ceiling < value)
            return torch.where(chosen, ceiling, value), low, high, chosen
        if loss == "clip_cov":
            assert selected is not None
            return mask_values(value, ~selected), low, high, selected
        return value, low, high, no
    if loss == "kl_cov":
        assert selected is not None
        penalty = p["ppo_kl_coef"] * mask_values((logprobs - old_logprobs).abs(), selected)
        return -advantages * ratio + penalty, no, no, selected
    if loss == "cispo":
        weight = ratio.detach().clamp(p["clip_low"], p["clip_high"])
        return -advantages * weight * logprobs, ratio < p["clip_low"], ratio > p["clip_high"], no
    if loss == "rollout_is":
        low = ratio <= p["clip_low"]
        high = (ratio >= p["clip_high"]) & ~low  # counted once where the bounds meet
        weight = mask_values(ratio.detach(), ~(low | high))
        return -advantages * weight * logprobs, low, high, no
    if loss == "sapo":
        tau_neg = torch.full_like(ratio, p["tau_neg"])
        tau = torch.where(advantages > 0, torch.full_like(ratio, p["tau_pos"]), tau_neg)
        # 4 / tau: at ratio 1 the gradient is that of the loss without a gate.
        return -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau), no, no, no
    if loss in ("dppo_tv", "dppo_kl"):
        low, high = _dppo_dropped(loss, p, logprobs.detach(), old_logprobs)
        low = low & (advantages < 0)
        high = high & (advantages > 0)
        return mask_values(-advantages * ratio, ~(low | high)), low, high, no
    assert loss == "importance_sampling", loss
    return -advantages * ratio, no, no, no


def _dppo_dropped(
    loss: str, p: Mapping[str, float], logprobs: torch.Tensor, old_logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    prob = logprobs.exp()
    old_prob = old_logprobs.exp()
    if loss == "dppo_tv":
        return old_prob - prob > p["delta_low"], prob - old_prob > p["delta_high"]
    other = 1 - prob + PROBABILITY_EPSILON
    old_other = 1 - old_prob + PROBABILITY_EPSILON
    # A distribution of two outcomes: this token, or any other.
    kl = old_prob * (old_logprobs - logprobs) + (1 - old_prob) * torch.log(old_other / other)
    return (prob < old_prob) & (kl > p["delta_low"]), (prob > old_prob) & (kl > p["delta_high"])


def policy_loss(
    loss: str,
    p: Mapping[str, float],
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor | None,
    live: torch.Tensor,
    row: torch.Tensor,
    row_weights: torch.Tensor,
    *,
    row_segments: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
    kl_estimator: str | None = None,
    token_weights: torch.Tensor | None = None,
    cross_entropy_weights: torch.Tensor | None = None,
    kl_weights: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scalar loss and the metrics, (len(METRICS),) float64.

    Args:
        loss, p, selected: as in `token_loss`; `p` with `kl_coef`.
        logprobs, old_logprobs, advantages, live, ref_logprobs: (C,); old_logprobs None: the
            detached logprobs.
        token_weights, cross_entropy_weights, kl_weights: (C,), or None.
        row: (C,) row of each cell. row_weights: (N,).
        row_segments: (N,) sequence of each row, below N, for gspo; None: the row itself.
    """
    stream = policy_stream(live, token_weights, cross_entropy_weights)
    current = mask_values(logprobs, stream)
    if old_logprobs is None:
        old = current.detach()
    else:
        old = mask_values(old_logprobs.detach(), stream)
    if advantages is None:
        adv = torch.zeros_like(current)
    else:
        adv = mask_values(advantages.detach(), stream)
    delta = current - old
    if loss == "gspo":
        if row_segments is None:
            segment = row
        else:
            segment = row_segments[row]
        sequence = sequence_mean(delta.detach(), stream, segment, row_weights.numel())
        # GSPO-token: the value is the sequence's mean, the gradient the token's own.
        delta = delta - delta.detach() + sequence
    value, low, high, chosen = token_loss(loss, p, current, old, delta, adv, selected)
    value = mask_values(value, stream)
    if token_weights is not None:
        factor = mask_values(token_weights.detach(), stream)
        on = factor != 0  # 0 drops the token, even where its loss is NaN
        # Computed again from zeros: NaN times a weight of 0 is NaN, in the gradient as well.
        inputs = []
        for x in (current, old, delta, adv):
            inputs.append(mask_values(x, on))
        value = token_loss(loss, p, inputs[0], inputs[1], inputs[2], inputs[3], selected)[0]
        value = value * factor
    # It has no ratio, whatever log-probabilities are given.
    if loss == "cross_entropy":
        shown_delta = torch.zeros_like(delta)
    else:
        shown_delta = delta.detach()
    return weighted_loss(
        value,
        logprobs,
        live,
        stream,
        row_weights[row],
        delta=shown_delta,
        flags=(chosen if loss == "clip_cov" else low | high, low, high, chosen),
        ref_logprobs=ref_logprobs,
        kl_estimator=kl_estimator,
        kl_coef=p["kl_coef"],
        cross_entropy_weights=cross_entropy_weights,
        kl_weights=kl_weights,
    )


def weighted_loss(
    value: torch.Tensor,
    logprobs: torch.Tensor,
    live: torch.Tensor,
    stream: torch.Tensor,
    weights: torch.Tensor,
    *,
    delta: torch.Tensor,
    flags: tuple[torch.Tensor, ...],
    ref_logprobs: torch.Tensor | None,
    kl_estimator: str | None,
    kl_coef: float,
    cross_entropy_weights: torch.Tensor | None = None,
    kl_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sum of the streams of losses, and the metrics.

    Args:
        value: (C,) policy loss times token weight, 0 where masked. logprobs, live: (C,).
        stream: (C,) bool, of `policy_stream`.
        weights: (C,), the row's weight. delta: (C,), log of the ratio, without gradient.
        flags: (C,) bool each: clipped, clipped low, clipped high, chosen.
        cross_entropy_weights, kl_weights: (C,), or None. 0 drops the token, even where its
            value would be NaN.
    """
    weights = weights.to(value.dtype)
    policy = (value * weights).sum()
    total = policy
    kl = torch.zeros_like(value)
    kl_loss = torch.zeros_like(policy)
    kl_live = torch.zeros_like(live)
    if kl_estimator is not None:
        assert ref_logprobs is not None
        kl_live = live
        factor = weights
        if kl_weights is not None:
            # A teacher's log-probabilities may be missing (NaN) where they do not count.
            kl_live = live & (kl_weights != 0)
            factor = weights * mask_values(kl_weights.detach(), kl_live)
        kl = kl_penalty(logprobs, ref_logprobs.detach(), kl_live, kl_estimator)
        kl_loss = (kl * factor).sum()
        total = total + kl_coef * kl_loss
    supervised = torch.zeros_like(live)
    cross_entropy = torch.zeros_like(value)
    cross_entropy_loss = torch.zeros_like(policy)
    if cross_entropy_weights is not None:
        supervised = live & (cross_entropy_weights != 0)
        cross_entropy = -mask_values(logprobs, supervised)
        factor = weights * mask_values(cross_entropy_weights.detach(), supervised)
        cross_entropy_loss = (cross_entropy * factor).sum()
        total = total + cross_entropy_loss
    with torch.no_grad():
        count = stream.sum().double()
        clamped = delta.clamp(-MAX_DELTA, MAX_DELTA)
        metrics = [
            total,
            policy,
            kl_loss,
            live.sum(),
            *_policy_metrics(clamped, stream, count, flags),
            _mean(kl, kl_live),
            kl_live.sum(),
            count,
            cross_entropy_loss,
            _mean(cross_entropy, supervised),
            supervised.sum(),
        ]
        return total, torch.stack([x.double() for x in metrics])


def _mean(values: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    return mask_values(values.double(), live).sum() / live.sum().clamp(min=1)


def _policy_metrics(
    delta: torch.Tensor, stream: torch.Tensor, count: torch.Tensor, flags: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Return the shares of clipped tokens, then the ratio's mean, extremes and approx_kl."""
    ratio = delta.double().exp()
    inf = torch.full_like(ratio, torch.inf)
    known = stream & ~ratio.isnan()
    # A tensor without cells has no extremes; the count is the 0 that is reported then.
    extremes = [
        mask_values(ratio, known).max() if ratio.numel() else count,
        torch.where(known, ratio, inf).min() if ratio.numel() else count,
    ]
    return [
        *(_mean(flag, stream) for flag in flags),
        _mean(ratio, stream),
        *(torch.where(count > 0, x, torch.zeros_like(x)) for x in extremes),
        _mean(torch.expm1(delta.double()) - delta.double(), stream),
    ]


def reduction_weights(
    counts: torch.Tensor,
    reduction: str,
    row_segments: torch.Tensor,
    num_segments: int,
    max_seq_len: int | None,
) -> torch.Tensor:
    """Return (N,) float64 weights from each row's count of trained tokens.

    Args:
        counts: (N,) trained tokens. row_segments: (N,) prompt or trajectory of each row for
            prompt_mean and trajectory_mean, with `num_segments` of them.
    """
    # 1 / 3 in float32 is off by 3e-8, and so would be a loss in float64.
    counts = counts.double()
    num_rows = counts.numel()
    if reduction == "token_mean":
        return torch.ones_like(counts) / counts.sum().clamp(min=1)
    if reduction == "sequence_mean":
        return 1 / (num_rows * counts.clamp(min=1))
    if reduction == "seq_mean_token_sum_norm":
        assert max_seq_len is not None
        return torch.full_like(counts, 1 / (max(1, num_rows) * max_seq_len))
    segment_counts = counts.new_zeros(num_segments).index_add_(0, row_segments, counts)
    return 1 / (num_segments * segment_counts.clamp(min=1)[row_segments])


def select_by_covariance(
    settings: ClipCov | KlCov,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    live: torch.Tensor,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Return bool like `live`: the tokens that clip_cov drops or that kl_cov penalises."""
    # The covariance of a token is the product of the centred advantage and the centred logprob over
    # the trained tokens given. clip_cov draws max(1, share * tokens) among those strictly between
    # its bounds that PPO's clip leaves alone; kl_cov takes the max(1, share * tokens) largest.
    # Computed in float32 (float64 for float64) in the order of SkyRL's sums, kl_cov's over the
    # trained tokens, clip_cov's over all cells: where all advantages are equal the covariance is
    # rounding, and on the CPU the tokens are SkyRL's.
    cells = live.nonzero(as_tuple=True)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    inputs = (logprobs, old_logprobs, advantages)
    current, old, adv = (x.detach()[cells].to(dtype) for x in inputs)
    selected = torch.zeros_like(live)
    if current.numel() == 0:
        return selected
    adv_mean = adv.mean()
    current_mean = current.mean()
    if isinstance(settings, ClipCov):
        padded = (torch.where(live, x.detach().to(dtype), 0) for x in (advantages, logprobs))
        adv_mean, current_mean = (x.sum() / live.sum() for x in padded)
    covariance = (adv - adv_mean) * (current - current_mean)
    if isinstance(settings, KlCov):
        num = max(1, int(current.numel() * settings.kl_cov_frac))
        picked = torch.topk(covariance, min(num, current.numel())).indices
    else:
        ratio = ratio_of(current - old)
        bounds = settings.kernel_params()
        _, low, high = clipped_surrogate(ratio, adv, bounds["clip_low"], bounds["clip_high"])
        inside = (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub)
        candidates = (inside & ~(low | high)).nonzero().reshape(-1)
        num = max(1, int(current.numel() * settings.clip_ratio))
        # A generator draws on its own device only.
        place = "cpu" if generator is None else generator.device
        order = torch.randperm(candidates.numel(), generator=generator, device=place)
        order = order.to(candidates.device)
        picked = candidates[order[:num]]
    flat = torch.zeros(current.numel(), dtype=torch.bool, device=live.device)
    flat[picked] = True
    selected[cells] = flat
    return selected
