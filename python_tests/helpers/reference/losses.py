"""Losses and penalties of tokens, and how they are weighted (section 6).

M is the number of trained tokens of a mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LIMIT = 20.0  # of a difference of log-probabilities
LARGEST_K3 = 10.0
LEAST_REST = 1e-6  # of the probability that all unlikely tokens have together
UNDECIDED = 1e-6  # difference of covariances that float32 may order otherwise
LOSSES = (
    "regular",
    "dual_clip",
    "gspo",
    "cispo",
    "rollout_is",
    "clip_cov",
    "kl_cov",
    "sapo",
    "dppo",
    "cross_entropy",
    "importance_sampling",
)
RATIO_TO_SAMPLER = ("rollout_is", "dppo")


@dataclass(slots=True)
class Tokens:
    """Trained tokens: each field is (M,) float64.

    Args:
        logprobs: current ones, with a gradient.
        old, sampled: before the update, and the sampler's.
        sequences: number of the token's sequence.
    """

    logprobs: torch.Tensor
    old: torch.Tensor
    sampled: torch.Tensor
    advantages: torch.Tensor
    sequences: torch.Tensor


@dataclass(slots=True)
class TokenLosses:
    """Loss and ratio of each token, and which of them are clipped.

    Args:
        ratios: (M,)
        low, high: (M,) bool, whether a bound of the ratio took effect there.
        chosen: (M,) bool, where dual_clip's cap applies, or that clip_cov or kl_cov have chosen.
        is_decided: False where rounding decides which tokens are chosen.
    """

    losses: torch.Tensor
    ratios: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    chosen: torch.Tensor
    is_decided: bool = True


def ratio_of(difference: torch.Tensor) -> torch.Tensor:
    return difference.clamp(-LIMIT, LIMIT).exp()


def compares_with_sampler(algorithm: Any) -> bool:
    name = algorithm.policy_loss_type
    return name in RATIO_TO_SAMPLER or (
        name == "cispo" and algorithm.cispo.cispo_ratio == "rollout"
    )


def reads_old(algorithm: Any) -> bool:
    """Return whether the loss reads the trainer's log-probabilities before the update."""
    if algorithm.old_logprobs == "rollout" or algorithm.policy_loss_type == "cross_entropy":
        return False
    return not compares_with_sampler(algorithm)


CustomLoss = Callable[[Tokens], torch.Tensor]


def policy_losses(tokens: Tokens, algorithm: Any, custom: CustomLoss | None = None) -> TokenLosses:
    """Return the chosen loss of each trained token, or of a custom one."""
    name = algorithm.policy_loss_type
    low = 1 - algorithm.eps_clip_low
    high = 1 + algorithm.eps_clip_high
    a = tokens.advantages
    logprobs = tokens.logprobs
    base = tokens.sampled if compares_with_sampler(algorithm) else tokens.old
    difference = logprobs - base
    if name == "gspo":
        mean = _means(difference.detach(), tokens.sequences)
        difference = mean + logprobs - logprobs.detach()
    if name == "cispo":
        low = 1 - algorithm.cispo.cispo_eps_clip_low
        high = 1 + algorithm.cispo.cispo_eps_clip_high
    r = ratio_of(difference)
    fixed = r.detach()
    never = torch.zeros_like(fixed, dtype=torch.bool)
    is_low = is_high = chosen = never
    is_decided = True
    if name in ("regular", "gspo", "dual_clip", "clip_cov"):
        is_low = (fixed < low) & (a < 0)
        is_high = (fixed > high) & (a > 0)
        losses = torch.maximum(-a * r, -a * r.clamp(low, high))
        if name == "dual_clip":
            cap = -a * algorithm.clip_ratio_c
            chosen = (a < 0) & (cap < losses.detach())
            losses = torch.where(a < 0, torch.minimum(losses, cap), losses)
        if name == "clip_cov":
            chosen = _dropped_by_covariance(tokens, algorithm.clip_cov, is_low | is_high)
            losses = losses * ~chosen
    elif name == "cispo":
        is_low = fixed < low
        is_high = fixed > high
        losses = -a * fixed.clamp(low, high) * logprobs
    elif name == "rollout_is":
        is_low = fixed <= low
        is_high = fixed >= high
        losses = torch.where(is_low | is_high, 0.0, -a * fixed * logprobs)
    elif name == "kl_cov":
        chosen, is_decided = _largest_covariances(tokens, algorithm.kl_cov.kl_cov_frac)
        distance = algorithm.kl_cov.ppo_kl_coef * (logprobs - tokens.old).abs()
        losses = -a * r + distance * chosen
    elif name == "sapo":
        tau = torch.where(a > 0, algorithm.sapo.tau_pos, algorithm.sapo.tau_neg)
        losses = -a * torch.sigmoid(tau * (r - 1)) * 4 / tau
    elif name == "dppo":
        is_low, is_high = _moved_too_far(tokens, algorithm.dppo)
        losses = torch.where(is_low | is_high, 0.0, -a * r)
    elif name == "cross_entropy":
        losses = -logprobs
        fixed = torch.ones_like(fixed)  # it compares with nothing
    elif custom is not None:
        losses = custom(tokens)
    else:
        assert name == "importance_sampling", name
        losses = -a * r
    return TokenLosses(losses, fixed, is_low, is_high, chosen, is_decided)


