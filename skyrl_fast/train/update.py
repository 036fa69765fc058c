"""Optimizer steps on one batch: mini-batches by prompts, micro-batches by tokens.

A response tokens, M trained tokens of a micro-batch.

Design: docs/design/008-trainer.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.config import (
    AlgorithmConfig,
    is_ratio_to_rollout,
    policy_loss_settings,
    policy_loss_spec,
)
from skyrl_fast.ops import _backend
from skyrl_fast.ops.policy_loss.loss import policy_loss, reduction_weights
from skyrl_fast.ops.policy_loss.losses import LossSpec
from skyrl_fast.ops.policy_loss.reduction import SequenceScope
from skyrl_fast.train.algorithm.distillation import sampled_kl, top_k_kl
from skyrl_fast.train.algorithm.off_policy import apply_off_policy_correction
from skyrl_fast.train.algorithm.sequence_scope import sequences
from skyrl_fast.train.metrics.aggregate import (
    CROSS_ENTROPY_TOKENS,
    Part,
    add_up_mini_batches,
    add_up_passes,
)
from skyrl_fast.train.model.micro_batch import (
    MicroBatch,
    response_positions,
)
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy, Reference
from skyrl_fast.train.output.metric_table import find_over
from skyrl_fast.train.parallel.per_rank import PerRank
from skyrl_fast.train.parallel.rank_shares import Share, share_passes
from skyrl_fast.train.parallel.ranks import run_on_all_ranks
from skyrl_fast.train.parallel.sharding import reduce_at_last

_NO_BUDGET = 1 << 62  # tokens
_TRAINED = "policy/trained_tokens"
_LOSS = "policy/loss"
_MISMATCH = "policy/rollout_train_logprobs_abs_diff"
_UPDATE_DIFFERENCE = "policy/rollout_update_logprobs_abs_diff"
_FORWARD_ONLY = ("expert_indices", "cu_experts", "num_kept", "kept_ids", "cu_kept")
# Columns that no loss reads.
_RECORDS = (
    "owners",
    "is_summary",
    "step_numbers",
    "context_numbers",
    "reward_parts",
    "is_placeholder",
    "is_alone",
)
_RECOMPUTED = {"loss", "num_tokens"}  # values of a micro-batch; recomputed for the mini-batch

_OF_REFERENCE = {"kl", "kl_loss"}  # 0 without a reference


def optimizer_steps_per_batch(
    train_batch_size: int, mini_batch_size: int, update_epochs: int
) -> int:
    # Counted in prompts: schedules need the number before the first batch, and rows differ from
    # batch to batch.
    return train_batch_size // mini_batch_size * update_epochs


def update_policy(
    policy: Policy,
    optimizer: Optimizer,
    batch: StepBatch,
    *,
    algorithm: AlgorithmConfig,
    mini_batch_size: int,
    update_epochs: int = 1,
    max_seq_len: int | None = None,
    reference: Reference | None = None,
    seen_logprobs: torch.Tensor | None = None,
) -> dict[str, float]:
    """Take `prompts / mini_batch_size * update_epochs` optimizer steps; return their metrics.

    Args:
        batch: rows with advantages, groups adjacent. Its `old_logprobs` are used if present.
        reference: frozen model of the KL term, if the algorithm has one.
        seen_logprobs: (A,) float32, output: the policy's log-probabilities of trained tokens, from
            before the update if they were computed, else from the first pass over the token.
            Nothing is computed for it alone: other elements keep their values.
    """
    correct = algorithm.off_policy_correction.enabled
    if algorithm.use_kl_loss:
        assert reference is not None
        batch = batch.with_(ref_logprobs=reference.batch_logprobs(batch))
    if algorithm.old_logprobs == "rollout":
        if batch.rollout_logprobs is None:
            raise ValueError(
                "trainer.algorithm.old_logprobs: rollout needs the engine's logprobs, got none"
            )
        batch = batch.with_(old_logprobs=batch.rollout_logprobs)
    is_missing = batch.old_logprobs is None and (correct or _reads_old_logprobs(batch, algorithm))
    # With one epoch and no correction the first mini-batch needs none: its ratio is 1 by
    # definition.
    for_all = correct or update_epochs > 1
    if is_missing and for_all:
        batch = batch.with_(old_logprobs=policy.batch_logprobs(batch))
    minis = [
        apply_off_policy_correction(mini, algorithm) for mini in batch.mini_batches(mini_batch_size)
    ]
    # By the policy as it is before the first optimizer step.
    if is_missing and not for_all and len(minis) > 1:
        minis[1:] = _with_old_logprobs(policy, batch, mini_batch_size)
    is_own_pass_old = _jumps_at_old(algorithm) and algorithm.old_logprobs != "rollout"
    steps: list[Part] = []
    corrections = []
    # Those of the first pass over each token; what was computed before the update is among them.
    first_logprobs = torch.full(batch.loss_mask.shape, torch.nan)
    num_before = 0  # response tokens whose first log-probabilities are from before any update
    for epoch in range(update_epochs):
        start = 0  # the mini-batch's first response token
        for mini, metrics in minis:
            seen = None
            if epoch == 0:
                # A view: the passes write into the tensor.
                seen = first_logprobs[start : start + mini.loss_mask.shape[0]]
                # With "rollout" they are the engine's: the first pass fills in the policy's.
                if algorithm.old_logprobs != "rollout":
                    seen = _take_old_logprobs(mini, seen)
                # Those of a later mini-batch's pass are from after the steps before it.
                if start == 0 or seen is None:
                    num_before = start + mini.loss_mask.shape[0]
            passed = mini
            if is_own_pass_old and not steps:  # before any step its own pass is the old policy's
                passed = mini.with_(old_logprobs=None)
            step = _optimizer_step(policy, optimizer, passed, algorithm, max_seq_len, seen)
            steps.append(Part(step, tokens=step[_TRAINED]))
            corrections.append(_correction_part(mini, metrics, algorithm))
            start += mini.loss_mask.shape[0]
    if seen_logprobs is not None:
        known = ~first_logprobs.isnan()
        seen_logprobs[known] = first_logprobs[known]
    return {
        **_mismatch_metrics(batch, first_logprobs, num_before),
        # Also of rows that need no forward pass; without a token there are no extremes.
        **add_up_mini_batches([part for part in corrections if part.tokens] or corrections),
        **add_up_mini_batches(steps),
        "policy/optimizer_steps": float(len(steps)),
    }


def _correction_part(
    mini: StepBatch, metrics: dict[str, float], algorithm: AlgorithmConfig
) -> Part:
    live = sequences(mini, algorithm.sequence_scope).live
    return Part(metrics, tokens=int((mini.loss_mask != 0).sum()), sequences=int(live.sum()))


def _mismatch_metrics(
    batch: StepBatch, first_logprobs: torch.Tensor, num_before: int
) -> dict[str, float]:
    """Return how far the trainer's log-probabilities are from the engine's before any update.

    Args:
        first_logprobs: (A,), NaN where none were computed.
        num_before: how many of them, from the first, are from before the update.
    """
    if batch.rollout_logprobs is None:
        return {}
    differences = (first_logprobs - batch.rollout_logprobs).abs()[:num_before]
    counts = (batch.loss_mask[:num_before] != 0) & ~first_logprobs[:num_before].isnan()
    if not counts.any():
        return {}
    counted = differences[counts]
    return {
        f"{_MISMATCH}_mean": float(counted.double().mean()),
        f"{_MISMATCH}_max": float(counted.max()),
    }


def _reads_old_logprobs(batch: StepBatch, algorithm: AlgorithmConfig) -> bool:
    spec = policy_loss_spec(algorithm)
    if isinstance(spec, LossSpec) and spec.ratio_to == "nothing":
        return False
    return batch.rollout_logprobs is None or not is_ratio_to_rollout(algorithm)


def _jumps_at_old(algorithm: AlgorithmConfig) -> bool:
    spec = policy_loss_spec(algorithm)
    return isinstance(spec, LossSpec) and spec.jumps_at_old


def _with_old_logprobs(
    policy: Policy, batch: StepBatch, mini_batch_size: int
) -> list[tuple[StepBatch, dict[str, float]]]:
    # The first mini-batch updates its old policy itself, so that its ratio is 1 without any.
    first = batch.mini_batches(mini_batch_size)[0].num_rows
    others = batch.rows(slice(first, None))
    others = others.with_(old_logprobs=policy.batch_logprobs(others))
    return [(mini, {}) for mini in others.mini_batches(mini_batch_size)]


def _take_old_logprobs(batch: StepBatch, seen_logprobs: torch.Tensor) -> torch.Tensor | None:
    """Copy the batch's `old_logprobs` of trained tokens; return the tensor if it has none."""
    if batch.old_logprobs is None:
        return seen_logprobs
    trained = batch.loss_mask != 0
    seen_logprobs[trained] = batch.old_logprobs[trained]
    return None


