"""From trajectories to the batch that a step trains on: rows, filters, rewards, advantages."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_fast.batch import StepBatch, batch_from_trajectories
from skyrl_fast.batch.token_counts import token_counts
from skyrl_fast.config import (
    AlgorithmConfig,
    Config,
    estimator_settings,
    estimator_spec,
    merges_steps,
)
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.algorithm.advantages import estimated
from skyrl_fast.train.algorithm.anchor_states import anchor_ids
from skyrl_fast.train.algorithm.dynamic_sampling import informative_groups
from skyrl_fast.train.algorithm.filters import filter_groups, filter_rollouts
from skyrl_fast.train.algorithm.kl_reward import kl_in_reward, next_kl_coef
from skyrl_fast.train.algorithm.sequence_scope import Sequences, sequences
from skyrl_fast.train.algorithm.training_rows import SampledRows, training_rows
from skyrl_fast.train.metrics.rollouts import (
    batch_metrics,
    prefix_cache_metrics,
    reward_metrics,
    reward_spread,
    trajectory_metrics,
    truncated_turn_share,
)
from skyrl_fast.train.model.critic import Critic
from skyrl_fast.train.model.policy import Policy


def sampled_rows(trajectories: Sequence[Trajectory], config: Config) -> SampledRows:
    """Return the rows of these trajectories: all steps, and the rows that are trained."""
    steps = batch_from_trajectories(trajectories)
    outcome = estimator_spec(config.trainer.algorithm).level == "outcome"
    rows = training_rows(
        steps,
        config.generator,
        merge=merges_steps(config),
        keep_rewards=not outcome,
        observations=config.trainer.algorithm.observation_loss_coef > 0,
    )
    return SampledRows(steps, None if rows is steps else rows)


def training_batch(
    trajectories: Sequence[Trajectory], config: Config, rows: SampledRows | None = None
) -> tuple[StepBatch, Sequences, dict[str, float]]:
    """Return the rows to train on, their sequences, and rollout, reward and filter metrics.

    Rollout metrics describe what was sampled; reward metrics what the rollout filters left.

    Args:
        rows: of the trajectories, if dynamic sampling has built them already.
    """
    samples = config.generator.n_samples_per_prompt
    algorithm = config.trainer.algorithm
    rows = rows or sampled_rows(trajectories, config)
    batch, before = rows.trained, None if rows.merged is None else rows.steps.num_real_rows
    if estimator_spec(algorithm).needs_anchors:
        batch = batch.with_(anchor_ids=anchor_ids(trajectories))
    metrics = trajectory_metrics(trajectories, rows.steps)
    longest = config.generator.sampling_params.max_generate_length
    metrics["generate/truncated_turn_share"] = truncated_turn_share(trajectories, longest)
    metrics |= prefix_cache_metrics(trajectories)
    metrics |= batch_metrics(batch, num_rows_before_merge=before)
    counts_of_forms = token_counts(batch)
    metrics["generate/batch_num_tokens_merged"] = float(counts_of_forms.merged)
    metrics["generate/batch_num_tokens_tree"] = float(counts_of_forms.tree)
    if batch.num_tokens:
        metrics["generate/batch_token_saving"] = 1 - counts_of_forms.tree / batch.num_tokens
    units = sequences(batch, algorithm.sequence_scope)
    batch, units, counts = filter_rollouts(batch, units, config)
    metrics |= counts | reward_metrics(batch, samples_per_prompt=samples)
    metrics |= reward_spread(batch, tolerance=algorithm.zero_variance_filter_tol)
    batch, units, counts = filter_groups(batch, units, config)
    return batch, units, metrics | counts


def judged_rows(trajectories: Sequence[Trajectory], config: Config) -> tuple[SampledRows, set[str]]:
    """Return the rows, and the uids of the groups that dynamic sampling may keep.

    Groups are judged after the rollout filters; the returned rows are unfiltered.
    """
    algorithm = config.trainer.algorithm
    rows = sampled_rows(trajectories, config)
    units = sequences(rows.trained, algorithm.sequence_scope)
    batch, units, _ = filter_rollouts(rows.trained, units, config)
    informative = informative_groups(units, tolerance=algorithm.zero_variance_filter_tol)
    return rows, {uid for uid, good in zip(batch.uids, informative.tolist(), strict=True) if good}


def with_advantages(
    batch: StepBatch,
    units: Sequences,
    algorithm: AlgorithmConfig,
    *,
    policy: Policy,
    reference: Policy | None,
    critic: Critic | None,
    kl_coef: float,
) -> tuple[StepBatch, dict[str, float], float]:
    """Return the batch with advantages, KL metrics, and the next step's `kl_coef`.

    Args:
        units: the batch's sequences, by `sequence_scope`.
        policy: computes `old_logprobs`; used only with `use_kl_in_reward`.
        reference: computes `ref_logprobs`; used only with `use_kl_in_reward`.
        critic: computes values for estimators that need them.
        kl_coef: weight of the KL in the reward in this step.
    """
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
            units if by_trajectory else sequences(batch, "trajectory"),
            coef=kl_coef,
            estimator=algorithm.kl_estimator_type,
            outcome=spec.level == "outcome",
        )
        kl_coef = next_kl_coef(
            kl_coef, metrics["loss/avg_kl"], batch.num_trajectories, algorithm.kl_ctrl
        )
    if spec.needs_values:
        assert critic is not None
        batch = batch.with_(values=critic.batch_values(batch))
    batch = estimated(
        batch,
        estimator=algorithm.advantage_estimator,
        normalize=algorithm.advantage_batch_normalize,
        **estimator_settings(algorithm),
    )
    return batch, metrics, kl_coef
