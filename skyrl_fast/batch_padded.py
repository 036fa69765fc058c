"""The padded view of a batch, in SkyRL's layout. N rows, T and R widths, L layers, K experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from skyrl_fast.batch import StepBatch


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
    uids: list[str]
    is_last_step: list[bool]
    pad_size: int


def padded_batch(batch: StepBatch, pad_token_id: int, pad_size: int) -> PaddedBatch:
    """Return the padded view of the batch with `pad_size` padding rows at the end."""
    if pad_size < 0:
        raise ValueError(f"padded: pad_size must be at least 0, got {pad_size}")
    if pad_size and batch.num_rows == 0:
        raise ValueError("padded: an empty batch has no row 0 to copy into padding rows")
    response_mask = torch.ones(batch.loss_mask.shape[0], dtype=torch.int64)
    attention = torch.ones(batch.num_tokens, dtype=torch.int64)
    cu_seqlens, cu_responses = batch.cu_seqlens, batch.cu_responses
    loss_mask = _right_aligned(batch.loss_mask.float(), cu_responses, 0, pad_size)
    loss_mask[batch.num_rows :] = 0
    logprobs = batch.rollout_logprobs
    return PaddedBatch(
        sequences=_right_aligned(batch.tokens.long(), cu_seqlens, pad_token_id, pad_size),
        attention_mask=_right_aligned(attention, cu_seqlens, 0, pad_size),
        response_mask=_right_aligned(response_mask, cu_responses, 0, pad_size),
        rewards=_right_aligned(batch.rewards, cu_responses, 0, pad_size),
        loss_mask=loss_mask,
        rollout_logprobs=(
            None if logprobs is None else _right_aligned(logprobs, cu_responses, 0, pad_size)
        ),
        rollout_expert_indices=_experts(batch, pad_size),
        uids=batch.row_uids + [f"pad{i}" for i in range(pad_size)],
        is_last_step=batch.is_last_step.tolist() + [True] * pad_size,
        pad_size=pad_size,
    )


def _right_aligned(
    values: torch.Tensor, offsets: torch.Tensor, fill: int, pad_size: int
) -> torch.Tensor:
    """Return (N + pad_size, width): each row at the right edge; padding rows repeat row 0."""
    lengths = offsets.diff().long()
    num_rows, width = lengths.numel(), int(lengths.max()) if lengths.numel() else 0
    out = torch.full((num_rows + pad_size, width), fill, dtype=values.dtype)
    row_ends = torch.arange(1, num_rows + 1) * width
    shift = torch.repeat_interleave(row_ends - offsets[1:].long(), lengths)
    out.view(-1)[torch.arange(values.numel()) + shift] = values
    out[num_rows:] = out[:1]
    return out


def _experts(batch: StepBatch, pad_size: int) -> torch.Tensor | None:
    if batch.expert_indices is None or batch.cu_experts is None:
        return None
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
    return out