def contributing_rows(batch: StepBatch, algorithm: AlgorithmConfig) -> np.ndarray:
    """Return (N,) bool: rows whose gradient can differ from zero under this algorithm."""
    assert batch.advantages is not None
    spec = policy_loss_spec(algorithm)
    # Terms other than the policy loss have a gradient in every row.
    has_policy_loss = algorithm.policy_loss_coef > 0
    reads_all = has_policy_loss and not spec.zero_where_advantage_is_zero
    has_other_terms = (
        algorithm.use_kl_loss or algorithm.use_entropy_loss or algorithm.distillation.is_on
    )
    # A loss of scope "mini_batch" reads all rows, also for its metrics where its coefficient is 0.
    if has_other_terms or reads_all or spec.scope == "mini_batch":
        return np.ones(batch.num_rows, dtype=bool)
    live = (batch.advantages != 0) & (batch.loss_mask != 0) & has_policy_loss
    if batch.token_weights is not None:
        live &= batch.token_weights != 0
    if batch.cross_entropy_weights is not None:
        # Tokens of the environment: outside the loss mask, but with a gradient of their own.
        live |= batch.cross_entropy_weights != 0
    # Rows whose every token has gradient 0 need no forward pass; the reduction counts them all the
    # same.
    rows = segment_sums(live.numpy(), batch.cu_responses.numpy(), np.int64) > 0
    if not _keeps_trajectories(algorithm):
        return rows
    # The trajectory's other rows have no gradient, but its ratio depends on them.
    trajectories = batch.trajectory_ids.numpy()
    return np.bincount(trajectories, weights=rows)[trajectories] > 0


