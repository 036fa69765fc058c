"""Which rows are trained: every step, steps joined where contexts grew, or full trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from skyrl_fast.batch import StepBatch, concatenate
from skyrl_fast.config import GeneratorConfig
from skyrl_fast.ops.merge.steps import MergePlan, merge_flat_steps


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of some trajectories, before any filter.

    Args:
        steps: a row per step.
        merged: the rows that are trained; None where these are the steps.
    """

    steps: StepBatch
    merged: StepBatch | None

    @property
    def trained(self) -> StepBatch:
        """The rows that are trained."""
        return self.steps if self.merged is None else self.merged


class GroupRows(NamedTuple):
    """Where the rows of a group are: `number` among the groups of `rows`."""

    rows: SampledRows
    number: int


def join_groups(groups: Mapping[str, GroupRows]) -> SampledRows:
    """Return the rows of these groups, in order, as if made from their trajectories together.

    Args:
        groups: uid -> where the group's rows are; several uids may name the same.
    """
    runs: list[tuple[SampledRows, range, list[str]]] = []  # groups that are neighbours already
    for uid, (rows, number) in groups.items():
        if runs and runs[-1][0] is rows and runs[-1][1].stop == number:
            rows, numbers, uids = runs.pop()
            runs.append((rows, range(numbers.start, number + 1), [*uids, uid]))
        else:
            runs.append((rows, range(number, number + 1), [uid]))
    steps = concatenate([_some_groups(rows.steps, at, uids) for rows, at, uids in runs])
    if any(rows.merged is None for rows, _, _ in runs):
        return SampledRows(steps, None)
    merged = concatenate([_some_groups(rows.trained, at, uids) for rows, at, uids in runs])
    if merged.num_rows == steps.num_rows:  # the steps that were joined are of other groups
        merged = merged.with_(reward_per_row=steps.reward_per_row)
    return SampledRows(steps, merged)


def _some_groups(batch: StepBatch, numbers: range, uids: Sequence[str]) -> StepBatch:
    """Return the rows of these groups under these uids."""
    ends = torch.tensor([numbers.start, numbers.stop], dtype=batch.group_ids.dtype)
    start, stop = torch.searchsorted(batch.group_ids, ends).tolist()
    return batch.rows(slice(start, stop)).with_(uids=tuple(uids))


def training_rows(
    steps: StepBatch,
    generator: GeneratorConfig,
    *,
    merge: bool | None = None,
    keep_rewards: bool = False,
) -> StepBatch:
    """Return the rows that are trained; `steps` itself where these are its rows.

    A merged row has its last step's reward, as a row per step has. A whole trajectory has every
    step's reward at the end of its response, so that its outcome is their sum; so has a merged row
    with `keep_rewards`, for estimators that read them all.

    Args:
        steps: a row per step.
        generator: what is wanted.
        merge: join steps; None: as `generator.merge_stepwise_output` says.
        keep_rewards: see above.

    Raises:
        ValueError: without `step_wise_trajectories`, a trajectory whose context did not only grow.
    """
    whole = not generator.step_wise_trajectories
    merge = generator.merge_stepwise_output if merge is None else merge
    if not (whole or merge):
        return steps
    drift, most = generator.merge_drift, generator.merge_max_drift_tokens
    rewards = "token" if whole or keep_rewards else None
    rows = steps.merged(drift=drift, max_drift_tokens=most, rewards=rewards)
    if whole and rows.num_rows > rows.num_trajectories:
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


def _not_one_row(steps: StepBatch, plan: MergePlan) -> str:
    trajectories, groups = steps.trajectory_ids.numpy(), steps.group_ids.numpy()
    goes_on = np.append(False, trajectories[1:] == trajectories[:-1])
    row = int(np.flatnonzero(goes_on & ~plan.joins)[0])
    first = int(np.flatnonzero(trajectories == trajectories[row])[0])
    sample = trajectories[row] - trajectories[groups == groups[row]][0]
    return (
        "generator.step_wise_trajectories: false trains one row per trajectory, which needs "
        f"contexts that only grow, but in sample {sample} of prompt "
        f"{steps.uids[groups[row]]!r} the prompt of turn {row - first + 1} does not begin with the "
        f"tokens before it (they agree on {plan.overlaps[row]}); set it to true (and "
        "generator.merge_stepwise_output to join what can be joined)"
    )
