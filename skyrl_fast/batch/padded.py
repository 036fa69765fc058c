"""The padded view of a batch, in SkyRL's layout. N rows, T and R widths, L layers, K experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from skyrl_fast.ops import _backend, _ragged
from skyrl_fast.ops.pack import SIDES, row_starts
from skyrl_fast.ops.padding_rows import check_pad_mode, write_padding_rows

if TYPE_CHECKING:
    from skyrl_fast.batch.step_batch import StepBatch

OP = "StepBatch.padded"


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """One left-padded block; what belongs to response tokens is right-aligned.

    Args:
        sequences: (N, T) int64, T = max(prompt + response).
        attention_mask: (N, T) int64.
        response_mask: (N, R) int64, R = max(response).
        rewards: (N, R) float32.
        loss_mask: (N, R) float32; 0 in padding rows.
        rollout_logprobs: (N, R) float32, or None.
        rollout_expert_indices: (N, T, L, K), or None; `arange(K)` where nothing was captured.
        router_padding_mask: (N, T) bool, True where nothing was captured; None without routes.
        uids: N; padding rows are `pad0`, `pad1`, ...
        is_last_step: N; True in padding rows, which are trajectories of their own.
        pad_size: rows at the end that only fill up, otherwise copies of row 0.
    """

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    rewards: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor | None
    rollout_expert_indices: torch.Tensor | None
    router_padding_mask: torch.Tensor | None
    uids: list[str]
    is_last_step: list[bool]
    pad_size: int


def padded_batch(
    batch: StepBatch,
    pad_token_id: int,
    pad_size: int,
    pad_mode: str = "repeat",
) -> PaddedBatch:
    """Return the padded view of a batch; arguments and errors as `StepBatch.padded`."""
    check_pad_mode(OP, pad_size, pad_mode)
    if pad_size and batch.num_rows == 0:
        raise ValueError(f"{OP}: an empty batch has no row 0 to repeat in padding rows")
    num_rows = batch.num_rows
    lengths, response_lengths = batch.lengths.long(), batch.response_lengths.long()
    _refuse_lost_rewards(batch.row_rewards, response_lengths)
    sides = {"token": lengths, "response": response_lengths}
    shapes = {
        side: (num_rows + pad_size, int(of_row.max()) if num_rows else 0)
        for side, of_row in sides.items()
    }
    columns: dict[str, tuple[str, torch.Tensor | None, float]] = {  # side, values, pad value
        "sequences": ("token", batch.tokens, pad_token_id),
        "attention_mask": ("token", None, 0.0),
        "response_mask": ("response", None, 0.0),
        "rewards": ("response", batch.rewards, 0.0),
        "loss_mask": ("response", batch.loss_mask, 0.0),
    }
    if batch.rollout_logprobs is not None:
        columns["rollout_logprobs"] = ("response", batch.rollout_logprobs, 0.0)
    tensors: dict[str, torch.Tensor] = {}
    copies: list[tuple[Any, ...]] = []
    fills: list[tuple[Any, ...]] = []
    for name, (side, values, pad_value) in columns.items():
        floating = side == "response" and values is not None
        dtype = torch.float32 if floating else torch.int64
        tensors[name] = out = _backend.empty(shapes[side], dtype)
        fills.append(
            (out, sides[side], SIDES["left"], None if values is None else float(pad_value))
        )
        if values is not None:
            offsets = batch.cu_seqlens if side == "token" else batch.cu_responses
            field = _ragged.read_field(OP, name, (values, offsets))
            starts = row_starts(sides[side], shapes[side][1], SIDES["left"])
            copies += _ragged.copy_jobs(field, out, starts)
    _ragged.fill(OP, copies, fills)
    for name, tensor in tensors.items():
        write_padding_rows(name, tensor, num_rows, pad_mode)
    routes, mask = _experts(batch, pad_size)
    return PaddedBatch(
        sequences=tensors["sequences"],
        attention_mask=tensors["attention_mask"],
        response_mask=tensors["response_mask"],
        rewards=tensors["rewards"],
        loss_mask=tensors["loss_mask"],
        rollout_logprobs=tensors.get("rollout_logprobs"),
        rollout_expert_indices=routes,
        router_padding_mask=mask,
        uids=batch.row_uids + [f"pad{i}" for i in range(pad_size)],
        is_last_step=batch.is_last_step.tolist() + [True] * pad_size,
        pad_size=pad_size,
    )


def _refuse_lost_rewards(row_rewards: torch.Tensor, response_lengths: torch.Tensor) -> None:
    lost = (response_lengths == 0) & (row_rewards != 0)
    if bool(lost.any()):
        row = int(lost.nonzero()[0])
        raise ValueError(
            f"{OP}: rewards must be 0 for an empty response (there is no token to hold it), got "
            f"{float(row_rewards[row])} in row {row}"
        )


def _experts(
    batch: StepBatch, pad_size: int
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return the routes and the mask of cells without one; padding rows have none."""
    if batch.expert_indices is None or batch.cu_experts is None:
        return None, None
    _, num_layers, top_k = batch.expert_indices.shape
    lengths = batch.lengths.long()
    width = int(lengths.max())
    dummy = torch.arange(top_k, dtype=batch.expert_indices.dtype)
    out = dummy.expand(batch.num_rows + pad_size, width, num_layers, top_k).clone()
    captured = batch.cu_experts.diff().long()
    row_starts = torch.arange(batch.num_rows) * width + (width - lengths)
    shift = torch.repeat_interleave(row_starts - batch.cu_experts[:-1].long(), captured)
    cells = torch.arange(batch.expert_indices.shape[0]) + shift
    out.view(-1, num_layers, top_k)[cells] = batch.expert_indices
    mask = torch.ones(out.shape[:2], dtype=torch.bool)
    mask.view(-1)[cells] = False
    return out, mask