def _keeps_trajectories(algorithm: AlgorithmConfig) -> bool:
    by_trajectory = algorithm.sequence_scope == "trajectory"
    return by_trajectory and policy_loss_spec(algorithm).scope == "sequence"


def accumulate_gradient(
    policy: Policy,
    batch: StepBatch,
    *,
    algorithm: AlgorithmConfig,
    max_seq_len: int | None = None,
    seen_logprobs: torch.Tensor | None = None,
) -> dict[str, float]:
    """Add the mini-batch's gradient to the weights' `.grad`, whatever the split; return metrics.

    Without `old_logprobs` the policy's current ones are used: the ratio is 1.
    `seen_logprobs`, (A,) float32, receives those of the tokens that the forward pass visits.
    """
    contributing = contributing_rows(batch, algorithm)
    # Of the full mini-batch, before it is divided: so the sum over passes and ranks is its loss.
    weights = _MiniBatchWeights.of_batch(batch, algorithm, max_seq_len)
    shares = _plan_passes(policy, batch, contributing, algorithm)
    parts = shares.map(lambda share: _GradientPart(share, weights.of_share(share)))
    results = _gradient(policy, parts, algorithm)
    if seen_logprobs is not None:
        for result in results:
            seen_logprobs[result.positions] = result.logprobs
    metrics = {_TRAINED: float(sum(result.policy_tokens for result in results))}
    metrics |= add_up_passes([Part(r.metrics, tokens=r.policy_tokens) for r in results])
    metrics[_LOSS] = sum(result.loss for result in results)
    metrics["policy/num_micro_batches"] = float(len(results))
    metrics["policy/forward_tokens"] = float(sum(result.forward_tokens for result in results))
    rows = [result.rows for result in results]
    if rows:
        visited = torch.cat(rows)
    else:
        visited = torch.zeros(0, dtype=torch.int64)
    metrics["policy/row_tokens"] = float(batch.lengths[visited].sum())
    if results:
        reached = metrics["policy/forward_tokens"] / metrics["policy/row_tokens"]
        metrics["policy/token_saving"] = 1 - reached
        metrics["policy/tree_group_share"] = _tree_group_share(batch, results)
    if policy.layout_costs is not None:
        metrics |= policy.layout_costs.metrics()
    metrics["policy/rows_without_gradient"] = float((~contributing).sum())
    return metrics


