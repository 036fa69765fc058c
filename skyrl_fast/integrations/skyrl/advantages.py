"""SkyRL's outcome estimators and its step-wise block. N rows, J trajectories, R padded cells.

Group statistics are bit-identical to SkyRL's: the mean is rounded to float32 before it is
subtracted, as in torch. So they are computed here, for all groups of a size at once, and not by
`skyrl_fast.group_advantage`, which uses float64 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch.row_index import dense_ids
from skyrl_fast.integrations.skyrl.names import BY_NAME
from skyrl_fast.integrations.skyrl.replacement import (
    ORIGINALS,
    UnsupportedInputError,
    find,
    replaces,
    require,
)
from skyrl_fast.ops import _backend
from skyrl_fast.ops.pack.cell_rows import count_nonzeros, multiply_rows

METHOD = "RayPPOTrainer.compute_advantages_and_returns"
GRPO = "compute_grpo_outcome_advantage"
RLOO = "compute_rloo_outcome_advantage"
MAXRL = "compute_maxrl_advantage"
ESTIMATOR_FUNCTIONS = {"grpo": GRPO, "rloo": RLOO, "maxrl": MAXRL}
Pair = tuple[torch.Tensor, torch.Tensor]


@replaces(GRPO)
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str] | np.ndarray,
    epsilon: float = 1e-6,
    grpo_norm_by_std: bool = True,
    **kwargs: Any,
) -> Pair:
    """Return advantages and returns of GRPO, as SkyRL's function of that name: one tensor, twice.

    Args (of all estimators here):
        token_level_rewards, response_mask: (N, R).
        index: N, the group of each row.
        epsilon: added to the group's standard deviation.
        grpo_norm_by_std: whether to divide by it.
    """
    scores = _scores(token_level_rewards)
    row_values = _outcomes(GRPO, scores, index, epsilon, grpo_norm_by_std)
    return _broadcast(row_values, response_mask)


@replaces(RLOO)
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str] | np.ndarray,
    **kwargs: Any,
) -> Pair:
    """Return those of RLOO; groups of one, such as padding rows, get 0 and a warning."""
    row_values = _outcomes(RLOO, _scores(token_level_rewards), index)
    return _broadcast(row_values, response_mask)


@replaces(MAXRL)
def compute_maxrl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str] | np.ndarray,
    epsilon: float = 1e-6,
    **kwargs: Any,
) -> Pair:
    """Return those of MaxRL; `epsilon` is added to the group's mean."""
    row_values = _outcomes(MAXRL, _scores(token_level_rewards), index, epsilon)
    return _broadcast(row_values, response_mask)


def _scores(rewards: torch.Tensor) -> torch.Tensor:
    require(rewards.dtype == torch.float32 and rewards.device.type == "cpu", "unsupported rewards")
    require(rewards.ndim == 2 and len(rewards) > 0, "rewards of unsupported shape")
    return rewards.detach().sum(dim=-1)


def _outcomes(
    estimator: str,
    scores: torch.Tensor,
    index: Sequence[str] | np.ndarray,
    epsilon: float = 1e-6,
    norm_by_std: bool = True,
) -> torch.Tensor:
    if isinstance(index, np.ndarray):
        labels = index.tolist()
    else:
        labels = list(index)
    require(len(labels) == len(scores), "wrong number of groups' names")
    kinds = set(map(type, labels))
    require(kinds == {str} or kinds == {int}, "groups' names of unsupported type")
    groups = dense_ids(labels)
    sizes = np.bincount(groups)
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(sizes)
    if estimator == RLOO:
        _warn_of_groups_of_one(labels, sizes[groups])
    out = torch.empty_like(scores)
    for size in np.unique(sizes).tolist():
        chosen = np.flatnonzero(sizes == size)
        rows = torch.from_numpy(order[(ends[chosen] - size)[:, None] + np.arange(size)])
        out[rows] = _group_outcomes(estimator, scores[rows], epsilon, norm_by_std)
    return out


def _warn_of_groups_of_one(labels: Sequence[str] | Sequence[int], sizes: np.ndarray) -> None:
    """Warn as SkyRL does: for each row of a group of one, in order, by its logger."""
    alone = np.flatnonzero(sizes == 1).tolist()
    if alone:
        from loguru import logger

        for row in alone:
            logger.warning(
                f"Only one response for prompt index {labels[row]}, setting advantage to 0"
            )


