"""From trajectories to the batch that a step trains on: rows, filters, rewards, advantages.

Design: docs/design/008-trainer.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from skyrl_fast.batch import StepBatch, batch_from_trajectories
from skyrl_fast.config import (
    AlgorithmConfig,
    Config,
    estimator_settings,
    estimator_spec,
    sums_rewards,
)
from skyrl_fast.ops.advantage.estimators import ADVANTAGE_ESTIMATORS
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.algorithm.advantages import compute_advantages
from skyrl_fast.train.algorithm.anchor_states import anchor_ids
from skyrl_fast.train.algorithm.dynamic_sampling import informative_groups
from skyrl_fast.train.algorithm.filters import filter_groups, filter_rollouts
from skyrl_fast.train.algorithm.kl_reward import kl_in_reward, next_kl_coef
from skyrl_fast.train.algorithm.reward_parts import with_reward_parts
from skyrl_fast.train.algorithm.sequence_scope import Sequences, sequences
from skyrl_fast.train.algorithm.training_rows import (
    SampledRows,
    training_rows,
    with_contexts,
    with_records,
)
from skyrl_fast.train.metrics import calls, rewards, rollouts
from skyrl_fast.train.model.critic import Critic
from skyrl_fast.train.model.policy import Policy, Reference


def build_rows(trajectories: Sequence[Trajectory], config: Config) -> SampledRows:
    steps = with_records(batch_from_trajectories(trajectories), trajectories)
    outcome = estimator_spec(config.trainer.algorithm).level == "outcome"
    rows = training_rows(
        steps,
        config.generator,
        form=config.trainer.rows,
        # Other estimators read the rewards of all steps, also of those that are merged.
        keep_rewards=not outcome,
        observations=config.trainer.algorithm.observation_loss_coef > 0,
        trajectories=trajectories,
    )
    return SampledRows(steps, None if rows is steps else rows)


def training_batch(
    trajectories: Sequence[Trajectory], config: Config, rows: SampledRows | None = None
) -> tuple[StepBatch, Sequences, dict[str, float]]:
    """Return the rows to train on, their sequences, and rollout, reward and filter metrics."""
    # Dynamic sampling has built them already, to judge the groups.
    rows = _with_anchors(rows or build_rows(trajectories, config), trajectories, config)
    weights = config.trainer.algorithm.gdpo_weights
    trained = with_reward_parts(rows.trained, trajectories, list(weights))
    if estimator_spec(config.trainer.algorithm).level == "context":
        trained = with_contexts(trained, trajectories)
    rewarded, units, changed = filter_rollouts(trained, config)
    trained, units, dropped = filter_groups(rewarded, units, config)
    trained, alone = _mark_alone(trained, config)
    trained = _weigh_summaries(trained, config.trainer.algorithm.summary_weight)
    report = _report(trajectories, rows, rewarded, config)
    return trained, units, report | changed | dropped | alone


def rollout_metrics(
    trajectories: Sequence[Trajectory], config: Config, rows: SampledRows | None = None
) -> dict[str, float]:
    """Return rollout and reward metrics of trajectories that are trained in parts."""
    rows = rows or _complete_rows(trajectories, config)
    rewarded, _, changed = filter_rollouts(rows.trained, config)
    return _report(trajectories, rows, rewarded, config) | changed


def _complete_rows(trajectories: Sequence[Trajectory], config: Config) -> SampledRows:
    """Return the rows of complete trajectories, which are those that are trained of one policy."""
    if not config.call_names:
        return build_rows(trajectories, config)
    # Each policy's or role's own steps are merged: a row of all of them is trained by none.
    return SampledRows(with_records(batch_from_trajectories(trajectories), trajectories), None)


def _mark_alone(batch: StepBatch, config: Config) -> tuple[StepBatch, dict[str, float]]:
    """Return the batch with `is_alone`, and the number of groups that have no baseline."""
    # With one sample per prompt, groups of one are what was asked for, with a warning.
    is_compared = estimator_spec(config.trainer.algorithm).compares_group
    if not is_compared or config.generator.n_samples_per_prompt == 1:
        return batch, {}
    assert batch.is_placeholder is not None
    acted = batch.is_last_step & ~batch.is_placeholder
    alone = torch.bincount(batch.group_ids[acted], minlength=batch.num_groups) == 1
    metrics = {"reward/num_groups_without_baseline": float(alone.sum())}
    return batch.with_(is_alone=alone[batch.group_ids.long()]), metrics


def _weigh_summaries(batch: StepBatch, weight: float) -> StepBatch:
    if weight == 1 or batch.is_summary is None:
        return batch
    weights = torch.ones(batch.is_summary.shape)
    return batch.with_(token_weights=weights.masked_fill(batch.is_summary != 0, weight))


def _with_anchors(
    rows: SampledRows, trajectories: Sequence[Trajectory], config: Config
) -> SampledRows:
    if not estimator_spec(config.trainer.algorithm).needs_anchors:
        return rows
    assert rows.merged is None  # such estimators look at each step
    return replace(rows, steps=rows.steps.with_(anchor_ids=anchor_ids(trajectories)))


def _report(
    trajectories: Sequence[Trajectory], rows: SampledRows, rewarded: StepBatch, config: Config
) -> dict[str, float]:
    """Return metrics of what was sampled, and of the rewards that the rollout filters left."""
    generator = config.generator
    algorithm = config.trainer.algorithm
    spec = estimator_spec(algorithm)
    samples = generator.n_samples_per_prompt
    sums = sums_rewards(config)
    is_own = spec.name not in ADVANTAGE_ESTIMATORS  # which may do anything
    return {
        **rollouts.trajectory_metrics(trajectories, rows.steps, sums_rewards=sums),
        **rollouts.truncation_metrics(trajectories, generator.sampling_params.max_generate_length),
        **rollouts.prefix_cache_metrics(trajectories),
        **calls.call_metrics(
            trajectories, always=generator.context == "compact", sums_rewards=sums
        ),
        **rollouts.batch_metrics(
            rows.trained,
            num_rows_before_merge=None if rows.merged is None else rows.steps.num_rows,
        ),
        **rewards.reward_metrics(rewarded, samples_per_prompt=samples, sums_rewards=sums),
        **rewards.reward_spread(
            rewarded,
            tolerance=algorithm.zero_variance_filter_tol,
            compares_group=samples > 1 and (spec.compares_group or is_own),
            sums_rewards=sums,
        ),
    }


def judge_groups(
    trajectories: Sequence[Trajectory], config: Config
) -> tuple[SampledRows, set[str]]:
    """Return the rows, and the uids of the groups that dynamic sampling may keep."""
    algorithm = config.trainer.algorithm
    rows = _complete_rows(trajectories, config)
    # Judged by the rewards that these filters leave. The rows are returned as they are:
    # `training_batch` filters them, too, and reports what it changed.
    batch, units, _ = filter_rollouts(rows.trained, config)
    informative = informative_groups(units, tolerance=algorithm.zero_variance_filter_tol)
    return rows, {uid for uid, good in zip(batch.uids, informative.tolist(), strict=True) if good}


def with_advantages(
    batch: StepBatch,
    units: Sequences,
    algorithm: AlgorithmConfig,
    *,
    policy: Policy,
    reference: Reference | None,
    critic: Critic | None,
    kl_coef: float,
) -> tuple[StepBatch, dict[str, float], float]:
    """Return the batch with advantages, KL metrics, and the next step's `kl_coef`."""
    spec = estimator_spec(algorithm)
    metrics: dict[str, float] = {}
    if algorithm.use_kl_in_reward:
        assert reference is not None
        by_trajectory = algorithm.sequence_scope == "trajectory"
        batch, metrics = kl_in_reward(
            batch.with_(
                old_logprobs=policy.batch_logprobs(batch),
                ref_logprobs=reference.batch_logprobs(batch),
            ),
            # The penalty and its means are of trajectories, also where sequences are rows.
            units if by_trajectory else sequences(batch, "trajectory"),
            coef=kl_coef,
            estimator=algorithm.kl_estimator_type,
            outcome=spec.level == "outcome",
        )
        kl_coef = next_kl_coef(
            kl_coef, metrics["loss/avg_kl"], _num_samples(batch), algorithm.kl_ctrl
        )
    if spec.needs_values:
        assert critic is not None
        batch = batch.with_(values=critic.batch_values(batch))
    batch = compute_advantages(
        batch,
        estimator=algorithm.advantage_estimator,
        normalize=algorithm.advantage_batch_normalize,
        **estimator_settings(algorithm),
    )
    metrics |= calls.loss_share_of_summaries(batch)
    return batch, metrics, kl_coef


def _num_samples(batch: StepBatch) -> int:
    """Return the number of trajectories that have acted."""
    if batch.is_placeholder is None:
        return batch.num_trajectories
    return int((batch.is_last_step & ~batch.is_placeholder).sum())