def _tree_group_share(batch: StepBatch, results: Sequence[_MicroBatchResult]) -> float:
    trees = {int(g) for r in results if r.as_tree for g in batch.group_ids[r.rows].unique()}
    groups = {int(g) for r in results for g in batch.group_ids[r.rows].unique()}
    return len(trees) / len(groups)


@dataclass(frozen=True, slots=True)
class _MicroBatchResult:
    """What one micro-batch returns besides its gradient."""

    loss: float
    metrics: dict[str, float]  # over its trained tokens
    policy_tokens: int  # tokens of the policy loss
    forward_tokens: int  # tokens of the forward pass, padding included
    as_tree: bool
    rows: torch.Tensor  # of the mini-batch
    positions: torch.Tensor  # (M,) of the trained tokens in the mini-batch's responses
    logprobs: torch.Tensor  # (M,) float32, of the trained tokens


@dataclass(frozen=True, slots=True)
class _MiniBatchWeights:
    """Weights that depend on all rows of a mini-batch."""

    rows: torch.Tensor  # (N,) float32, of each row's tokens in policy loss, KL and entropy
    cross_entropy: float  # that of a token of weight 1

    @classmethod
    def of_batch(
        cls, batch: StepBatch, algorithm: AlgorithmConfig, max_seq_len: int | None
    ) -> _MiniBatchWeights:
        rows = torch.zeros(batch.num_rows)
        counted = torch.ones(batch.num_rows, dtype=torch.bool)
        if batch.is_placeholder is not None:
            counted = ~batch.is_placeholder  # what failed is no sample, and does not count
        if bool(counted.all()):
            samples = batch
        else:
            samples = batch.rows(counted)
        rows[counted] = reduction_weights(
            samples.loss_mask,
            reduction=algorithm.loss_reduction,
            cu_seqlens=samples.cu_responses,
            group_ids=samples.group_ids,
            trajectory_ids=samples.trajectory_ids,
            max_seq_len=max_seq_len,
        )
        # The cross-entropy is a token mean, whatever the reduction of the policy loss.
        given = batch.cross_entropy_weights
        if given is None:
            total = 0.0
        else:
            total = float(given.sum())
        return cls(rows, algorithm.observation_loss_coef / total if total else 0.0)

    def of_share(self, share: Share) -> _MiniBatchWeights:
        return _MiniBatchWeights(share.of_rows(self.rows), self.cross_entropy)

    def at(self, rows: torch.Tensor) -> _MiniBatchWeights:
        return _MiniBatchWeights(self.rows[rows], self.cross_entropy)

    def of_tokens(self, batch: StepBatch, index: torch.Tensor) -> torch.Tensor:
        """Return (M,) float32, the weights of these response tokens of the (N,) rows."""
        row_of_token = torch.bucketize(index, batch.cu_responses[1:].long(), right=True)
        return self.rows[row_of_token]


