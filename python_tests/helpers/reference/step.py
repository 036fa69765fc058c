"""From the samples of a batch to what a policy is trained on (sections 5, 6, 9 and 10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from reference.advantages import (
    WITHOUT_GROUPS,
    compute_advantages,
    has_no_baseline,
    reads_all_rewards,
)
from reference.filters import (
    apply_rollout_filters,
    apply_zero_variance_filter,
    groups_of,
    is_informative,
)
from reference.kl_reward import KlReport, subtract_kl
from reference.losses import kl_penalties
from reference.metrics import (
    batch_metrics,
    call_metrics,
    mean,
    reward_metrics,
    rollout_metrics,
    summary_share,
)
from reference.rows import (
    Part,
    Row,
    Sample,
    build_rows,
    complete_parts,
    parts_of_policy,
    rows_of_turns,
)
from reference.update import Batch

PerToken = Callable[[Sequence[Row]], list[list[float]]]
TeacherOfRows = Callable[[Sequence[Row]], list[torch.Tensor | None]]


@dataclass(slots=True)
class Prepared:
    """A batch before its update, its metrics, and the KL in its rewards."""

    batch: Batch
    metrics: dict[str, float]
    kl: KlReport | None


def sums_rewards(config: Any) -> bool:
    """Return whether an outcome is the sum of a trajectory's rewards."""
    estimator = config.trainer.algorithm.advantage_estimator
    return reads_all_rewards(estimator) or config.trainer.rows == "trajectory"


def parts_of(samples: Sequence[Sample], config: Any, policy: str | None) -> list[Part]:
    roles = config.trainer.policy.roles
    if roles:
        return _parts_of_roles(samples, roles, sums_rewards=sums_rewards(config))
    if policy is None:
        return complete_parts(samples)
    return parts_of_policy(samples, policy, sums_rewards=sums_rewards(config))


def _parts_of_roles(
    samples: Sequence[Sample], roles: Sequence[str], *, sums_rewards: bool
) -> list[Part]:
    """Return what each role did, by prompt, then role; a prompt and a role are a group."""
    found = {role: parts_of_policy(samples, role, sums_rewards=sums_rewards) for role in roles}
    prompts = dict.fromkeys(sample.trajectory.uid for sample in samples)
    return [
        replace(part, uid=f"{uid}/{role}")
        for uid in prompts
        for role, parts in found.items()
        for part in parts
        if part.uid == uid
    ]


def prepare(
    parts: Sequence[Part],
    config: Any,
    *,
    old: PerToken,
    reference: PerToken | None,
    teacher: TeacherOfRows | None,
    values: PerToken | None,
    coefficient: float,
) -> Prepared:
    """Return the batch that is trained.

    Args:
        old, reference: log-probabilities of response tokens by the policy before the update, and
            by the reference model.
        teacher: log-probabilities by the teachers, None for a row without one.
        values: by the critic before the update.
        coefficient: of the KL in the reward.
    """
    algorithm = config.trainer.algorithm
    sums = sums_rewards(config)
    rows = build_rows(parts, config, sums_rewards=sums)
    samples = config.generator.n_samples_per_prompt
    compares = algorithm.advantage_estimator not in WITHOUT_GROUPS and samples > 1
    metrics = rollout_metrics(parts, config, sums_rewards=sums)
    metrics |= batch_metrics(rows, parts, config)
    metrics |= call_metrics(parts, config, sums_rewards=sums)
    metrics |= apply_rollout_filters(rows, config)
    metrics |= reward_metrics(rows, config, sums_rewards=sums, compares_groups=compares)
    metrics |= apply_zero_variance_filter(rows, config, sums_rewards=sums)
    if compares:
        alone = sum(has_no_baseline(group) for group in groups_of(rows))
        metrics["reward/num_groups_without_baseline"] = float(alone)
    before = old(rows)
    of_reference = None if reference is None else reference(rows)
    kl = None
    if algorithm.use_kl_in_reward:
        assert of_reference is not None
        penalties = [
            kl_penalties(
                torch.tensor(policy, dtype=torch.float64),
                torch.tensor(frozen, dtype=torch.float64),
                algorithm.kl_estimator_type,
            ).tolist()
            for policy, frozen in zip(before, of_reference, strict=True)
        ]
        kl = subtract_kl(
            rows, penalties, coefficient, algorithm, reads_all_rewards=sums_of_estimator(config)
        )
    of_critic = None if values is None else values(rows)
    advantages = compute_advantages(rows, config, of_critic)
    metrics |= summary_share(rows, advantages.values, algorithm.summary_weight)
    of_teacher = None if teacher is None else teacher(rows)
    batch = Batch(rows, advantages, before, of_reference, of_teacher, of_critic)
    return Prepared(batch, metrics, kl)


def part_metrics(parts: Sequence[Part], config: Any) -> dict[str, float]:
    """Return the metrics of what one role did, before it is trained with the others."""
    sums = sums_rewards(config)
    rows = build_rows(parts, config, sums_rewards=sums)
    metrics = rollout_metrics(parts, config, sums_rewards=sums)
    metrics |= apply_rollout_filters(rows, config)
    samples_per_prompt = config.generator.n_samples_per_prompt
    compares = config.trainer.algorithm.advantage_estimator not in WITHOUT_GROUPS
    return metrics | reward_metrics(
        rows, config, sums_rewards=sums, compares_groups=compares and samples_per_prompt > 1
    )


def complete_metrics(samples: Sequence[Sample], config: Any) -> dict[str, float]:
    """Return the metrics of complete trajectories, which several policies train in parts."""
    sums = sums_rewards(config)
    parts = complete_parts(samples)
    rows = rows_of_turns(parts)
    samples_per_prompt = config.generator.n_samples_per_prompt
    compares = config.trainer.algorithm.advantage_estimator not in WITHOUT_GROUPS
    metrics = rollout_metrics(parts, config, sums_rewards=sums)
    metrics |= apply_rollout_filters(rows, config)
    return metrics | reward_metrics(
        rows, config, sums_rewards=sums, compares_groups=compares and samples_per_prompt > 1
    )


def sampling_metrics(samples: Sequence[Sample], config: Any) -> dict[str, float]:
    """Return metrics of all that was sampled for a step, dropped groups included."""
    failed = [one.trajectory.failure is not None for one in samples]
    result = {"generate/failed_trajectories": float(sum(failed))}
    if config.trainer.algorithm.dynamic_sampling.type is None:
        return result
    sums = sums_rewards(config)
    scores = []
    for sample in samples:
        rewards = [step.reward for step in sample.trajectory.steps]
        if rewards and sample.trajectory.failure is None:
            scores.append(sum(rewards) if sums else rewards[-1])
    return result | {"dynamic_sampling/avg_raw_reward": mean(scores)}


def informative_uids(groups: Sequence[Sequence[Sample]], config: Any) -> list[str]:
    """Return the prompts that dynamic sampling finds informative."""
    sums = sums_rewards(config)
    found = []
    for group in groups:
        parts = complete_parts(group)
        if config.trainer.policy.model.lora.policies or config.trainer.policy.roles:
            rows = rows_of_turns(parts)
        else:
            rows = build_rows(parts, config, sums_rewards=sums)
        apply_rollout_filters(rows, config)
        if is_informative(rows, config, sums_rewards=sums):
            found.append(rows[0].uid)
    return found


def sums_of_estimator(config: Any) -> bool:
    return reads_all_rewards(config.trainer.algorithm.advantage_estimator)
