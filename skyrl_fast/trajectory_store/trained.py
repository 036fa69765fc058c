"""The values each step was trained with: mask, advantages and the trainer's log-probabilities.

A response tokens of a batch's rows, R rows and S steps of one trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from skyrl_fast.rollout.token_ids import count_shared, ids_array
from skyrl_fast.rollout.trajectory import Step, Trajectory, step_numbers

if TYPE_CHECKING:  # runs are viewed and compared without torch
    import torch

    from skyrl_fast.batch import StepBatch


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Values per response token of one step.

    Args:
        loss_mask: uint8, after all filters: 1 = trained.
        advantages: float32, NaN where the token is not in the row.
        trainer_logprobs: float32, NaN where the trainer computed none.
    """

    loss_mask: np.ndarray
    advantages: np.ndarray
    trainer_logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """Rows that were trained together: all of a batch, or those of a policy.

    Args:
        batch: with advantages.
        trainer_logprobs: (A,) float32, NaN where there is none.
    """

    trajectories: Sequence[Trajectory]
    batch: StepBatch
    trainer_logprobs: torch.Tensor | None = None


def collect_steps_of_policies(
    trajectories: Sequence[Trajectory], parts: Sequence[TrainedRows]
) -> list[list[TrainedStep]]:
    """Return the values of each trajectory's steps, those of other policies untrained.

    Args:
        parts: of each policy, with trajectories of its steps alone.
    """
    found: dict[tuple[str, int], dict[int, TrainedStep]] = {}
    for part in parts:
        values = _values_by_number(part.trajectories, part.batch, part.trainer_logprobs)
        for trajectory, steps in zip(part.trajectories, values, strict=True):
            found.setdefault((trajectory.uid, trajectory.repetition_id), {}).update(steps)
    result: list[list[TrainedStep]] = []
    for t in trajectories:
        result.append(_complete(t, found.get((t.uid, t.repetition_id), {})))
    return result


def collect_trained_steps(
    trajectories: Sequence[Trajectory],
    batch: StepBatch,
    trainer_logprobs: torch.Tensor | None = None,
) -> list[list[TrainedStep]]:
    """Return the values of each trajectory's steps; none if a placeholder row replaced it.

    Rows may be single steps or merged steps, whose tokens name the step that sampled them. Batch
    and log-probabilities are as of `TrainedRows`.
    """
    values = _values_by_number(trajectories, batch, trainer_logprobs)
    result: list[list[TrainedStep]] = []
    for t, steps in zip(trajectories, values, strict=True):
        result.append(_complete(t, steps))
    return result


def _complete(trajectory: Trajectory, found: Mapping[int, TrainedStep]) -> list[TrainedStep]:
    if not trajectory.has_acted:
        return []
    completed = []
    for number, step in zip(step_numbers(trajectory.steps), trajectory.steps, strict=True):
        size = len(step.response_ids)
        completed.append(_pad(found.get(number), size))
    return completed


def _pad(values: TrainedStep | None, size: int) -> TrainedStep:
    """Return the values of all tokens of a response, of which the rows have the first ones."""
    nothing = np.full(size, np.nan, np.float32)
    if values is None:
        return TrainedStep(np.zeros(size, np.uint8), nothing, nothing)
    kept = len(values.loss_mask)
    if kept == size:
        return values
    missing = nothing[kept:]  # tokens that were dropped, as a later prompt has others there
    return TrainedStep(
        loss_mask=np.concatenate([values.loss_mask, np.zeros(size - kept, np.uint8)]),
        advantages=np.concatenate([values.advantages, missing]),
        trainer_logprobs=np.concatenate([values.trainer_logprobs, missing]),
    )


def _values_by_number(
    trajectories: Sequence[Trajectory],
    batch: StepBatch,
    trainer_logprobs: torch.Tensor | None,
) -> list[dict[int, TrainedStep]]:
    """Return for each trajectory the values of its steps that the rows have, by their number."""
    assert batch.advantages is not None
    if batch.num_trajectories != len(trajectories):
        raise ValueError(
            f"collect_trained_steps: batch must have the {len(trajectories)} trajectories given, "
            f"got {batch.num_trajectories}"
        )
    mask = batch.loss_mask.numpy()
    advantages = batch.advantages.numpy()
    if trainer_logprobs is None:
        logprobs = np.full(len(mask), np.nan, dtype=np.float32)
    else:
        logprobs = trainer_logprobs.numpy()
    recorded = batch.owners
    if recorded is None:
        owners = _find_owners(trajectories, batch)
    else:
        owners = recorded.numpy()
    cu_responses = batch.cu_responses.numpy()
    found: list[dict[int, TrainedStep]] = []
    for _ in trajectories:
        found.append({})
    # Tokens of a step are adjacent: where the owner or the row changes, another run begins.
    is_change = owners[1:] != owners[:-1]
    changes = np.flatnonzero(is_change) + 1
    bounds = np.unique(np.concatenate([cu_responses, changes]))
    begins = bounds[:-1]
    ends = bounds[1:]
    rows = np.searchsorted(cu_responses, begins, side="right") - 1
    numbers = batch.trajectory_ids.numpy()[rows]
    for begin, end, number in zip(begins.tolist(), ends.tolist(), numbers, strict=True):
        owner = int(owners[begin])
        if owner >= 0:
            at = slice(begin, end)
            values = TrainedStep(mask[at], advantages[at], logprobs[at])
            found[number][owner] = values
    return found


def _find_owners(trajectories: Sequence[Trajectory], batch: StepBatch) -> np.ndarray:
    """Return (A,) the number of the step that sampled each token, of rows that do not name it.

    A response begins where its prompt ends, and has the tokens that the next prompt in its row has.
    """
    owners = np.full(len(batch.loss_mask), -1, np.int32)
    all_tokens = batch.tokens.numpy()
    cu_seqlens = batch.cu_seqlens.tolist()
    cu_responses = batch.cu_responses.tolist()
    is_last = batch.is_last_step.numpy()
    is_first = np.append(True, is_last[:-1])
    first_rows = np.flatnonzero(is_first).tolist()
    for trajectory, row in zip(trajectories, first_rows, strict=True):
        steps = trajectory.steps if trajectory.has_acted else []
        following: list[Step | None] = [*steps, None][1:]
        numbers = step_numbers(steps)
        for number, step, after in zip(numbers, steps, following, strict=True):
            tokens = all_tokens[cu_seqlens[row] : cu_seqlens[row + 1]]
            prompt = ids_array(step.prompt_token_ids)
            response = ids_array(step.response_ids)
            context = np.concatenate([prompt, response])
            begin = len(prompt)
            size = len(response)
            is_followed = not is_last[row]
            ends_row = after is None or (is_followed and np.array_equal(tokens, context))
            if after is not None and not ends_row:
                shared = count_shared(ids_array(after.prompt_token_ids), context)
                size = max(0, min(size, shared - begin))
            at = cu_responses[row + 1] - len(tokens) + begin
            owners[at : at + size] = number
            row += ends_row
    return owners
