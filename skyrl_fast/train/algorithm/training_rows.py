"""Rows to train: one per step, merged steps, or one per trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from skyrl_fast.batch import StepBatch, concatenate
from skyrl_fast.config import GeneratorConfig
from skyrl_fast.ops.merge.steps import MergePlan, merge_flat_steps
from skyrl_fast.rollout.contexts import context_numbers
from skyrl_fast.rollout.trajectory import (
    SUMMARISE,
    Trajectory,
    recorded_steps,
    step_numbers,
)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of some trajectories, before any filter."""

    steps: StepBatch
    merged: StepBatch | None  # the rows that are trained; None: the steps are

    @property
    def trained(self) -> StepBatch:
        if self.merged is None:
            return self.steps
        return self.merged


def with_records(batch: StepBatch, trajectories: Sequence[Trajectory]) -> StepBatch:
    """Return the rows of the trajectories' steps with what is recorded of these.

    That is: which step sampled a token, which tokens are summaries, and which rows are
    placeholders.
    """
    numbers: list[int] = []
    summaries: list[bool] = []
    for trajectory in trajectories:
        steps = trajectory.steps_or_placeholder()
        numbers += step_numbers(steps)
        summaries += [step.kind == SUMMARISE for step in steps]
    of_rows = np.array(numbers, np.int32)
    lengths = batch.response_lengths.numpy()
    acted = np.array([trajectory.has_acted for trajectory in trajectories])
    return batch.with_(
        step_numbers=torch.from_numpy(of_rows),
        owners=torch.from_numpy(np.repeat(of_rows, lengths)),
        is_summary=torch.from_numpy(np.repeat(np.array(summaries, np.uint8), lengths)),
        is_placeholder=torch.from_numpy(~acted[batch.trajectory_ids.numpy()]),
    )


def with_contexts(batch: StepBatch, trajectories: Sequence[Trajectory]) -> StepBatch:
    """Return the rows with the number of their last step's context; 0 of placeholders.

    Args:
        batch: rows of steps or merged ones, with `step_numbers`.
        trajectories: those of the batch, in order.
    """
    contexts: list[dict[int, int]] = []
    for trajectory in trajectories:
        numbers = step_numbers(trajectory.steps)
        contexts.append(dict(zip(numbers, context_numbers(trajectory), strict=True)))
    assert batch.step_numbers is not None
    found = np.zeros(batch.num_rows, np.int32)
    places = zip(batch.trajectory_ids.tolist(), batch.step_numbers.tolist(), strict=True)
    for row, (trajectory_id, number) in enumerate(places):
        found[row] = contexts[trajectory_id].get(number, 0)
    return batch.with_(context_numbers=torch.from_numpy(found))


class GroupRows(NamedTuple):
    """The rows of a group: those of group `number` in `rows`."""

    rows: SampledRows
    number: int


def join_groups(groups: Mapping[str, GroupRows]) -> SampledRows:
    """Return the rows of these groups, in order, as if built from all trajectories at once."""
    runs: list[tuple[SampledRows, range, list[str]]] = []  # runs of adjacent groups
    # Several uids may refer to the same rows: copies of a group have names of their own.
    for uid, (rows, number) in groups.items():
        # Adjacent groups are one slice: fewer pieces to join.
        if runs and runs[-1][0] is rows and runs[-1][1].stop == number:
            rows, numbers, uids = runs.pop()
            runs.append((rows, range(numbers.start, number + 1), [*uids, uid]))
        else:
            runs.append((rows, range(number, number + 1), [uid]))
    steps = concatenate([_some_groups(rows.steps, at, uids) for rows, at, uids in runs])
    if any(rows.merged is None for rows, _, _ in runs):
        return SampledRows(steps, None)
    merged = concatenate([_some_groups(rows.trained, at, uids) for rows, at, uids in runs])
    if merged.num_rows == steps.num_rows:  # only steps of other groups were merged
        merged = merged.with_(reward_per_row=steps.reward_per_row)
    return SampledRows(steps, merged)


