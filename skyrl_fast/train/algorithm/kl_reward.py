"""A KL penalty inside the reward, and the coefficient that weighs it. A response tokens."""

from __future__ import annotations

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.config import KlCtrlConfig
from skyrl_fast.config.corrections import MAX_KL_STEP
from skyrl_fast.ops.policy_loss.loss import kl_penalty
from skyrl_fast.train.algorithm.sequence_scope import sequences


def kl_in_reward(
    batch: StepBatch, *, coef: float, estimator: str, outcome: bool
) -> tuple[StepBatch, dict[str, float]]:
    """Return the batch with `coef * KL(policy, reference)` taken from the reward of each token.

    Estimators of the outcome read a trajectory's last row alone. For them the penalty of the
    earlier rows is taken from that row too, on its last token: the score is then the outcome less
    the penalty of all the trajectory's tokens. Others read every row, and get each row's own.

    Args:
        batch: with old_logprobs and ref_logprobs.
        coef: weight; SkyRL's kl_loss_coef.
        estimator: "k1", "abs", "k2" or "k3", of trained tokens; others have penalty 0.
        outcome: the advantages will be those of an estimator of the outcome.

    Returns:
        The batch, and metrics: `loss/avg_kl`, the mean over trajectories (with a trained token) of
        their mean per token; `loss/avg_kl_max`, of their largest |KL|; `loss/kl_loss_coef`.

    Raises:
        ValueError: log-probabilities are missing.
    """
    if batch.old_logprobs is None or batch.ref_logprobs is None:
        missing = "old_logprobs" if batch.old_logprobs is None else "ref_logprobs"
        raise ValueError(f"kl_in_reward: batch must have {missing}, got None")
    kl = kl_penalty(
        batch.old_logprobs, batch.ref_logprobs, estimator=estimator, loss_mask=batch.loss_mask
    )
    num_rows, offsets = batch.num_real_rows, batch.cu_responses.numpy()
    units = sequences(batch, "trajectory")
    of_row = segment_sums(kl.numpy(), offsets, np.float64)[:num_rows]
    of_trajectory = np.bincount(units.of_row, weights=of_row, minlength=len(units.last_rows))
    penalty = coef * of_row
    rewards = batch.rewards - coef * kl
    if outcome:
        own = penalty[units.last_rows]
        earlier = coef * of_trajectory - own
        penalty[units.last_rows] += earlier
        ends = offsets[units.last_rows + 1]
        filled = ends > offsets[units.last_rows]  # an empty response has no token to carry it
        at = torch.from_numpy(ends[filled].astype(np.int64) - 1)
        rewards[at] -= torch.from_numpy(earlier[filled]).to(rewards.dtype)
    row_rewards = batch.row_rewards.clone()
    row_rewards[:num_rows] -= torch.from_numpy(penalty).to(row_rewards.dtype)
    metrics = _kl_metrics(batch, kl.numpy(), of_trajectory, units.of_row, units.live)
    metrics["loss/kl_loss_coef"] = coef
    return batch.with_(rewards=rewards, row_rewards=row_rewards), metrics


def _kl_metrics(
    batch: StepBatch,
    kl: np.ndarray,
    of_trajectory: np.ndarray,
    trajectory_of_row: np.ndarray,
    live: np.ndarray,
) -> dict[str, float]:
    if not live.any():
        return {"loss/avg_kl": 0.0, "loss/avg_kl_max": 0.0}
    lengths = batch.response_lengths[: batch.num_real_rows].numpy()
    of_token = np.repeat(trajectory_of_row, lengths)
    trained = np.bincount(of_token, weights=batch.loss_mask.numpy(), minlength=len(live))
    largest = np.zeros(len(live))
    np.maximum.at(largest, of_token, np.abs(kl))
    return {
        "loss/avg_kl": float(np.mean(of_trajectory[live] / trained[live])),
        "loss/avg_kl_max": float(np.mean(largest[live])),
    }


def next_kl_coef(coef: float, kl: float, num_trajectories: int, control: KlCtrlConfig) -> float:
    """Return the coefficient of the next step: "adaptive" moves it towards `kl_target`.

    Ziegler et al. 2019, arXiv:1909.08593, section 2.2: it changes by at most 20 % per `horizon`
    trajectories.

    Args:
        coef: of this step.
        kl: `loss/avg_kl` of this step.
        num_trajectories: of this step, whatever their number of rows.

    Example:
        >>> control = KlCtrlConfig(type="adaptive", kl_target=0.1, horizon=100)
        >>> next_kl_coef(0.5, 0.11, 100, control)
        0.55
    """
    if control.type == "fixed":
        return coef
    error = min(MAX_KL_STEP, max(-MAX_KL_STEP, kl / control.kl_target - 1))
    return coef * (1 + error * num_trajectories / control.horizon)
