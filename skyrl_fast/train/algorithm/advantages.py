"""Advantages of a batch's response tokens. N rows, A response tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from skyrl_fast.config import Config, estimator_spec
from skyrl_fast.ops.advantage.estimators import (
    EstimatorInputs,
    EstimatorSpec,
    estimate,
    find_advantage_estimator,
)

if TYPE_CHECKING:
    from skyrl_fast.batch.step_batch import StepBatch

logger = logging.getLogger(__name__)

MIN_VARIANCE = 1e-8


def warn_without_baseline(config: Config) -> None:
    algorithm = config.trainer.algorithm
    samples = config.generator.n_samples_per_prompt
    if samples == 1 and estimator_spec(algorithm).compares_group:
        logger.warning(
            "generator.n_samples_per_prompt=1 leaves trainer.algorithm.advantage_estimator=%s "
            "without a baseline: the advantage is the reward itself. Sample 2 or more per prompt, "
            "or choose reinforce++ or gae",
            algorithm.advantage_estimator,
        )


def compute_advantages(
    batch: StepBatch, *, estimator: str = "grpo", normalize: bool = False, **settings: Any
) -> StepBatch:
    """Return the batch with advantages, and with the returns of an estimator that reads values.

    Args:
        batch: all rows of each group; with `anchor_ids`, `values`, `reward_parts` or
            `context_numbers` where the estimator needs them.
            Placeholders of trajectories that failed are no members of their group: the estimator
            does not see them. Rows that are alone have advantage 0 where it compares a group.
        estimator: a name of `ops.advantage.estimators.ADVANTAGE_ESTIMATORS`, a registered one, or
            `module:function`.
        normalize: centre and scale over the batch's trained tokens, see `normalize_advantages`;
            "gae" and "reinforce++" always do, and "gdpo" over trajectories.
        settings: keyword arguments of the estimator, such as `gamma`.

    Raises:
        ValueError: an unknown estimator, a missing column that it needs, or an error of its op.
        TypeError, RuntimeError: a user's estimator returned an unexpected result, or raised.
    """
    spec = find_advantage_estimator(estimator)
    if spec.needs_values and batch.values is None:
        raise ValueError(
            f"advantages: {spec.name} needs the batch's values, as it is temporal, got None"
        )
    if spec.needs_anchors and batch.anchor_ids is None:
        raise ValueError(f"advantages: {spec.name} needs the batch's anchor_ids, got None")
    if spec.needs_parts and batch.reward_parts is None:
        raise ValueError(f"advantages: {spec.name} needs the batch's reward_parts, got None")
    if spec.level == "context" and batch.context_numbers is None:
        raise ValueError(f"advantages: {spec.name} needs the batch's context_numbers, got None")
    rows = _rows_of_samples(batch)
    if rows.num_rows == 0:  # all failed, and no row has a token
        return batch.with_(advantages=torch.zeros_like(batch.rewards))
    units = None
    if spec.level == "turn":
        units = _Units.of_turns(rows)
    elif spec.level == "context":
        units = _Units.of_contexts(rows)
    output = estimate(spec, _inputs(rows if units is None else units.rows, spec), settings)
    per_token = output.advantages.detach().to(torch.float32)
    if units is not None:
        per_token = units.spread(per_token, rows)
    is_per_token = per_token.shape == rows.loss_mask.shape
    # Where each row has one token both shapes are equal: the level of the estimator decides.
    if not is_per_token or (spec.level != "token" and len(per_token) == rows.num_rows):
        per_token = spread_over_tokens(per_token, rows.response_lengths)
    is_alone = torch.zeros(per_token.shape, dtype=torch.bool)
    if batch.is_alone is not None and spec.compares_group:
        of_tokens = np.repeat(batch.is_alone.numpy(), batch.response_lengths.numpy())
        is_alone = torch.from_numpy(of_tokens)
    if normalize and not spec.always_normalized:
        # Without those of no baseline, which the mean would move from 0.
        per_token = normalize_advantages(per_token, batch.loss_mask * ~is_alone)
    per_token = per_token.masked_fill(is_alone, 0.0)
    if output.returns is None:
        return batch.with_(advantages=per_token)
    return batch.with_(advantages=per_token, returns=output.returns.detach().to(torch.float32))


def _rows_of_samples(batch: StepBatch) -> StepBatch:
    """Return the rows without placeholders, which have no tokens: values per token stay aligned."""
    if batch.is_placeholder is None or not bool(batch.is_placeholder.any()):
        return batch
    assert not bool(batch.response_lengths[batch.is_placeholder].any())
    return batch.rows(~batch.is_placeholder)


@dataclass(frozen=True, slots=True)
class _Units:
    """What an estimator compares, turns or contexts: a row of each, and the unit of all rows.

    Args:
        rows: one of each unit, with the sum of the unit's rewards.
        is_own: (N,) bool, whether a row is that of its unit.
        unit_of_row: (N,) ints.
    """

    rows: StepBatch
    is_own: np.ndarray
    unit_of_row: np.ndarray

    @classmethod
    def of_turns(cls, batch: StepBatch) -> _Units | None:
        """Return the turns of a batch; None: every row is one.

        A summary is no turn. It belongs to the turn after it, whose context it begins, or to the
        one before it where the trajectory ended; its reward is that turn's. Where a policy did
        nothing else in a trajectory, its summaries are its turns.
        """
        is_turn = ~batch.summary_rows.numpy()
        if is_turn.all():
            return None
        trajectory_ids = batch.trajectory_ids.numpy()
        has_turn = np.bincount(trajectory_ids, weights=is_turn) > 0
        is_turn = is_turn | ~has_turn[trajectory_ids]
        places = np.flatnonzero(is_turn)
        after = np.searchsorted(places, np.arange(batch.num_rows)).clip(max=len(places) - 1)
        is_of_another = trajectory_ids[places[after]] != trajectory_ids
        unit_of_row = np.where(is_of_another, after - 1, after)
        return cls._of_rows(batch, places, unit_of_row, unit_of_reward=unit_of_row)

    @classmethod
    def of_contexts(cls, batch: StepBatch) -> _Units:
        """Return the contexts of a batch; the row of one is that of its last call.

        Its rewards are those from its first call to the first one of the next context: where
        another one began and ended within it, as a sub-agent's, what came after is due to both.
        """
        assert batch.context_numbers is not None
        numbers = batch.context_numbers.numpy().astype(np.int64)
        # In the order of trajectories, then of contexts: of their first calls.
        keys = batch.trajectory_ids.numpy() * (numbers.max() + 1) + numbers
        contexts, unit_of_row = np.unique(keys, return_inverse=True)
        places = np.zeros(len(contexts), dtype=np.int64)
        np.maximum.at(places, unit_of_row, np.arange(batch.num_rows))
        latest = np.searchsorted(contexts, np.maximum.accumulate(keys))
        return cls._of_rows(batch, places, unit_of_row, unit_of_reward=latest)

    @classmethod
    def _of_rows(
        cls,
        batch: StepBatch,
        places: np.ndarray,
        unit_of_row: np.ndarray,
        *,
        unit_of_reward: np.ndarray,
    ) -> _Units:
        """Return the units whose rows are at these places, in the order of the trajectories."""
        own_ids = batch.trajectory_ids.numpy()[places]
        ends = np.append(own_ids[1:] != own_ids[:-1], True)
        rewards = np.bincount(unit_of_reward, weights=batch.row_rewards.numpy())
        rows = batch.rows(torch.from_numpy(places)).with_(
            is_last_step=torch.from_numpy(ends),
            row_rewards=torch.from_numpy(rewards.astype(np.float32)),
        )
        is_own = np.zeros(batch.num_rows, dtype=bool)
        is_own[places] = True
        return cls(rows, is_own, unit_of_row)

    def spread(self, values: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Return the values of units, or of their rows' tokens, for all rows."""
        if len(values) == self.rows.num_rows:
            return values[torch.from_numpy(self.unit_of_row)]
        # Other rows have that of the first token, where a unit's row has several.
        first = self.rows.cu_responses[:-1].numpy()[self.unit_of_row]
        lengths = batch.response_lengths.numpy()
        begins = np.repeat(batch.cu_responses[:-1].numpy(), lengths)
        within = (np.arange(len(begins)) - begins) * np.repeat(self.is_own, lengths)
        return values[torch.from_numpy(np.repeat(first, lengths) + within)]


