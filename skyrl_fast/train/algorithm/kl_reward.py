"""The KL penalty in the reward, and its coefficient. N rows, J trajectories, A tokens."""

from __future__ import annotations

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.config import KlCtrlConfig
from skyrl_fast.config.corrections import MAX_KL_STEP
from skyrl_fast.ops.policy_loss.loss import kl_penalty
from skyrl_fast.train.algorithm.sequence_scope import Sequences


def kl_in_reward(
    batch: StepBatch, trajectories: Sequences, *, coef: float, estimator: str, outcome: bool
) -> tuple[StepBatch, dict[str, float]]:
    """Return the batch with `coef * KL(policy, reference)` subtracted from each token's reward.

    Args:
        trajectories: `sequences(batch, "trajectory")`.
        coef: weight; SkyRL's kl_loss_coef.
        estimator: "k1", "abs", "k2" or "k3", of trained tokens; others have penalty 0.
        outcome: an outcome estimator will compute the advantages.

    Returns:
        The batch, and metrics: `loss/avg_kl`, the mean over trajectories (with a trained token) of
        their mean per token; `loss/avg_kl_max`, the largest of these; `loss/kl_loss_coef`.

    Raises:
        ValueError: log-probabilities are missing.
    """
    # Outcome estimators read only the last row of a trajectory. For them the penalty of the earlier
    # rows is subtracted there too, on the last token: the score is then the outcome minus the
    # penalty of all tokens of the trajectory. Other estimators read every row with its penalty.
    if batch.old_logprobs is None or batch.ref_logprobs is None:
        if batch.old_logprobs is None:
            missing = "old_logprobs"
        else:
            missing = "ref_logprobs"
        raise ValueError(f"kl_in_reward: batch must have {missing}, got None")
    # Log-probabilities of the policy before the update: a part of the reward has no gradient.
    kl = kl_penalty(
        batch.old_logprobs, batch.ref_logprobs, estimator=estimator, loss_mask=batch.loss_mask
    )
    offsets = batch.cu_responses.numpy()
    row_kl = segment_sums(kl.numpy(), offsets, np.float64)
    last_rows = trajectories.last_rows
    sequence_ids = trajectories.sequence_ids
    trajectory_kl = np.bincount(sequence_ids, weights=row_kl, minlength=len(last_rows))
    penalty = coef * row_kl
    rewards = batch.rewards - coef * kl
    if outcome:
        earlier = coef * trajectory_kl - penalty[last_rows]
        penalty[last_rows] += earlier
        ends = offsets[last_rows + 1]
        filled = ends > offsets[last_rows]  # an empty response has no token for it
        at = torch.from_numpy(ends[filled].astype(np.int64) - 1)
        rewards[at] -= torch.from_numpy(earlier[filled]).to(rewards.dtype)
    row_rewards = batch.row_rewards - torch.from_numpy(penalty).to(batch.row_rewards.dtype)
    metrics = _kl_metrics(batch, trajectory_kl, trajectories)
    metrics["loss/kl_loss_coef"] = coef
    return batch.with_(rewards=rewards, row_rewards=row_rewards), metrics


def _kl_metrics(
    batch: StepBatch, trajectory_kl: np.ndarray, trajectories: Sequences
) -> dict[str, float]:
    live = trajectories.live
    if not live.any():
        return {"loss/avg_kl": 0.0, "loss/avg_kl_max": 0.0}
    lengths = batch.response_lengths.numpy()
    token_trajectories = np.repeat(trajectories.sequence_ids, lengths)
    trained = np.bincount(token_trajectories, weights=batch.loss_mask.numpy(), minlength=len(live))
    means = trajectory_kl[live] / trained[live]
    return {"loss/avg_kl": float(means.mean()), "loss/avg_kl_max": float(means.max())}


def next_kl_coef(coef: float, kl: float, num_trajectories: int, control: KlCtrlConfig) -> float:
    """Return the next step's coefficient; "adaptive" steers `kl`, `loss/avg_kl`, to `kl_target`.

    Example:
        >>> control = KlCtrlConfig(type="adaptive", kl_target=0.1, horizon=100)
        >>> next_kl_coef(0.5, 0.11, 100, control)
        0.55
    """
    # Ziegler et al. 2019, arXiv:1909.08593, section 2.2: it changes by at most 20 % per `horizon`
    # trajectories.
    # The mean of trajectories, not of rows: a trajectory of many turns counts once.
    if control.type == "fixed":
        return coef
    # One batch far from the target must not move the coefficient far.
    error = min(MAX_KL_STEP, max(-MAX_KL_STEP, kl / control.kl_target - 1))
    return coef * (1 + error * num_trajectories / control.horizon)