def _weights_of_policy_loss(
    rows: StepBatch, weights: _MiniBatchWeights, algorithm: AlgorithmConfig
) -> dict[str, Any]:
    """Return the weights of the policy loss, arguments of `policy_loss`."""
    tokens = rows.token_weights
    coef = algorithm.policy_loss_coef
    if coef != 1:
        if tokens is None:
            tokens = torch.full_like(rows.rewards, coef)
        else:
            tokens = coef * tokens
    return {"row_weights": weights.rows, "token_weights": tokens}


def _plan_passes(
    policy: Policy, batch: StepBatch, rows: np.ndarray, algorithm: AlgorithmConfig
) -> PerRank[Share]:
    """Return the passes of each rank that visit the (N,) bool rows."""
    # Losses of this scope read all tokens of a mini-batch at once, as for its covariance.
    undivided = policy_loss_spec(algorithm).scope == "mini_batch"
    unread = dict.fromkeys((*_RECORDS, "stop_reasons"))
    plan = partial(
        policy.plan,
        batch.with_(**unread),
        rows=rows,
        keep_trajectories=_keeps_trajectories(algorithm),
        # A pass has one layout: groups that have to share it cannot choose theirs.
        costs=None if undivided else policy.layout_costs,
    )
    budget = _NO_BUDGET if undivided else policy.max_tokens_per_microbatch
    if undivided and policy.rope_limits and len(plan(budget)) > 1:
        raise ValueError(
            f"policy loss {algorithm.policy_loss_type} needs all rows of a mini-batch in one pass, "
            "but the rotary embedding of this model depends on the longest row of a pass"
        )
    return share_passes(plan, budget, policy.ranks, divisible=not undivided)


@dataclass(frozen=True, slots=True)
class _GradientPart:
    """What a rank needs for its part of a mini-batch's gradient."""

    share: Share
    weights: _MiniBatchWeights  # of the share's rows


@run_on_all_ranks
def _gradient(
    policy: Policy, parts: PerRank[_GradientPart], algorithm: AlgorithmConfig
) -> list[_MicroBatchResult]:
    """Add the gradient of this rank's passes."""
    part = parts.here
    # Ranks that share a pass compute the same loss, random choices included.
    policy.ranks.sequence.share_random_state(policy.device)
    results = []
    for micro in reduce_at_last(policy.model, part.share.passes, policy.ranks):
        results.append(_micro_step(policy, part, micro, algorithm))
    return policy.ranks.gather([result for result in results if result is not None])


def _optimizer_step(
    policy: Policy,
    optimizer: Optimizer,
    batch: StepBatch,
    algorithm: AlgorithmConfig,
    max_seq_len: int | None,
    seen_logprobs: torch.Tensor | None,
) -> dict[str, float]:
    optimizer.zero_grad()
    metrics = accumulate_gradient(
        policy, batch, algorithm=algorithm, max_seq_len=max_seq_len, seen_logprobs=seen_logprobs
    )
    return metrics | optimizer.step()


