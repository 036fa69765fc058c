"""Batches from a readable table of rows."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.train.metrics.rollouts import Reports, rollout_metrics


class Row(NamedTuple):
    """One step: its group, its trajectory in the group, and how it went.

    `mask` is the loss mask of the response, a digit per token; "" is an empty response. `reward` is
    one float, or one per token.
    """

    group: str
    repetition: int
    reward: float | Sequence[float] = 0.0
    stop: str = "stop"
    mask: str = "11"


def output_of(rows: Sequence[Row]) -> dict[str, Any]:
    ids = [(row.group, row.repetition) for row in rows]
    return {
        "prompt_token_ids": [[1, 2]] * len(rows),
        "response_ids": [[3] * len(row.mask) for row in rows],
        "loss_masks": [[int(digit) for digit in row.mask] for row in rows],
        "rewards": [r if isinstance(r := row.reward, float) else list(r) for row in rows],
        "rollout_logprobs": [[-1.0] * len(row.mask) for row in rows],
        "stop_reasons": [row.stop for row in rows],
        "trajectory_ids": ids,
        "is_last_step": [a != b for a, b in zip(ids, [*ids[1:], None], strict=True)],
    }


def batch_of(*rows: Row) -> StepBatch:
    return StepBatch.from_generator_output(output_of(rows))


def masks_of(batch: StepBatch) -> list[str]:
    """Return the loss mask of each row, one digit per token."""
    digits = "".join(map(str, batch.loss_mask.tolist()))
    return [digits[a:b] for a, b in pairwise(batch.cu_responses.tolist())]


def assert_same(a: StepBatch, b: StepBatch) -> None:
    """Assert that all fields of two batches are equal, including dtypes."""
    for name in StepBatch.__slots__:
        value, other = getattr(a, name), getattr(b, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype, name
            assert torch.equal(value, other), name
        else:
            assert value == other, name


def mixed_batch(seed: int = 0) -> StepBatch:
    """Return rows of many lengths, with masked tokens, an all-masked row and an empty row."""
    rng = np.random.default_rng(seed)
    shapes = [(3, 4), (9, 1), (1, 6), (5, 5), (2, 0), (4, 3), (7, 2), (2, 2)]
    output: dict[str, Any] = {
        "prompt_token_ids": [rng.integers(4, 16, p).tolist() for p, _ in shapes],
        "response_ids": [rng.integers(4, 16, r).tolist() for _, r in shapes],
        "loss_masks": [rng.integers(0, 2, r).tolist() for _, r in shapes],
        "rewards": [float(i % 3) for i in range(len(shapes))],
        "rollout_logprobs": [(-rng.random(r)).tolist() for _, r in shapes],
        "trajectory_ids": [("a" if i < 4 else "b", i) for i in range(len(shapes))],
        "is_last_step": [True] * len(shapes),
    }
    output["loss_masks"][0] = [1, 0, 1, 1]
    output["loss_masks"][7] = [0, 0]
    batch = StepBatch.from_generator_output(output, step_wise=True)
    values = torch.from_numpy(rng.standard_normal(batch.loss_mask.shape[0])).float()
    return batch.with_(advantages=values)


def full_logprobs(model: Any, batch: StepBatch) -> torch.Tensor:
    """(A,) from the model's logits, one row at a time."""
    result = []
    for row in range(batch.num_rows):
        tokens = batch.tokens[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]].long()
        length = int(batch.response_lengths[row])
        values = torch.log_softmax(model(input_ids=tokens[None]).logits[0], -1)
        picked = values[:-1].gather(1, tokens[1:, None])[:, 0]
        result.append(picked[len(picked) - length :])
    return torch.cat(result)


def step_wise_metrics(output: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a step-wise output's rollouts, per trajectory and per turn."""
    last = [row for row, is_last in enumerate(output["is_last_step"]) if is_last]

    def last_values(values: Any) -> list[Any] | None:
        return None if values is None else [values[row] for row in last]

    splits = output.get("trajectory_time_splits") or {}
    reports = Reports(
        stop_reasons=last_values(output.get("stop_reasons")),
        seconds=last_values(output.get("trajectory_generation_times")),
        time_splits={name: last_values(values) or [] for name, values in splits.items()},
        env_metrics=last_values(output.get("env_metrics")),
    )
    return rollout_metrics(StepBatch.from_generator_output(output, step_wise=True), reports)