def kl_penalties(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    d = logprobs - reference
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return d * d / 2
    x = (-d).clamp(-LIMIT, LIMIT)
    return (x.exp() - x - 1).clamp(-LARGEST_K3, LARGEST_K3)


def kl_of_likely_tokens(
    own: torch.Tensor, teacher: torch.Tensor, top_k: int, direction: str
) -> torch.Tensor:
    """Return the KL of one place, of (V,) log-probabilities of policy and teacher."""
    likely = teacher.topk(top_k).indices
    q = own.exp()[likely]
    p = teacher.exp()[likely]
    q = torch.cat([q, (1 - q.sum()).clamp(min=LEAST_REST)[None]])
    p = torch.cat([p, (1 - p.sum()).clamp(min=LEAST_REST)[None]])
    if direction == "reverse":
        return (q * (q / p).log()).sum()
    return (p * (p / q).log()).sum()


def _means(values: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean over its sequence."""
    result = torch.zeros_like(values)
    for number in set(numbers.tolist()):
        own = numbers == number
        result[own] = values[own].mean()
    return result


def covariances(tokens: Tokens) -> torch.Tensor:
    a = tokens.advantages
    logprobs = tokens.logprobs.detach()
    return (a - a.mean()) * (logprobs - logprobs.mean())


def _dropped_by_covariance(tokens: Tokens, settings: Any, clipped: torch.Tensor) -> torch.Tensor:
    """Return which tokens are dropped, where the share takes all candidates: it draws."""
    covariance = covariances(tokens)
    inside = (settings.clip_cov_lb < covariance) & (covariance < settings.clip_cov_ub)
    candidates = inside & ~clipped
    number = max(1, int(settings.clip_ratio * len(covariance)))
    assert int(candidates.sum()) <= number, "expected a share that leaves nothing to draw"
    return candidates


def _largest_covariances(tokens: Tokens, share: float) -> tuple[torch.Tensor, bool]:
    """Return which tokens are chosen, and whether those left are smaller by more than rounding."""
    covariance = covariances(tokens)
    number = max(1, int(share * len(covariance)))
    ordered = covariance.sort(descending=True)
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[ordered.indices[:number]] = True
    left = ordered.values[number:]
    is_decided = not len(left) or bool(ordered.values[number - 1] - left[0] > UNDECIDED)
    return chosen, is_decided


def _moved_too_far(tokens: Tokens, settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the probability went too far down, and too far up."""
    now = tokens.logprobs.detach().exp()
    before = tokens.sampled.exp()
    if settings.dppo_type == "binary_tv":
        distance = (now - before).abs()
    else:
        rest = (1 - before) * torch.log((1 - before) / (1 - now))
        distance = before * torch.log(before / now) + rest
    up = (tokens.advantages > 0) & (now > before) & (distance > settings.delta_high)
    down = (tokens.advantages < 0) & (now < before) & (distance > settings.delta_low)
    return down, up


def reduction_weights(
    name: str, tokens: Sequence[tuple[int, str, tuple[str, int]]], counts: Counts
) -> list[float]:
    """Return the weight of each trained token.

    Args:
        tokens: row number, prompt and trajectory of each trained token.
        counts: of the mini-batch.
    """
    if name == "token_mean":
        return [1 / len(tokens)] * len(tokens)
    if name == "seq_mean_token_sum_norm":
        return [1 / (counts.rows * counts.max_seq_len)] * len(tokens)
    level, units = {
        "sequence_mean": (0, counts.rows),
        "prompt_mean": (1, counts.prompts),
        "trajectory_mean": (2, counts.trajectories),
    }[name]
    sizes: dict[Any, int] = {}
    for token in tokens:
        sizes[token[level]] = sizes.get(token[level], 0) + 1
    return [1 / (units * sizes[token[level]]) for token in tokens]


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows, prompts and trajectories of a mini-batch that a reduction counts."""

    rows: int
    prompts: int
    trajectories: int
    max_seq_len: int
