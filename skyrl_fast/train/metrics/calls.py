"""What the calls of trajectories were for, and how often their context was replaced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skyrl_fast.batch import StepBatch
from skyrl_fast.rollout.contexts import context_numbers
from skyrl_fast.rollout.trajectory import ACT, KINDS, Trajectory
from skyrl_fast.train.metrics.outcomes import mean

MANY_CONTEXTS = 3  # and more: one metric of their rewards


def call_metrics(
    trajectories: Sequence[Trajectory], *, always: bool = False, sums_rewards: bool = False
) -> dict[str, float]:
    """Return calls and tokens by kind, contexts, longest prompts, and rewards by contexts.

    Trajectories that failed or have no step are left out.

    Args:
        always: also if each trajectory has one context, in which every call acts.
        sums_rewards: as of `Trajectory.outcome`.
    """
    acted = [trajectory for trajectory in trajectories if trajectory.has_acted]
    contexts = np.array([max(context_numbers(t)) + 1 for t in acted], np.int64)
    kinds = np.array([step.kind for t in acted for step in t.steps])
    is_usual = (contexts == 1).all() and (kinds == ACT).all()
    if not acted or (is_usual and not always):
        return {}
    tokens = np.array([sum(step.loss_mask) for t in acted for step in t.steps], np.int64)
    peaks = np.array([max(len(step.prompt_token_ids) for step in t.steps) for t in acted])
    rewards = np.array([t.outcome(sums_rewards=sums_rewards) for t in acted])
    metrics: dict[str, float] = {}
    for kind in KINDS:
        is_kind = kinds == kind
        metrics[f"generate/calls/{kind}"] = float(is_kind.sum()) / len(acted)
        metrics[f"generate/calls/{kind}_token_share"] = float(tokens[is_kind].sum()) / max(
            1, int(tokens.sum())
        )
    metrics["generate/avg_num_contexts"] = mean(contexts)
    metrics["generate/max_num_contexts"] = float(contexts.max())
    metrics["generate/avg_peak_prompt_length"] = mean(peaks)
    metrics["generate/max_peak_prompt_length"] = float(peaks.max())
    for number in range(1, MANY_CONTEXTS + 1):
        if number < MANY_CONTEXTS:
            chosen = contexts == number
            name = f"reward/contexts_{number}"
        else:
            chosen = contexts >= number
            name = f"reward/contexts_{number}_or_more"
        if chosen.any():
            metrics[name] = mean(rewards[chosen])
    return metrics


def loss_share_of_summaries(batch: StepBatch) -> dict[str, float]:
    """Return the summaries' share of the policy loss: of the sum of |advantage * weight|."""
    if batch.is_summary is None or not bool(batch.is_summary.any()):
        return {}
    assert batch.advantages is not None
    sizes = batch.advantages.abs() * (batch.loss_mask != 0)
    if batch.token_weights is not None:
        sizes = sizes * batch.token_weights
    total = float(sizes.double().sum())
    of_summaries = float(sizes[batch.is_summary != 0].double().sum())
    return {"policy/summary_loss_share": of_summaries / total if total else 0.0}
