"""The values each step was trained with: mask, advantages and the trainer's log-probabilities.

A response tokens of a batch's rows, R rows and S steps of one trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.rollout.trajectory import Step, Trajectory


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
    found: dict[tuple[str, int, str | None], Iterator[TrainedStep]] = {}
    for part in parts:
        values = collect_trained_steps(part.trajectories, part.batch, part.trainer_logprobs)
        for trajectory, steps in zip(part.trajectories, values, strict=True):
            if steps:
                name = trajectory.steps[0].policy
                found[trajectory.uid, trajectory.repetition_id, name] = iter(steps)
    none: Iterator[TrainedStep] = iter(())
    return [
        [
            next(found.get((t.uid, t.repetition_id, step.policy), none), None)
            or _make_untrained(step)
            for step in t.steps
        ]
        if t.failure is None
        else []
        for t in trajectories
    ]


def _make_untrained(step: Step) -> TrainedStep:
    size = len(step.response_ids)
    nothing = np.full(size, np.nan, np.float32)
    return TrainedStep(np.zeros(size, np.uint8), nothing, nothing)


def collect_trained_steps(
    trajectories: Sequence[Trajectory],
    batch: StepBatch,
    trainer_logprobs: torch.Tensor | None = None,
) -> list[list[TrainedStep]]:
    """Return the values of each trajectory's steps; none if a placeholder row replaced it.

    Rows may be single steps or merged steps: in its row, a step's response starts where the step's
    prompt ends. Batch and log-probabilities are as of `TrainedRows`.
    """
    owners = batch.trajectory_ids.numpy()
    row_counts = np.bincount(owners) if len(owners) else np.zeros(0, dtype=np.int64)
    if len(row_counts) != len(trajectories):
        raise ValueError(
            f"collect_trained_steps: batch must have the {len(trajectories)} trajectories given, "
            f"got {len(row_counts)}"
        )
    values = _TokenValues(batch, trainer_logprobs)
    first_rows = np.concatenate([[0], np.cumsum(row_counts)])
    return [
        _trajectory_values(trajectory, values, int(first_rows[number]), int(first_rows[number + 1]))
        for number, trajectory in enumerate(trajectories)
    ]


class _TokenValues:
    def __init__(self, batch: StepBatch, trainer_logprobs: torch.Tensor | None) -> None:
        assert batch.advantages is not None
        self.cu_seqlens = batch.cu_seqlens.tolist()
        self.cu_responses = batch.cu_responses.tolist()
        self.tokens = batch.tokens.numpy()
        self.loss_mask = batch.loss_mask.numpy()
        self.advantages = batch.advantages.numpy()
        self.trainer_logprobs = (
            np.full(len(self.loss_mask), np.nan, dtype=np.float32)
            if trainer_logprobs is None
            else trainer_logprobs.numpy()
        )

    def row_tokens(self, row: int) -> np.ndarray:
        tokens: np.ndarray = self.tokens[self.cu_seqlens[row] : self.cu_seqlens[row + 1]]
        return tokens

    def prompt_length(self, row: int) -> int:
        length = self.cu_seqlens[row + 1] - self.cu_seqlens[row]
        return length - (self.cu_responses[row + 1] - self.cu_responses[row])

    def step_values(self, step: Step, row: int) -> TrainedStep:
        wanted = list(step.response_ids)
        start = len(step.prompt_token_ids)
        found = self.row_tokens(row)[start : start + len(wanted)]
        offset = self.cu_responses[row] + start - self.prompt_length(row)
        place = slice(offset, offset + len(found))
        if found.tolist() == wanted:  # fast path for the usual case
            return TrainedStep(
                self.loss_mask[place], self.advantages[place], self.trainer_logprobs[place]
            )
        same = np.zeros(len(wanted), dtype=bool)
        same[: len(found)] = found == wanted[: len(found)]
        missing = np.full(len(wanted) - len(found), np.nan, dtype=np.float32)

        def matching(values: np.ndarray) -> np.ndarray:
            return np.where(same, np.concatenate([values[place], missing]), np.float32(np.nan))

        return TrainedStep(
            loss_mask=np.nan_to_num(matching(self.loss_mask)).astype(np.uint8),
            advantages=matching(self.advantages),
            trainer_logprobs=matching(self.trainer_logprobs),
        )


def _trajectory_values(
    trajectory: Trajectory, values: _TokenValues, first: int, end: int
) -> list[TrainedStep]:
    if trajectory.failure is not None or not trajectory.steps:
        return []
    return [
        values.step_values(step, row)
        for step, row in zip(
            trajectory.steps, _step_rows(trajectory.steps, values, first, end), strict=True
        )
    ]


def _step_rows(steps: Sequence[Step], values: _TokenValues, first: int, end: int) -> list[int]:
    # A row ends with the step whose prompt and response are all of its tokens.
    if end - first == len(steps):
        return list(range(first, end))
    rows, row = [], first
    for step in steps:
        rows.append(row)
        if row + 1 < end and _ends_row(step, values.row_tokens(row)):
            row += 1
    return rows


def _ends_row(step: Step, tokens: np.ndarray) -> bool:
    prompt = len(step.prompt_token_ids)
    if prompt + len(step.response_ids) != len(tokens):
        return False
    return tokens[prompt:].tolist() == list(step.response_ids) and tokens[:prompt].tolist() == list(
        step.prompt_token_ids
    )
