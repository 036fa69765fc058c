"""`StepBatch` from trajectories. N rows, one per step; J trajectories.

Design: docs/design/006-step-batch.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch.columns import (
    flat_experts,
    flat_kept_ids,
    flat_values,
    offsets,
    rewards_on_last_tokens,
)
from skyrl_fast.batch.row_index import dense_ids, first_appearances, first_return, trajectory_keys
from skyrl_fast.batch.step_batch import StepBatch
from skyrl_fast.ops import _ragged
from skyrl_fast.rollout.token_ids import TokenIds
from skyrl_fast.rollout.trajectory import Step, Trajectory

logger = logging.getLogger(__name__)
OP = "batch_from_trajectories"


def batch_from_trajectories(trajectories: Sequence[Trajectory]) -> StepBatch:
    """Return the rows of these trajectories, one per step, in order.

    A trajectory that failed or has no steps becomes one masked row with an empty response and
    reward 0, so that its group keeps its size. The last row has the trajectory's stop reason.

    Raises:
        ValueError: no trajectories; two with the same uid and repetition; groups that are not
            adjacent; log-probabilities in only some steps; a mask or log-probabilities of another
            length than the response; a token id that is negative or needs more than 31 bits; a
            loss mask other than 0 or 1; more routes of experts than tokens; kept tokens for only
            some response tokens of a step.
    """
    if not trajectories:
        raise ValueError(f"{OP}: trajectories: expected at least one, got none")
    group_ids = _group_ids(trajectories)
    steps = [t.steps_or_placeholder() for t in trajectories]
    num_steps = np.array([len(one) for one in steps], dtype=np.int64)
    rows = list(chain.from_iterable(steps))
    logprobs = logprobs_in_all_or_none(OP, rows)
    lists: dict[str, list[Any]] = {
        "prompt_token_ids": _contiguous([row.prompt_token_ids for row in rows]),
        "response_ids": [row.response_ids for row in rows],
        "loss_masks": [row.loss_mask for row in rows],
    }
    if logprobs is not None:
        lists["rollout_logprobs"] = logprobs
    fields = _ragged.read_fields(OP, lists)
    for name in fields.keys() - {"prompt_token_ids", "response_ids"}:
        _ragged.check_aligned(OP, fields["response_ids"], fields[name])
    response_lengths = fields["response_ids"].lengths
    lengths = fields["prompt_token_ids"].lengths + response_lengths
    cu_seqlens = offsets(lengths)
    cu_responses = offsets(response_lengths)
    starts = cu_responses[:-1].to(torch.int64)
    num_responses = int(cu_responses[-1])
    flat = flat_values(OP, fields, cu_seqlens, starts, num_responses)
    if not bool(flat["loss_masks"].any()):
        logger.warning("%s: all %d loss masks are 0: nothing will be trained", OP, len(rows))
    rewards = np.array([row.reward for row in rows], dtype=np.float32)
    versions = np.array([row.policy_version for row in rows], np.int32)
    row_rewards = torch.from_numpy(rewards)
    last_rows = np.cumsum(num_steps) - 1
    is_last_step = np.zeros(len(rows), dtype=bool)
    is_last_step[last_rows] = True
    numbers = np.arange(len(trajectories), dtype=np.int32)
    trajectory_ids = np.repeat(numbers, num_steps)
    groups = group_ids.astype(np.int32)
    row_groups = np.repeat(groups, num_steps)
    uids = []
    for first in first_appearances(group_ids).tolist():
        uids.append(str(trajectories[first].uid))
    routes = _routes(rows, lengths)
    experts, cu_experts = flat_experts(OP, routes)
    sets = [row.kept_ids for row in rows]
    num_kept, kept_ids, cu_kept = flat_kept_ids(OP, sets, cu_responses)
    return StepBatch(
        tokens=flat["tokens"],
        cu_seqlens=cu_seqlens,
        cu_responses=cu_responses,
        loss_mask=flat["loss_masks"],
        rewards=rewards_on_last_tokens(row_rewards, cu_responses),
        row_rewards=row_rewards,
        group_ids=torch.from_numpy(row_groups),
        trajectory_ids=torch.from_numpy(trajectory_ids),
        is_last_step=torch.from_numpy(is_last_step),
        policy_version=torch.from_numpy(versions),
        uids=tuple(uids),
        stop_reasons=tuple(stop_reasons_of(trajectories, steps)),
        rollout_logprobs=flat.get("rollout_logprobs"),
        expert_indices=experts,
        cu_experts=cu_experts,
        num_kept=num_kept,
        kept_ids=kept_ids,
        cu_kept=cu_kept,
        reward_per_row=True,
    )


def stop_reasons_of(
    trajectories: Sequence[Trajectory], steps: Sequence[Sequence[Step]]
) -> list[str]:
    """Return N stop reasons: each step's, but for the last step that of the trajectory."""
    reasons: list[str] = []
    for trajectory, turns in zip(trajectories, steps, strict=True):
        reasons += [step.stop_reason for step in turns[:-1]]
        reasons.append(trajectory.stop_reason)
    return reasons


