"""SkyRL's outcome estimators and its step-wise block. N rows, J trajectories, R padded cells.

Group statistics are SkyRL's to the bit: the mean is rounded to float32 before anything is
subtracted from it, as torch does. So they are taken here, for all groups of a size at once, and
not by `skyrl_fast.group_advantage`, which keeps float64 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch.row_index import dense_ids
from skyrl_fast.integrations.skyrl.names import BY_NAME
from skyrl_fast.integrations.skyrl.stand_in import ORIGINALS, NotOursError, find, require, stand_in
from skyrl_fast.ops import _backend
from skyrl_fast.ops.pack.cell_rows import count_nonzeros, multiply_rows

METHOD = "RayPPOTrainer.compute_advantages_and_returns"
GRPO, RLOO, MAXRL = (
    "compute_grpo_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_maxrl_advantage",
)
OF_ESTIMATOR = {"grpo": GRPO, "rloo": RLOO, "maxrl": MAXRL}
Pair = tuple[torch.Tensor, torch.Tensor]


@stand_in(GRPO)
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str] | np.ndarray,
    epsilon: float = 1e-6,
    grpo_norm_by_std: bool = True,
    **kwargs: Any,
) -> Pair:
    """Return advantages and returns of GRPO, as SkyRL's function of that name: one tensor, twice.

    Args:
        token_level_rewards, response_mask: (N, R).
        index: N, the group of each row.
        epsilon: added to the group's standard deviation.
        grpo_norm_by_std: whether to divide by it.
    """
    scores = _scores(token_level_rewards)
    of_rows = _outcomes(GRPO, scores, index, epsilon, grpo_norm_by_std)
    return _broadcast(of_rows, response_mask)


@stand_in(RLOO)
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str] | np.ndarray,
    **kwargs: Any,
) -> Pair:
    """Return advantages and returns of RLOO, as SkyRL's function of that name: one tensor, twice.

    Args:
        token_level_rewards, response_mask: (N, R).
        index: N, the group of each row. Groups of one are left to SkyRL, which warns of each.
    """
    of_rows = _outcomes(RLOO, _scores(token_level_rewards), index)
    return _broadcast(of_rows, response_mask)


@stand_in(MAXRL)
def compute_maxrl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str] | np.ndarray,
    epsilon: float = 1e-6,
    **kwargs: Any,
) -> Pair:
    """Return advantages and returns of MaxRL, as SkyRL's function of that name: one tensor, twice.

    Args:
        token_level_rewards, response_mask: (N, R).
        index: N, the group of each row.
        epsilon: added to the group's mean.
    """
    of_rows = _outcomes(MAXRL, _scores(token_level_rewards), index, epsilon)
    return _broadcast(of_rows, response_mask)


def _scores(rewards: torch.Tensor) -> torch.Tensor:
    require(rewards.dtype == torch.float32 and rewards.device.type == "cpu", "other rewards")
    require(rewards.ndim == 2 and len(rewards) > 0, "rewards of another shape")
    return rewards.detach().sum(dim=-1)


def _outcomes(
    estimator: str,
    scores: torch.Tensor,
    index: Sequence[str] | np.ndarray,
    epsilon: float = 1e-6,
    norm_by_std: bool = True,
) -> torch.Tensor:
    """Return (J,) float32, each score against its group."""
    labels = index.tolist() if isinstance(index, np.ndarray) else list(index)
    require(len(labels) == len(scores), "another number of groups' names")
    kinds = set(map(type, labels))
    require(kinds == {str} or kinds == {int}, "groups' names of another type")
    groups = dense_ids(labels)
    sizes = np.bincount(groups)
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(sizes)
    out = torch.empty_like(scores)
    for size in np.unique(sizes).tolist():
        chosen = np.flatnonzero(sizes == size)
        rows = torch.from_numpy(order[(ends[chosen] - size)[:, None] + np.arange(size)])
        out[rows] = _of_groups(estimator, scores[rows], epsilon, norm_by_std)
    return out


def _of_groups(
    estimator: str, scores: torch.Tensor, epsilon: float, norm_by_std: bool
) -> torch.Tensor:
    """Return the outcomes of (G, n) scores, groups of one size."""
    size = scores.shape[1]
    if size == 1 and estimator == RLOO:
        raise NotOursError("groups of one, of which SkyRL warns")
    mean = scores.mean(dim=1, keepdim=True) if size > 1 else torch.zeros_like(scores)
    centred = scores - mean
    if estimator == RLOO:
        return centred * (size / (size - 1))
    if estimator == MAXRL:
        return centred / (mean + epsilon) if size > 1 else centred
    if not norm_by_std:
        return centred
    return centred / ((_std(scores, mean) if size > 1 else torch.ones_like(mean)) + epsilon)


def _std(scores: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return (G, 1): what torch.std gives for each row alone, around the mean in float32."""
    squares = (scores.double() - mean.double()).square()
    total = squares[:, 0].clone()
    for column in squares.unbind(1)[1:]:
        total += column
    return (total / (scores.shape[1] - 1)).sqrt().to(scores.dtype)[:, None]


