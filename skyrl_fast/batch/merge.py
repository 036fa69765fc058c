"""Joining the steps of a batch: N rows become M. S tokens, A response tokens, E captured routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from skyrl_fast.batch.columns import offsets, rewards_on_last_tokens
from skyrl_fast.ops import _backend
from skyrl_fast.ops.merge import MergePlan, copy_segments, merge_flat_steps

if TYPE_CHECKING:
    from skyrl_fast.batch.step_batch import StepBatch

OP = "StepBatch.merged"
PER_RESPONSE_TOKEN = ("loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs")


def merged_columns(
    batch: StepBatch, drift: str, max_drift_tokens: int, rewards: str | None
) -> dict[str, Any]:
    """Return the changed fields; arguments and errors as `StepBatch.merged`."""
    for name in ("advantages", "token_weights", "row_weights"):
        if getattr(batch, name) is not None:
            raise ValueError(f"{OP}: {name} must not be there yet: merge first, then compute them")
    if rewards not in (None, "token", "last"):
        raise ValueError(f"{OP}: rewards must be 'token', 'last' or None, got {rewards!r}")
    plan = merge_flat_steps(
        batch.tokens,
        batch.cu_seqlens,
        batch.cu_responses,
        batch.trajectory_ids,
        loss_mask=batch.loss_mask,
        drift=drift,
        max_drift_tokens=max_drift_tokens,
    )
    if not plan.joins.any():
        return {}
    ends = torch.from_numpy(plan.ends)
    columns: dict[str, Any] = {
        name: getattr(batch, name)[ends] for name in ("group_ids", "trajectory_ids", "is_last_step")
    }
    versions = np.minimum.reduceat(batch.policy_version.numpy(), plan.heads)
    columns["policy_version"] = torch.from_numpy(versions)
    if batch.stop_reasons is not None:
        columns["stop_reasons"] = tuple(batch.stop_reasons[end] for end in plan.ends.tolist())
    columns["cu_seqlens"] = cu_seqlens = offsets(batch.lengths[ends])
    columns["tokens"] = tokens = _backend.empty((int(cu_seqlens[-1]),), torch.int32)
    starts = batch.cu_seqlens.numpy()[plan.ends]
    lengths = batch.lengths.numpy()[plan.ends]
    copy_segments(OP, batch.tokens, starts, tokens, cu_seqlens[:-1].numpy(), lengths)
    columns["cu_responses"] = offsets(torch.from_numpy(plan.merged_response_lengths))
    for name in PER_RESPONSE_TOKEN:
        values = getattr(batch, name)
        if values is not None:
            columns[name] = _response_column(batch, plan, values, columns["cu_responses"])
    if (rewards or ("last" if batch.reward_per_row else "token")) == "last":
        columns["row_rewards"] = batch.row_rewards[ends]
        columns["rewards"] = rewards_on_last_tokens(columns["row_rewards"], columns["cu_responses"])
    else:
        columns |= _token_rewards(batch, plan, columns["cu_responses"])
        columns["reward_per_row"] = False
    return columns | _routes(batch, plan)


def _response_column(
    batch: StepBatch, plan: MergePlan, values: torch.Tensor, cu_responses: torch.Tensor
) -> torch.Tensor:
    """Return (A',) values of the tokens that stay, 0 on the others."""
    column = _backend.empty((int(cu_responses[-1]),), values.dtype).zero_()
    targets = cu_responses.numpy()[plan.merged_rows] + plan.starts
    copy_segments(OP, values, batch.cu_responses[:-1].numpy(), column, targets, plan.kept)
    return column


def _token_rewards(
    batch: StepBatch, plan: MergePlan, cu_responses: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return token rewards and their sums. No reward is lost with its token."""
    rewards = _response_column(batch, plan, batch.rewards, cu_responses)
    flat, cu, old = rewards.numpy(), cu_responses.numpy(), batch.cu_responses.numpy()
    merged_rows, kept = plan.merged_rows, plan.kept
    for row in np.flatnonzero(kept < plan.response_lengths).tolist():
        place = cu[merged_rows[row]] + plan.reward_places[row]
        flat[place] += batch.rewards.numpy()[old[row] + kept[row] : old[row + 1]].sum()
    if batch.reward_per_row:  # a step without response tokens still has a reward
        empty = np.flatnonzero((plan.response_lengths == 0) & (batch.row_rewards.numpy() != 0))
        for row in empty.tolist():
            begin, end = cu[merged_rows[row]], cu[merged_rows[row] + 1]
            place = begin + max(0, min(plan.starts[row] - 1, plan.reward_places[row]))
            if begin < end:
                flat[place] += float(batch.row_rewards[row])
    sums = np.add.reduceat(batch.row_rewards.numpy().astype(np.float64), plan.heads)
    return {"rewards": rewards, "row_rewards": torch.from_numpy(sums.astype(np.float32))}


def _routes(batch: StepBatch, plan: MergePlan) -> dict[str, torch.Tensor]:
    if batch.expert_indices is None or batch.cu_experts is None:
        return {}
    routes = batch.expert_indices
    begins, ends = plan.route_pieces(OP, batch.cu_experts.diff().numpy())
    cu_experts = offsets(torch.from_numpy(np.add.reduceat(ends - begins, plan.heads)))
    merged = _backend.empty((int(cu_experts[-1]), *routes.shape[1:]), routes.dtype)
    targets = np.concatenate([[0], np.cumsum(ends - begins)])[:-1]
    sources = batch.cu_experts[:-1].numpy() + begins
    copy_segments(OP, routes, sources, merged, targets, ends - begins)
    return {"expert_indices": merged, "cu_experts": cu_experts}