def _some_groups(batch: StepBatch, numbers: range, uids: Sequence[str]) -> StepBatch:
    ends = torch.tensor([numbers.start, numbers.stop], dtype=batch.group_ids.dtype)
    start, stop = torch.searchsorted(batch.group_ids, ends).tolist()
    return batch.rows(slice(start, stop)).with_(uids=tuple(uids))


def training_rows(
    steps: StepBatch,
    generator: GeneratorConfig,
    *,
    form: str = "step",
    keep_rewards: bool = False,
    observations: bool = False,
    trajectories: Sequence[Trajectory] = (),
) -> StepBatch:
    """Return the rows to train; `steps` itself if nothing is merged.

    A merged row has the reward of its last step. A row of a full trajectory has every step's reward
    at the end of that step's response, so that the outcome is their sum; so has a merged row with
    `keep_rewards`, for estimators that read all rewards.

    Args:
        form: "step", "merged" or "trajectory", as in `trainer.rows`.
        observations: give the tokens between the steps of a merged row cross-entropy weight 1.
        trajectories: of the rows; what their prompts have of other answers, such as another
            policy's, has cross-entropy weight 0.

    Raises:
        ValueError: `form` is "trajectory" and a context did not only grow.
    """
    if form == "step":
        return steps
    one_row = form == "trajectory"
    drift = generator.merge_drift
    most = generator.merge_max_drift_tokens
    rewards = "token" if one_row or keep_rewards else None
    if observations:
        of_steps = torch.ones(steps.loss_mask.shape[0])
        steps = steps.with_(cross_entropy_weights=of_steps)  # merging adds zeros between the steps
    rows = steps.merged(drift=drift, max_drift_tokens=most, rewards=rewards)
    if rows.cross_entropy_weights is not None:
        weights = 1 - rows.cross_entropy_weights
        rows = rows.with_(cross_entropy_weights=_without_answers(weights, rows, trajectories))
    if one_row and rows.num_rows > rows.num_trajectories:
        # Again, for the message alone: which turn did not begin with the tokens before it.
        plan = merge_flat_steps(
            steps.tokens,
            steps.cu_seqlens,
            steps.cu_responses,
            steps.trajectory_ids,
            loss_mask=steps.loss_mask,
            drift=drift,
            max_drift_tokens=most,
        )
        raise ValueError(_not_one_row(steps, plan))
    return rows


def _without_answers(
    weights: torch.Tensor, rows: StepBatch, trajectories: Sequence[Trajectory]
) -> torch.Tensor:
    """Return the (A,) weights with 0 on the tokens of any answer in a row's last prompt."""
    if not trajectories:
        return weights
    assert rows.step_numbers is not None
    values = weights.numpy()
    trajectory_ids = rows.trajectory_ids.tolist()
    numbers = rows.step_numbers.tolist()
    prompts = (rows.lengths - rows.response_lengths).tolist()
    begins = rows.cu_responses.tolist()
    steps = []
    for t in trajectories:
        steps.append({s.number: s for s in recorded_steps(t)} if t.has_acted else {})
    for row, (trajectory, number) in enumerate(zip(trajectory_ids, numbers, strict=True)):
        # The prompt of a row's last step is the row up to its response: it has all answers, also
        # those of other policies, and those whose end was written again in other tokens.
        last = steps[trajectory].get(number)
        for begin, end in (last and last.answers) or ():
            first = max(0, begin - prompts[row])
            values[begins[row] + first : begins[row] + max(first, end - prompts[row])] = 0.0
    return weights


def _not_one_row(steps: StepBatch, plan: MergePlan) -> str:
    trajectories = steps.trajectory_ids.numpy()
    groups = steps.group_ids.numpy()
    continues = np.append(False, trajectories[1:] == trajectories[:-1])
    row = int(np.flatnonzero(continues & ~plan.joins)[0])
    first = int(np.flatnonzero(trajectories == trajectories[row])[0])
    sample = trajectories[row] - trajectories[groups == groups[row]][0]
    return (
        "trainer.rows: expected step or merged, as trajectory trains one row per trajectory, which "
        f"needs contexts that only grow, but in sample {sample} of prompt "
        f"{steps.uids[groups[row]]!r} the prompt of turn {row - first + 1} does not begin with the "
        f"tokens before it (they agree on {plan.overlaps[row]})"
    )