def _micro_step(
    policy: Policy, part: _GradientPart, micro: MicroBatch, algorithm: AlgorithmConfig
) -> _MicroBatchResult | None:
    """Add a micro-batch's gradient; return None for an idle one, which only joins collectives."""
    batch = part.share.batch
    index = micro.response_index
    gathered = None
    if batch.teacher_ids is None:
        trained, entropy = policy.logprobs(micro, return_entropy=True)
        assert entropy is not None
    else:
        ids = batch.teacher_ids[response_positions(batch, micro)]
        trained, entropy, gathered = policy.logprobs_with_others(micro, ids)
    if trained.shape[0] == 0:
        # FSDP's collectives must run on every rank, or the others wait forever.
        trained.sum().backward()
        return None
    # The device is still computing: the host prepares the loss meanwhile. It reads nothing from the
    # device before the end, and copies from pinned memory, which waits for nothing.
    there = partial(_backend.to_device, device=trained.device)
    # The forward pass reads routes and kept tokens from `micro`; the loss needs neither.
    unread = dict.fromkeys(_FORWARD_ONLY)
    rows = batch.with_(**unread).rows(micro.rows)
    here = part.weights.at(micro.rows)
    terms = _weights_of_policy_loss(rows, here, algorithm)
    moved: dict[str, Any] = {
        name: None if value is None else there(value) for name, value in terms.items()
    }
    sampled = rows.loss_mask[index] != 0  # others have only cross-entropy
    cells = rows.to(trained.device)
    # Back to all response tokens of the rows, as the loss has offsets of these.
    logprobs = trained.new_zeros(rows.loss_mask.shape[0]).index_put((there(index),), trained)
    out = policy_loss(
        logprobs,
        cells.old_logprobs,
        cells.advantages,
        cells.loss_mask,
        **moved,
        # On the host, where their values can be read.
        cu_seqlens=rows.cu_responses,
        trajectory_ids=rows.trajectory_ids,
        scope=cast(SequenceScope, algorithm.sequence_scope),
        rollout_logprobs=cells.rollout_logprobs,
        loss=policy_loss_settings(algorithm),
        ref_logprobs=cells.ref_logprobs,
        kl_estimator=algorithm.kl_estimator_type if algorithm.use_kl_loss else None,
        kl_coef=algorithm.kl_loss_coef,
    )
    loss = out.loss
    if algorithm.use_entropy_loss:
        weight = there(here.of_tokens(rows, index) * sampled)
        loss = loss - algorithm.entropy_loss_coef * (entropy * weight).sum()
    distilled = None
    if rows.teacher_logprobs is not None:
        of_tokens = here.of_tokens(rows, index) * sampled
        distilled = _distillation_loss(trained, gathered, rows, index, of_tokens, algorithm)
        loss = loss + algorithm.distillation.coef * distilled
    observed = None
    if rows.cross_entropy_weights is not None:
        observed = _observation_loss(trained, rows.cross_entropy_weights[index], here.cross_entropy)
        loss = loss + observed.loss
    if not loss.requires_grad:
        raise ValueError(
            f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type}: expected losses "
            "with a gradient, computed from inputs.logprobs, got a tensor without one"
        )
    loss.backward()
    # The op reports zeros for a penalty that it was not given.
    if algorithm.use_kl_loss:
        left_out = _RECOMPUTED
    else:
        left_out = _RECOMPUTED | _OF_REFERENCE
    values = {}
    for k, v in out.metrics.items():
        if k not in left_out:
            values[f"policy/{k}"] = v
    if sampled.any():
        values |= _values_of_sampled(trained, entropy, rows, micro, sampled, algorithm)
    else:  # without a token there are neither means nor extremes
        values = {name: value for name, value in values.items() if find_over(name) == "sum"}
    if observed is not None:
        values |= observed.values
    if distilled is not None:
        values["policy/distillation_loss"] = distilled.detach()
    metrics = _backend.read_numbers({_LOSS: loss, **values})
    if observed is not None:
        metrics[CROSS_ENTROPY_TOKENS] = float(observed.num_tokens)
        metrics["policy/policy_tokens"] = float(sampled.sum())
    return _MicroBatchResult(
        loss=metrics.pop(_LOSS),
        metrics=metrics,
        policy_tokens=int(sampled.sum()),
        forward_tokens=micro.input_ids.numel(),
        as_tree=micro.tree is not None,
        rows=part.share.rows_of(micro),
        positions=part.share.positions_of(micro),
        logprobs=trained.detach().float().cpu(),
    )


