"""The fields of a `StepBatch`: what each has an entry for, and whether they fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from skyrl_fast.batch.step_batch import StepBatch

OP = "StepBatch"
Rows = Literal["token", "response", "row", "expert"]
OFFSETS: dict[Rows, str] = {
    "token": "cu_seqlens",
    "response": "cu_responses",
    "expert": "cu_experts",
}


# Which arrays have an entry per token, per response token, per row or per captured route.
COLUMNS: dict[str, tuple[Rows, torch.dtype | None]] = {
    "tokens": ("token", torch.int32),
    "loss_mask": ("response", torch.uint8),
    "rewards": ("response", torch.float32),
    "row_rewards": ("row", torch.float32),
    "group_ids": ("row", torch.int32),
    "trajectory_ids": ("row", torch.int32),
    "is_last_step": ("row", torch.bool),
    "policy_version": ("row", torch.int32),
    "anchor_ids": ("row", torch.int32),
    "rollout_logprobs": ("response", torch.float32),
    "old_logprobs": ("response", torch.float32),
    "ref_logprobs": ("response", torch.float32),
    "advantages": ("response", torch.float32),
    "values": ("response", torch.float32),
    "returns": ("response", torch.float32),
    "token_weights": ("response", torch.float32),
    "row_weights": ("row", torch.float32),
    "expert_indices": ("expert", None),
}
OPTIONAL = {
    "anchor_ids",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
    "values",
    "returns",
    "token_weights",
    "row_weights",
    "expert_indices",
}


def check_fields(batch: StepBatch) -> None:
    """Raise TypeError or ValueError where a field is of another type, dtype or size."""
    num_rows = batch.cu_seqlens.shape[0] - 1
    num_experts = 0 if batch.expert_indices is None else batch.expert_indices.shape[0]
    sizes = {
        "token": batch.tokens.shape[0],
        "response": batch.loss_mask.shape[0],
        "row": num_rows,
        "expert": num_experts,
    }
    if num_rows < 0 or batch.cu_responses.shape != batch.cu_seqlens.shape:
        raise ValueError(
            f"{OP}: cu_responses must be of shape {tuple(batch.cu_seqlens.shape)} like cu_seqlens, "
            f"got {tuple(batch.cu_responses.shape)}"
        )
    for name, (per, dtype) in COLUMNS.items():
        value = getattr(batch, name)
        if value is None and name in OPTIONAL:
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{OP}: {name} must be a tensor, got {type(value).__name__}")
        if dtype is not None and value.dtype != dtype:
            raise ValueError(f"{OP}: {name} must be {dtype}, got {value.dtype}")
        if value.shape[:1] != (sizes[per],) or (dtype is not None and value.dim() != 1):
            raise ValueError(
                f"{OP}: {name} must be of shape ({sizes[per]},), got {tuple(value.shape)}"
            )
    if batch.stop_reasons is not None and len(batch.stop_reasons) != num_rows:
        raise ValueError(
            f"{OP}: stop_reasons must have one entry per row ({num_rows}), "
            f"got {len(batch.stop_reasons)}"
        )
    if not 0 <= batch.num_padding_rows <= num_rows:
        raise ValueError(
            f"{OP}: num_padding_rows must be from 0 to {num_rows}, got {batch.num_padding_rows}"
        )


def given(batch: StepBatch, per: Rows) -> dict[str, torch.Tensor]:
    """Return the columns of one kind that the batch has."""
    columns = {name: getattr(batch, name) for name, (kind, _) in COLUMNS.items() if kind == per}
    return {name: value for name, value in columns.items() if value is not None}
