"""Loss, gradient and metrics of an optimizer step, and the step itself (sections 6, 7 and 20)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reference.advantages import Advantages
from reference.corrections import Correction, correct
from reference.filters import sequences_of
from reference.losses import (
    LOSSES,
    Counts,
    CustomLoss,
    TokenLosses,
    Tokens,
    kl_of_likely_tokens,
    kl_penalties,
    policy_losses,
    reads_old,
    reduction_weights,
)
from reference.rows import Row

OF_MINI_BATCH = ("clip_cov", "kl_cov")  # losses that choose among all its tokens
ADAM_EPSILON = 1e-8
CLIP_EPSILON = 1e-6

Distributions = Callable[[Sequence[Row]], tuple[torch.Tensor, torch.Tensor]]
Vocabulary = Callable[[Sequence[Row]], torch.Tensor]
Place = tuple[int, int]  # a row and a token of its response


@dataclass(slots=True)
class Batch:
    """Rows with all that an update reads; lists are by row and response token.

    Args:
        old: log-probabilities before the batch's first optimizer step.
        reference: those of the reference model, or None.
        teacher: (response tokens, V) of each row's teacher, None for a row without one; or None.
    """

    rows: list[Row]
    advantages: Advantages
    old: list[list[float]]
    reference: list[list[float]] | None = None
    teacher: list[torch.Tensor | None] | None = None
    values: list[list[float]] | None = None


@dataclass(slots=True)
class Terms:
    """A mini-batch's loss, and the values that its metrics are computed from.

    Args:
        loss: with a gradient; None: nothing is trained.
        sums: terms that are weighted as in the loss.
        tokens: values of trained tokens, by metric.
        mismatch: of each trained token, the difference of trainer and engine before the update.
        is_visited: of each trained token, whether its row may have a gradient: other rows are not
            computed.
        is_decided: as of `TokenLosses`.
    """

    loss: torch.Tensor | None = None
    sums: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[float]] = field(default_factory=dict)
    mismatch: list[float] = field(default_factory=list)
    is_visited: list[bool] = field(default_factory=list)
    observed: list[float] = field(default_factory=list)
    correction: Correction | None = None
    num_trained: int = 0
    is_decided: bool = True


def mini_batches(rows: Sequence[Row], size: int) -> list[list[int]]:
    """Return the numbers of the rows of each mini-batch: `size` prompts."""
    prompts = list(dict.fromkeys(row.uid for row in rows))
    parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return [[number for number, row in enumerate(rows) if row.uid in part] for part in parts]


def trained_places(rows: Sequence[Row], numbers: Sequence[int]) -> list[Place]:
    return [
        (number, token)
        for number in numbers
        for token, is_trained in enumerate(rows[number].mask)
        if is_trained
    ]


def observed_places(rows: Sequence[Row], numbers: Sequence[int]) -> list[Place]:
    return [
        (number, token)
        for number in numbers
        for token, is_observed in enumerate(rows[number].is_observed)
        if is_observed
    ]


def counts_of(rows: Sequence[Row], max_seq_len: int) -> Counts:
    """Return what reductions count: trajectories that have acted, and their rows and prompts."""
    acted = [row for row in rows if not row.is_placeholder]
    prompts = {row.uid for row in acted}
    trajectories = {row.trajectory for row in acted}
    return Counts(len(acted), len(prompts), len(trajectories), max_seq_len)


def loss_terms(
    batch: Batch,
    numbers: Sequence[int],
    distributions: Distributions,
    config: Any,
    custom: CustomLoss | None = None,
    *,
    is_before_any_step: bool = False,
    vocabulary: Vocabulary | None = None,
) -> Terms:
    """Return the loss of a mini-batch.

    Args:
        numbers: of its rows.
        is_before_any_step: whether the weights are still those of the old policy.
        distributions: log-probabilities and entropies of rows' response tokens, with a gradient.
        custom: the loss of each token, where the settings name none of the built-in ones.
        vocabulary: log-probabilities of all tokens in their places, with a gradient.
    """
    algorithm = config.trainer.algorithm
    rows = batch.rows
    places = trained_places(rows, numbers)
    observed = []
    if algorithm.observation_loss_coef > 0:
        observed = observed_places(rows, numbers)
    if not places and not observed:
        return Terms()
    passed = sorted({number for number, _ in (*places, *observed)})
    logprobs, entropies = distributions([rows[number] for number in passed])
    starts: dict[int, int] = {}
    start = 0
    for number in passed:
        starts[number] = start
        start += len(rows[number].response)

    def picked(values: torch.Tensor, chosen: Sequence[Place]) -> torch.Tensor:
        return values[[starts[number] + token for number, token in chosen]]

    def known(values: Sequence[Sequence[float]]) -> list[float]:
        return [values[number][token] for number, token in places]

    terms = Terms(num_trained=len(places))
    parts = []
    if places:
        full = None
        if algorithm.distillation.top_k > 0:
            assert vocabulary is not None
            full = picked(vocabulary([rows[number] for number in passed]), places)
        parts += _policy_terms(
            terms, batch, numbers, places, picked(logprobs, places), picked(entropies, places),
            full, known, config, custom, is_before_any_step=is_before_any_step,
        )  # fmt: skip
    if observed:
        cross_entropy = -picked(logprobs, observed)
        terms.observed = cross_entropy.tolist()
        observation_loss = algorithm.observation_loss_coef * cross_entropy.mean()
        terms.sums["cross_entropy_loss"] = observation_loss.item()
        parts.append(observation_loss)
    terms.loss = torch.stack(parts).sum()
    terms.sums["loss"] = terms.loss.item()
    return terms


def _policy_terms(
    terms: Terms,
    batch: Batch,
    numbers: Sequence[int],
    places: Sequence[Place],
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    full: torch.Tensor | None,
    known: Callable[[Sequence[Sequence[float]]], list[float]],
    config: Any,
    custom: CustomLoss | None,
    *,
    is_before_any_step: bool,
) -> list[torch.Tensor]:
    """Return the terms of trained tokens, weighted as in the loss."""
    algorithm = config.trainer.algorithm
    own = [batch.rows[number] for number in numbers]
    units = sequences_of(own, algorithm.sequence_scope)
    unit_of = {id(row): unit for unit, sequence in enumerate(units) for row in sequence}
    sequences = [unit_of[id(batch.rows[number])] for number, _ in places]
    sampled = known([row.sampled for row in batch.rows])
    before = known(batch.old)
    old = sampled if algorithm.old_logprobs == "rollout" else before
    if algorithm.policy_loss_type == "kl_cov" and old is before and is_before_any_step:
        old = logprobs.tolist()
    tokens = Tokens(
        logprobs,
        _double(old),
        _double(sampled),
        _double(known(batch.advantages.values)),
        torch.tensor(sequences),
    )
    correction = correct(before, sampled, sequences, algorithm.off_policy_correction)
    terms.correction = correction
    token_weights = [
        weight * (algorithm.summary_weight if batch.rows[number].is_summary[token] else 1.0)
        for weight, (number, token) in zip(correction.weights, places, strict=True)
    ]
    visited = _visited_rows(batch, numbers, places, token_weights, algorithm)
    terms.is_visited = [number in visited for number, _ in places]
    result = policy_losses(tokens, algorithm, custom)
    terms.is_decided = result.is_decided
    length = config.generator.max_input_length
    length += config.generator.sampling_params.max_generate_length
    counts = counts_of(own, algorithm.max_seq_len or length)
    units_of_tokens = [
        (number, batch.rows[number].uid, batch.rows[number].trajectory) for number, _ in places
    ]
    weights = _double(reduction_weights(algorithm.loss_reduction, units_of_tokens, counts))
    policy_loss = (weights * _double(token_weights) * result.losses).sum()
    policy_loss = algorithm.policy_loss_coef * policy_loss
    terms.sums["policy_loss"] = policy_loss.item()
    parts = [policy_loss]
    if algorithm.use_kl_loss:
        assert batch.reference is not None
        reference = _double(known(batch.reference))
        penalties = kl_penalties(logprobs, reference, algorithm.kl_estimator_type)
        kl_loss = (weights * penalties).sum()
        terms.sums["kl_loss"] = kl_loss.item()
        terms.tokens["kl"] = penalties.tolist()
        parts.append(algorithm.kl_loss_coef * kl_loss)
    if algorithm.use_entropy_loss:
        parts.append(-algorithm.entropy_loss_coef * (weights * entropies).sum())
    if batch.teacher is not None:
        distilled = distillation_terms(batch, places, logprobs, full, algorithm.distillation)
        distillation_loss = (weights * distilled).sum()
        terms.sums["distillation_loss"] = distillation_loss.item()
        parts.append(algorithm.distillation.coef * distillation_loss)
    now = logprobs.tolist()
    terms.mismatch = [abs(one - other) for one, other in zip(before, sampled, strict=True)]
    terms.tokens |= {
        "policy_entropy": entropies.tolist(),
        "ratio": result.ratios.tolist(),
        "clip_ratio_low": result.low.double().tolist(),
        "clip_ratio_high": result.high.double().tolist(),
        "clip_ratio": _clipped(result, algorithm).double().tolist(),
        "chosen_ratio": result.chosen.double().tolist(),
        # Of a ratio r: r - 1 - log r, which is 0 where nothing moved, and never negative.
        "approx_kl": (result.ratios - 1 - result.ratios.log()).tolist(),
        "update_change": [abs(one - other) for one, other in zip(now, sampled, strict=True)],
    }
    return parts


def distillation_terms(
    batch: Batch,
    places: Sequence[Place],
    logprobs: torch.Tensor,
    full: torch.Tensor | None,
    settings: Any,
) -> torch.Tensor:
    """Return the term of each trained token; 0 in rows without a teacher.

    Args:
        logprobs: (M,) the policy's, of the sampled tokens.
        full: (M, V) the policy's, of all tokens, where they are needed.
    """
    assert batch.teacher is not None
    terms = []
    for place, (number, token) in enumerate(places):
        of_row = batch.teacher[number]
        if of_row is None:
            terms.append(logprobs[place] * 0.0)
        elif full is None:
            sampled = batch.rows[number].response[token]
            terms.append((logprobs[place] - of_row[token, sampled]) ** 2 / 2)
        else:
            own = full[place]
            kl = kl_of_likely_tokens(own, of_row[token], settings.top_k, settings.direction)
            terms.append(kl)
    return torch.stack(terms)


def tokens_known_before(algorithm: Any, epochs: int) -> str:
    """Return of which mini-batches the trainer computes all log-probabilities before the update.

    "all", "later" (all but the first, whose own pass is before any step), or "none".
    """
    if algorithm.old_logprobs == "rollout":
        return "none"
    if algorithm.off_policy_correction.enabled or algorithm.use_kl_in_reward:
        return "all"
    if not reads_old(algorithm):
        return "none"
    return "all" if epochs > 1 else "later"


def _clipped(result: TokenLosses, algorithm: Any) -> torch.Tensor:
    if algorithm.policy_loss_type == "clip_cov":
        return result.chosen
    return result.low | result.high


def _visited_rows(
    batch: Batch,
    numbers: Sequence[int],
    places: Sequence[Place],
    weights: Sequence[float],
    algorithm: Any,
) -> set[int]:
    """Return the rows of which a token may have a gradient."""
    visited = set()
    if algorithm.observation_loss_coef > 0:
        visited |= {number for number, _ in observed_places(batch.rows, numbers)}
    has_policy_loss = algorithm.policy_loss_coef > 0
    without_advantages = algorithm.policy_loss_type not in LOSSES
    without_advantages |= algorithm.policy_loss_type == "cross_entropy"
    has_other_terms = algorithm.use_kl_loss or algorithm.use_entropy_loss
    has_other_terms |= bool(algorithm.distillation.teachers)
    chooses = algorithm.policy_loss_type in OF_MINI_BATCH
    if has_other_terms or chooses or (has_policy_loss and without_advantages):
        return visited | {number for number, _ in places}
    for (number, token), weight in zip(places, weights, strict=True):
        advantage = batch.advantages.values[number][token]
        if has_policy_loss and weight != 0 and advantage != 0:
            visited.add(number)
    if algorithm.policy_loss_type == "gspo" and algorithm.sequence_scope == "trajectory":
        trajectories = {batch.rows[number].trajectory for number in visited}
        visited |= {n for n, _ in places if batch.rows[n].trajectory in trajectories}
    return visited


def _double(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradients(loss: torch.Tensor | None, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the gradient of each weight; zeros where the loss does not depend on it."""
    if loss is None or not loss.requires_grad:
        return {name: torch.zeros_like(value) for name, value in weights.items()}
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(weights.items(), found, strict=True)
    }