def _broadcast(of_rows: torch.Tensor, response_mask: torch.Tensor) -> Pair:
    require(response_mask.device.type == "cpu" and response_mask.ndim == 2, "another mask")
    wide = torch.result_type(of_rows, response_mask)
    require(wide == torch.float32, "a mask of another dtype")
    out = _backend.empty(response_mask.shape, torch.float32)
    torch.mul(of_rows[:, None], response_mask, out=out)
    return out, out


# --- the step-wise block -----------------------------------------------------------------------


@stand_in(METHOD)
@torch.no_grad()
def compute_advantages_and_returns(self: Any, data: Any) -> Any:
    """Return the batch with `advantages` and `returns`, as SkyRL's trainer's method of that name.

    Step-wise training with an outcome estimator. The rest, and estimators that are the user's own,
    are SkyRL's. Both fields are one tensor, as they are in SkyRL without step-wise training.

    Args:
        self: SkyRL's RayPPOTrainer.
        data: SkyRL's TrainingInputBatch with rewards, response_mask, values and the metadata
            `uids`, `is_last_step`, `avg_response_length`, `pad_size`.
    """
    algorithm = self.cfg.trainer.algorithm
    require(self.cfg.generator.step_wise_trajectories is True, "training that is not step-wise")
    name = _builtin_estimator(algorithm.advantage_estimator)
    rewards, mask, metadata = data["rewards"], data["response_mask"], data.metadata
    require(rewards.dtype == torch.float32 and rewards.device.type == "cpu", "other rewards")
    require(mask.dtype == torch.int64 and mask.shape == rewards.shape, "another mask")
    flags = metadata["is_last_step"]
    require(len(flags) == len(rewards) and set(map(type, flags)) <= {bool}, "other is_last_step")
    require(flags[-1], "a last row that is no last step")
    last = torch.from_numpy(np.array(flags, dtype=bool))
    scores = _last_scores(rewards, last.nonzero()[:, 0])
    labels = list(compress(metadata["uids"], flags))
    outcomes = _outcomes(name, scores, labels, norm_by_std=algorithm.grpo_norm_by_std)
    of_rows = outcomes[torch.cumsum(last, 0) - last.long()]
    advantages, counts = multiply_rows(of_rows, mask.contiguous())
    data["returns"], data["advantages"] = advantages, advantages
    num_real = len(rewards) - metadata.get("pad_size", 0)
    final = scores[: int(last[:num_real].sum())].mean().item()
    sums = of_rows[:num_real].double() * counts[:num_real]
    total = counts[:num_real].sum()
    data = data.to("cpu")
    _log(self, data, final, sums.sum() / total, sums.abs().sum() / total)
    return data


def _builtin_estimator(name: Any) -> str:
    """Return the name of SkyRL's function for an estimator; refuse it where a user has another."""
    require(str(name) in OF_ESTIMATOR, "an estimator of rewards of every step, or a user's")
    target = OF_ESTIMATOR[str(name)]
    found = find(BY_NAME[target])
    if found is None:
        raise NotOursError("SkyRL is not there")
    module = found[0]
    entry = module.compute_advantages_and_returns
    require(getattr(entry, "__module__", None) == module.__name__, "a replaced function")
    registered = module.AdvantageEstimatorRegistry.get(name)
    ours = (globals()[target], ORIGINALS.function(target), found[1])
    require(any(registered is function for function in ours), "a user's own estimator")
    return target


def _last_scores(rewards: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return (J,) sums of the rewards of these rows, to the bit what torch gives."""
    nonzeros, lasts, _ = count_nonzeros(rewards.detach().contiguous(), ends)
    if int(nonzeros.max()) <= 1:  # that number, in whatever order it is summed
        return lasts
    return rewards[ends].sum(dim=-1)


def _log(
    trainer: Any, data: Any, rewards: float, advantages: torch.Tensor, magnitude: torch.Tensor
) -> None:
    """Write what SkyRL's method writes, under its names."""
    from loguru import logger

    length = data.metadata["avg_response_length"]
    raw = {"avg_advantages": advantages.item(), "avg_advantages_abs": magnitude.item()}
    data.metadata.setdefault("metrics", {}).update(
        {"avg_final_rewards": rewards, "avg_response_length": length, **raw}
    )
    logger.info(f"avg_final_rewards: {rewards}, avg_response_length: {length}")
    trainer.all_metrics.update(
        {
            "loss/avg_final_rewards": rewards,
            "loss/avg_raw_advantages": raw["avg_advantages"],
            "loss/avg_raw_advantages_abs": raw["avg_advantages_abs"],
        }
    )