def logprobs_in_all_or_none(op: str, rows: Sequence[Step]) -> list[list[float]] | None:
    """Return the rollout log-probabilities of N rows, or None if no response has any."""
    values = [row.rollout_logprobs for row in rows]
    missing = [row for row, value in enumerate(values) if value is None]
    given = []
    for row, value in zip(rows, values, strict=True):
        if row.response_ids:
            given.append(value is not None)
    has_none = not any(given)
    if has_none and (given or len(missing) == len(values)):
        return None
    if not all(given):
        raise ValueError(
            f"{op}: rollout_logprobs: expected them in every step or in none, got none in row "
            f"{missing[0]}"
        )
    return [[] if v is None else v for v in values]


def _contiguous(prompts: Sequence[Sequence[int]]) -> list[Sequence[int] | np.ndarray]:
    """Return the prompts, ids in parts as arrays."""
    # A prompt has a part for each turn before it, so that n turns have n^2 / 2. One that begins
    # with the parts of the prompt before it is copied from that prompt's array.
    result: list[Sequence[int] | np.ndarray] = []
    before: tuple[np.ndarray, ...] = ()
    for prompt in prompts:
        if isinstance(prompt, TokenIds):
            parts = prompt.parts
        else:
            parts = ()
        continues = bool(before) and len(parts) >= len(before) and all(map(is_, before, parts))
        if continues:
            added = parts[len(before) :]
            result.append(np.concatenate([result[-1], *added]))
        elif isinstance(prompt, TokenIds):
            result.append(prompt.array())
        else:
            result.append(prompt)
        before = parts
    return result


def _group_ids(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Return (J,) int64, the group of each trajectory by first appearance."""
    uids = [t.uid for t in trajectories]
    repetitions = np.array([t.repetition_id for t in trajectories], dtype=np.int64)
    keys = trajectory_keys(uids, repetitions)
    firsts = np.unique(keys, return_index=True)[1]
    if len(firsts) < len(keys):
        numbers = np.arange(len(keys))
        twice = int(np.setdiff1d(numbers, firsts)[0])
        again = (uids[twice], int(repetitions[twice]))
        raise ValueError(
            f"{OP}: trajectories: expected another uid or repetition_id for each, got {again!r} "
            f"again in trajectory {twice}"
        )
    group_ids = dense_ids(uids)
    returned = first_return(group_ids)
    if returned is not None:
        raise ValueError(
            f"{OP}: trajectories: expected those of a group next to each other, got uid "
            f"{uids[returned]!r} again in trajectory {returned}"
        )
    return group_ids


def _routes(rows: Sequence[Step], lengths: torch.Tensor) -> list[np.ndarray | None] | None:
    routes = [row.expert_indices for row in rows]
    if all(r is None for r in routes):
        return None
    limits = lengths.tolist()
    for row, captured in enumerate(routes):
        length = limits[row]
        if captured is not None and len(captured) > length:
            raise ValueError(
                f"{OP}: expert_indices: expected at most one entry per token ({length}) in row "
                f"{row}, got {len(captured)}"
            )
    return routes