def _group_outcomes(
    estimator: str, scores: torch.Tensor, epsilon: float, norm_by_std: bool
) -> torch.Tensor:
    size = scores.shape[1]
    if size == 1 and estimator == RLOO:
        return torch.zeros_like(scores)
    if size > 1:
        mean = scores.mean(dim=1, keepdim=True)
    else:
        mean = torch.zeros_like(scores)
    centred = scores - mean
    if estimator == RLOO:
        return centred * (size / (size - 1))
    if estimator == MAXRL:
        if size > 1:
            return centred / (mean + epsilon)
        return centred
    if not norm_by_std:
        return centred
    return centred / ((_std(scores, mean) if size > 1 else torch.ones_like(mean)) + epsilon)


def _std(scores: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return (G, 1): bit-identical to torch.std of each row, around the mean in float32."""
    squares = (scores.double() - mean.double()).square()
    total = squares[:, 0].clone()
    for column in squares.unbind(1)[1:]:
        total += column
    return (total / (scores.shape[1] - 1)).sqrt().to(scores.dtype)[:, None]


def _broadcast(row_values: torch.Tensor, response_mask: torch.Tensor) -> Pair:
    require(response_mask.device.type == "cpu" and response_mask.ndim == 2, "unsupported mask")
    dtype = torch.result_type(row_values, response_mask)
    require(dtype == torch.float32, "a mask of unsupported dtype")
    out = _backend.empty(response_mask.shape, torch.float32)
    torch.mul(row_values[:, None], response_mask, out=out)
    return out, out


# --- the step-wise block -----------------------------------------------------------------------


@replaces(METHOD)
@torch.no_grad()
def compute_advantages_and_returns(self: Any, data: Any) -> Any:
    """Return the batch with `advantages` and `returns`, as SkyRL's method of that name.

    For step-wise training with an outcome estimator; other training, and the user's own estimators,
    are passed to SkyRL. Both fields are one tensor, as in SkyRL without step-wise training.

    Args:
        data: SkyRL's TrainingInputBatch with rewards, response_mask, values and the metadata
            `uids`, `is_last_step`, `avg_response_length`, `pad_size`.
    """
    algorithm = self.cfg.trainer.algorithm
    require(self.cfg.generator.step_wise_trajectories is True, "training that is not step-wise")
    name = _builtin_estimator(algorithm.advantage_estimator)
    rewards = data["rewards"]
    mask = data["response_mask"]
    metadata = data.metadata
    require(rewards.dtype == torch.float32 and rewards.device.type == "cpu", "unsupported rewards")
    require(mask.dtype == torch.int64 and mask.shape == rewards.shape, "unsupported mask")
    flags = metadata["is_last_step"]
    require(
        len(flags) == len(rewards) and set(map(type, flags)) <= {bool}, "unsupported is_last_step"
    )
    require(flags[-1], "a last row that is no last step")
    last = torch.from_numpy(np.array(flags, dtype=bool))
    scores = _last_scores(rewards, last.nonzero()[:, 0])
    labels = list(compress(metadata["uids"], flags))
    outcomes = _outcomes(name, scores, labels, norm_by_std=algorithm.grpo_norm_by_std)
    row_values = outcomes[torch.cumsum(last, 0) - last.long()]
    advantages, counts = multiply_rows(row_values, mask.contiguous())
    data["returns"] = advantages
    data["advantages"] = advantages
    num_real = len(rewards) - metadata.get("pad_size", 0)
    final = scores[: int(last[:num_real].sum())].mean().item()
    sums = row_values[:num_real].double() * counts[:num_real]
    total = counts[:num_real].sum()
    data = data.to("cpu")
    _log(self, data, final, sums.sum() / total, sums.abs().sum() / total)
    return data


def _builtin_estimator(name: Any) -> str:
    """Return the name of SkyRL's function for an estimator; raise if a user replaced it."""
    require(str(name) in ESTIMATOR_FUNCTIONS, "an estimator of every step's reward, or a user's")
    target = ESTIMATOR_FUNCTIONS[str(name)]
    found = find(BY_NAME[target])
    if found is None:
        raise UnsupportedInputError("SkyRL is not installed")
    module = found[0]
    entry = module.compute_advantages_and_returns
    require(getattr(entry, "__module__", None) == module.__name__, "a replaced function")
    registered = module.AdvantageEstimatorRegistry.get(name)
    builtin = (globals()[target], ORIGINALS.function(target), found[1])
    require(any(registered is function for function in builtin), "a user's own estimator")
    return target


def _last_scores(rewards: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return (J,) sums of the rewards of these rows, bit-identical to torch's."""
    nonzeros, lasts, _ = count_nonzeros(rewards.detach().contiguous(), ends)
    if int(nonzeros.max()) <= 1:  # the sum is that number, in any order of summation
        return lasts
    return rewards[ends].sum(dim=-1)


def _log(
    trainer: Any, data: Any, rewards: float, advantages: torch.Tensor, magnitude: torch.Tensor
) -> None:
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
