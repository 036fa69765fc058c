"""What training made of each step: its mask, advantages and the trainer's log-probabilities.

A response tokens of a batch's rows, R rows and S steps of one trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        trainer_logprobs: float32, NaN where the trainer made none.
    """

    loss_mask: np.ndarray
    advantages: np.ndarray
    trainer_logprobs: np.ndarray


def trained_steps(
    trajectories: Sequence[Trajectory],
    batch: StepBatch,
    trainer_logprobs: torch.Tensor | None = None,
) -> list[list[TrainedStep]]:
    """Return, for each trajectory, the values of its steps; none for one that became a stub.

    Rows may be steps, or steps joined where contexts grew: a step's response stands in its row
    where its own prompt ends.

    Args:
        trajectories: J, those that the batch was made from, in its order.
        batch: with advantages, padding rows or not.
        trainer_logprobs: (A,) float32, NaN where there is none.

    Raises:
        ValueError: the batch has another number of trajectories.
    """
    real = slice(0, batch.num_real_rows)
    owners = batch.trajectory_ids[real].numpy()
    rows_of = np.bincount(owners) if len(owners) else np.zeros(0, dtype=np.int64)
    if len(rows_of) != len(trajectories):
        raise ValueError(
            f"trained_steps: batch must have the {len(trajectories)} trajectories given, "
            f"got {len(rows_of)}"
        )
    cells = _Cells(batch, trainer_logprobs)
    first_rows = np.concatenate([[0], np.cumsum(rows_of)])
    return [
        _steps_of(trajectory, cells, int(first_rows[number]), int(first_rows[number + 1]))
        for number, trajectory in enumerate(trajectories)
    ]


class _Cells:
    """The batch's flat arrays, looked at by row."""

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
        whole = self.cu_seqlens[row + 1] - self.cu_seqlens[row]
        return whole - (self.cu_responses[row + 1] - self.cu_responses[row])

    def of_step(self, step: Step, row: int) -> TrainedStep:
        wanted = list(step.response_ids)
        start = len(step.prompt_token_ids)
        found = self.row_tokens(row)[start : start + len(wanted)]
        offset = self.cu_responses[row] + start - self.prompt_length(row)
        cells = slice(offset, offset + len(found))
        if found.tolist() == wanted:  # the usual case, compared in one go
            return TrainedStep(
                self.loss_mask[cells], self.advantages[cells], self.trainer_logprobs[cells]
            )
        same = np.zeros(len(wanted), dtype=bool)
        same[: len(found)] = found == wanted[: len(found)]
        missing = np.full(len(wanted) - len(found), np.nan, dtype=np.float32)

        def taken(values: np.ndarray) -> np.ndarray:
            return np.where(same, np.concatenate([values[cells], missing]), np.float32(np.nan))

        return TrainedStep(
            loss_mask=np.nan_to_num(taken(self.loss_mask)).astype(np.uint8),
            advantages=taken(self.advantages),
            trainer_logprobs=taken(self.trainer_logprobs),
        )


def _steps_of(trajectory: Trajectory, cells: _Cells, first: int, end: int) -> list[TrainedStep]:
    if trajectory.failure is not None or not trajectory.steps:
        return []
    return [
        cells.of_step(step, row)
        for step, row in zip(
            trajectory.steps, _row_of_each(trajectory.steps, cells, first, end), strict=True
        )
    ]


def _row_of_each(steps: Sequence[Step], cells: _Cells, first: int, end: int) -> list[int]:
    """S row numbers: a row is complete when its tokens are its last step's prompt and response."""
    if end - first == len(steps):
        return list(range(first, end))
    rows, row = [], first
    for step in steps:
        rows.append(row)
        if row + 1 < end and _is_whole(step, cells.row_tokens(row)):
            row += 1
    return rows


def _is_whole(step: Step, tokens: np.ndarray) -> bool:
    prompt = len(step.prompt_token_ids)
    if prompt + len(step.response_ids) != len(tokens):
        return False
    return tokens[prompt:].tolist() == list(step.response_ids) and tokens[:prompt].tolist() == list(
        step.prompt_token_ids
    )