def _inputs(batch: StepBatch, spec: EstimatorSpec) -> EstimatorInputs:
    if spec.level == "token":
        token_rewards = _token_rewards(batch)
    else:
        token_rewards = batch.rewards
    return EstimatorInputs(
        rewards=batch.row_rewards,
        token_rewards=token_rewards,
        group_ids=batch.group_ids,
        trajectory_ids=batch.trajectory_ids,
        is_last_step=batch.is_last_step,
        loss_mask=batch.loss_mask,
        cu_seqlens=batch.cu_responses,
        anchor_ids=batch.anchor_ids,
        values=batch.values,
        reward_parts=batch.reward_parts,
    )


def spread_over_tokens(row_values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return (A,) values of the tokens' rows, from (N,) values and (N,) numbers of tokens."""
    # NumPy: torch would wake its thread pool for a tiny array.
    return torch.from_numpy(np.repeat(row_values.numpy(), lengths.numpy()))


def _token_rewards(batch: StepBatch) -> torch.Tensor:
    """Return (A,) rewards; a row without tokens has its reward on the preceding token, if any."""
    # Summing along the trajectory would put it there anyway.
    tokenless = ((batch.response_lengths == 0) & (batch.row_rewards != 0)).nonzero()[:, 0].tolist()
    if not tokenless:
        return batch.rewards
    rewards = batch.rewards.clone()
    cu = batch.cu_responses
    lengths = batch.response_lengths
    for row in tokenless:
        owner = row
        while owner > 0 and lengths[owner] == 0 and not batch.is_last_step[owner - 1]:
            owner -= 1
        if lengths[owner]:
            rewards[int(cu[owner + 1]) - 1] += batch.row_rewards[row]
    return rewards


def normalize_advantages(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the advantages with mean 0 and (biased) variance 1 over the elements where mask is 1.

    Mean and variance are computed in float64. Elements outside the mask, which has the same shape,
    become 0.

    Example:
        >>> normalize_advantages(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([1, 1, 0]))
        tensor([-1.,  1.,  0.])
    """
    if advantages.shape != mask.shape:
        raise ValueError(
            f"normalize_advantages: mask: expected shape {tuple(advantages.shape)}, "
            f"got {tuple(mask.shape)}"
        )
    kept = mask != 0
    count = kept.sum().clamp(min=1)
    # Elements outside the mask may be NaN.
    values = advantages.double().where(kept, 0.0)
    centred = (values - values.sum() / count).where(kept, 0.0)
    variance = centred.square().sum() / count
    return (centred * variance.clamp(min=MIN_VARIANCE).rsqrt()).to(advantages.dtype)