def norm_of(gradient: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(math.fsum(float((value**2).sum()) for value in gradient.values()))


def learning_rate(step: int, settings: Any, total_steps: int) -> float:
    """Return the rate of an optimizer step, counted from 0."""
    warmup = settings.num_warmup_steps
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shapes = {
        "constant_with_warmup": 1.0,
        "linear": 1 - share,
        "cosine": (1 + math.cos(math.pi * share)) / 2,
    }
    return settings.lr * shapes[settings.scheduler]


class AdamW:
    """AdamW with decoupled weight decay of matrices, after clipping the gradient's norm."""

    def __init__(self, settings: Any, total_steps: int) -> None:
        self.settings = settings
        self.total_steps = total_steps
        self.steps = 0  # of the schedule
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._counts: dict[str, int] = {}

    def step(
        self, weights: Mapping[str, torch.Tensor], gradient: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the weights after the step.

        Args:
            gradient: of the weights that have one; others stay as they are.
        """
        rate = learning_rate(self.steps, self.settings, self.total_steps)
        self.steps += 1
        scale = 1.0
        if self.settings.max_grad_norm:
            largest = self.settings.max_grad_norm
            scale = min(1.0, largest / (norm_of(gradient) + CLIP_EPSILON))
        return {
            name: self._moved(name, weight, gradient[name] * scale, rate)
            if name in gradient
            else weight
            for name, weight in weights.items()
        }

    def _moved(
        self, name: str, weight: torch.Tensor, gradient: torch.Tensor, rate: float
    ) -> torch.Tensor:
        beta1, beta2 = self.settings.adam_betas
        zeros = torch.zeros_like(weight)
        mean, square = self._moments.get(name, (zeros, zeros))
        count = self._counts.get(name, 0) + 1
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        self._moments[name] = mean, square
        self._counts[name] = count
        decay = self.settings.weight_decay if weight.dim() > 1 else 0.0
        denominator = (square / (1 - beta2**count)).sqrt() + ADAM_EPSILON
        step = mean / (1 - beta1**count) / denominator
        return weight * (1 - rate * decay) - rate * step


def critic_loss(
    values: torch.Tensor, old: Sequence[float], returns: Sequence[float], clip: float | None
) -> torch.Tensor:
    """Return the mean over trained tokens, each (M,)."""
    targets = _double(returns)
    before = _double(old)
    squares = (values - targets) ** 2
    if clip is not None:
        near = torch.minimum(torch.maximum(values, before - clip), before + clip)
        squares = torch.maximum(squares, (near - targets) ** 2)
    return squares.mean() / 2


def is_clipped(value: float, old: float, target: float, clip: float) -> bool:
    """Return whether the clipped value's error is the larger one."""
    near = max(old - clip, min(old + clip, value))
    return (near - target) ** 2 > (value - target) ** 2


def explained_variance(batch: Batch) -> float:
    """Return 1 - variance of what is left / variance of the returns, over trained tokens."""
    assert batch.values is not None
    places = trained_places(batch.rows, range(len(batch.rows)))
    returns = [batch.advantages.returns[row][token] for row, token in places]
    left = [
        target - batch.values[row][token]
        for target, (row, token) in zip(returns, places, strict=True)
    ]
    total = _variance(returns)
    return 1 - _variance(left) / total if total else 0.0


def _variance(values: Sequence[float]) -> float:
    middle = math.fsum(values) / len(values)
    return math.fsum((value - middle) ** 2 for value in values)