def _values_of_sampled(
    trained: torch.Tensor,
    entropy: torch.Tensor,
    rows: StepBatch,
    micro: MicroBatch,
    sampled: torch.Tensor,
    algorithm: AlgorithmConfig,
) -> dict[str, torch.Tensor]:
    """Return metrics of the sampled tokens, as numbers on the device of the log-probabilities.

    Args:
        trained, entropy: (M,) of the trained tokens, on the device.
        sampled: (M,) bool, on the CPU like the rows.
    """
    places = _backend.to_device_of(sampled.nonzero()[:, 0], trained)
    logprobs = trained.detach()[places]
    values = {}
    is_supervised = algorithm.policy_loss_type == "cross_entropy"
    if is_supervised and rows.cross_entropy_weights is None:
        values["policy/cross_entropy"] = -logprobs.mean()
    values["policy/policy_entropy"] = entropy.detach()[places].mean()
    if rows.rollout_logprobs is not None:
        index = micro.response_index[sampled]
        rollout = _backend.to_device_of(rows.rollout_logprobs[index], logprobs)
        difference = (logprobs - rollout).abs()
        values[f"{_UPDATE_DIFFERENCE}_mean"] = difference.mean()
        values[f"{_UPDATE_DIFFERENCE}_max"] = difference.max()
    return values


def _distillation_loss(
    logprobs: torch.Tensor,
    gathered: torch.Tensor | None,
    rows: StepBatch,
    index: torch.Tensor,
    weights: torch.Tensor,
    algorithm: AlgorithmConfig,
) -> torch.Tensor:
    """Return the weighted KL between policy and teacher.

    Args:
        logprobs: (M,) the policy's, on its device.
        gathered: (M, K) the policy's, of the teacher's most likely tokens; None: there are none.
        rows: on the CPU, with the teachers' log-probabilities, NaN without a teacher.
        index: (M,) of the tokens in the rows' responses.
        weights: (M,) of the loss, on the CPU; 0 of tokens that were not sampled.
    """
    assert rows.teacher_logprobs is not None
    of_teacher = rows.teacher_logprobs[index]
    known = ~of_teacher.isnan()
    there = partial(_backend.to_device_of, like=logprobs)
    if gathered is None:
        terms = sampled_kl(logprobs, there(of_teacher.nan_to_num()))
    else:
        assert rows.teacher_top_logprobs is not None
        tops = there(rows.teacher_top_logprobs[index])
        terms = top_k_kl(gathered, tops, direction=algorithm.distillation.direction)
    return (there(weights * known) * terms).sum()


class _ObservationLoss(NamedTuple):
    """The cross-entropy on the environment's tokens, and its metrics."""

    loss: torch.Tensor
    values: dict[str, torch.Tensor]
    num_tokens: int


def _observation_loss(
    logprobs: torch.Tensor, weights: torch.Tensor, coefficient: float
) -> _ObservationLoss:
    """Return the weighted cross-entropy of (M,) tokens.

    It is no stream of the policy loss's op, which takes a token of policy weight 0 for one that is
    only supervised: what the off-policy correction drops still counts in the policy's means.

    Args:
        weights: (M,) on the CPU, 0 for tokens that are not the environment's.
        coefficient: weight of a token of weight 1.
    """
    observed = (weights != 0).nonzero()[:, 0]
    cross_entropy = -logprobs[_backend.to_device_of(observed, logprobs)]
    scaled = _backend.to_device_of(coefficient * weights[observed], logprobs)
    loss = (scaled * cross_entropy).sum()
    values = {"policy/cross_entropy_loss": loss.detach()}
    if len(observed):
        values["policy/cross_entropy"] = cross_entropy.detach().mean()
    return _ObservationLoss(loss, values, len(observed))
