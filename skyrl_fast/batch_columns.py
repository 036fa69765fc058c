"""From the lists of a generator output to the flat arrays of a batch.

N rows, S tokens, A response tokens, E captured routes, L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from skyrl_fast.generator_output import rewards_are_per_token, validate_generator_output
from skyrl_fast.row_index import row_index, row_lengths

OP = "StepBatch.from_generator_output"


def columns_of_output(
    output: Mapping[str, Any],
    *,
    uids: Sequence[str] | Sequence[int] | None = None,
    num_prompts: int | None = None,
    step_wise: bool | None = None,
) -> dict[str, Any]:
    """Return the fields of a `StepBatch`; arguments and errors as its `from_generator_output`."""
    validate_generator_output(output, num_prompts=num_prompts, step_wise=step_wise)
    index = row_index(OP, output, uids, step_wise=step_wise)
    prompts, responses = output["prompt_token_ids"], output["response_ids"]
    num_rows = len(responses)
    response_lengths = row_lengths(OP, "response_ids", responses)
    cu_seqlens = _offsets(row_lengths(OP, "prompt_token_ids", prompts) + response_lengths)
    cu_responses = _offsets(response_lengths)
    rewards, row_rewards = _rewards(output["rewards"], cu_responses)
    versions = output.get("policy_versions")
    stop_reasons = output.get("stop_reasons")
    logprobs = output.get("rollout_logprobs")
    experts, cu_experts = _experts(output.get("rollout_expert_indices"))
    return {
        "tokens": _tokens(prompts, responses, cu_seqlens),
        "cu_seqlens": cu_seqlens,
        "cu_responses": cu_responses,
        "loss_mask": _loss_mask(output["loss_masks"], cu_responses),
        "rewards": rewards,
        "row_rewards": row_rewards,
        "group_ids": torch.from_numpy(index.group_ids),
        "trajectory_ids": torch.from_numpy(index.trajectory_ids),
        "is_last_step": torch.from_numpy(index.is_last_step),
        "policy_version": torch.tensor(versions or [0] * num_rows, dtype=torch.int32),
        "uids": index.uids,
        "stop_reasons": None if stop_reasons is None else tuple(stop_reasons),
        "rollout_logprobs": None if logprobs is None else _flat(logprobs, torch.float32),
        "expert_indices": experts,
        "cu_experts": cu_experts,
    }


def _offsets(lengths: np.ndarray) -> torch.Tensor:
    total = int(lengths.sum())
    dtype = np.int32 if total <= np.iinfo(np.int32).max else np.int64
    offsets = np.zeros(len(lengths) + 1, dtype=dtype)
    np.cumsum(lengths, out=offsets[1:])
    return torch.from_numpy(offsets)


def _flat(rows: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return all rows' numbers, one after the other."""
    values = np.array(list(chain.from_iterable(rows)), dtype=np.float64)
    return torch.from_numpy(values).to(dtype)


def _row_of(offsets: torch.Tensor, position: int) -> int:
    return int(torch.searchsorted(offsets, position, right=True)) - 1


def _tokens(
    prompts: Sequence[Any], responses: Sequence[Any], cu_seqlens: torch.Tensor
) -> torch.Tensor:
    rows = chain.from_iterable(zip(prompts, responses, strict=True))
    wide = np.fromiter(chain.from_iterable(rows), np.int64, int(cu_seqlens[-1]))
    if wide.size and not (wide.min() >= 0 and wide.max() <= np.iinfo(np.int32).max):
        position = int(np.flatnonzero((wide < 0) | (wide > np.iinfo(np.int32).max))[0])
        raise ValueError(
            f"{OP}: token ids must be from 0 to 2**31 - 1, got {wide[position]} in row "
            f"{_row_of(cu_seqlens, position)}"
        )
    return torch.from_numpy(wide.astype(np.int32))


def _loss_mask(rows: Sequence[Any], cu_responses: torch.Tensor) -> torch.Tensor:
    mask = _flat(rows, torch.float32)
    if bool(((mask != 0) & (mask != 1)).any()):
        position = int(((mask != 0) & (mask != 1)).nonzero()[0])
        raise ValueError(
            f"{OP}: loss_masks must be 0 or 1, got {mask[position]:g} in row "
            f"{_row_of(cu_responses, position)}"
        )
    return mask.to(torch.uint8)


def _rewards(
    rewards: Sequence[Any], cu_responses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (A,) per token and (N,) per row."""
    if rewards_are_per_token(OP, rewards):
        flat = _flat(rewards, torch.float32)
        return flat, torch.segment_reduce(
            flat.double(), "sum", offsets=cu_responses.long(), initial=0
        ).float()
    per_row = torch.tensor([float(r) for r in rewards], dtype=torch.float32)
    flat = torch.zeros(int(cu_responses[-1]), dtype=torch.float32)
    filled = cu_responses.diff() > 0
    flat[cu_responses[1:][filled].long() - 1] = per_row[filled]
    return flat, per_row


def _experts(rows: Sequence[Any] | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (E, L, K) routes of all rows and their (N + 1,) offsets."""
    if rows is None:
        return None, None
    arrays = [None if row is None or len(row) == 0 else np.asarray(row) for row in rows]
    shape = next((a.shape[1:] for a in arrays if a is not None), None)
    if shape is None:
        return None, None
    for row, array in enumerate(arrays):
        if array is None:
            continue
        if array.ndim != 3 or array.shape[1:] != shape or array.dtype.kind not in "iu":
            raise ValueError(
                f"{OP}: rollout_expert_indices must be integers [tokens, {shape[0]}, "
                f"{shape[-1]}] in row {row}, got {array.dtype} {list(array.shape)}"
            )
    captured = [a for a in arrays if a is not None]
    largest = max(int(a.max()) for a in captured)
    dtype = next(d for d in (np.uint8, np.int16, np.int32) if largest <= np.iinfo(d).max)
    flat = np.concatenate([a.astype(dtype, copy=False) for a in captured])
    lengths = np.array([0 if a is None else len(a) for a in arrays], dtype=np.int64)
    return torch.from_numpy(flat), _offsets(lengths)
