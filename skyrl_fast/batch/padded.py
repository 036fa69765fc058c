"""The padded view of a batch, in SkyRL's layout. N rows, T and R widths, L layers, K experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from skyrl_fast.ops import _ragged
from skyrl_fast.ops.pack.batch_tensors import check_rewards_of_empty
from skyrl_fast.ops.pack.padding_rows import check_pad_mode, write_padding_rows
from skyrl_fast.ops.pack.steps import pad_rows

OP = "StepBatch.padded"


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """A left-padded batch; values per response token are right-aligned.

    Args:
        sequences: (N, T) int64, T = max(prompt + response).
        attention_mask: (N, T) int64.
        response_mask: (N, R) int64, R = max(response).
        rewards: (N, R) float32.
        loss_mask: (N, R) float32; 0 in padding rows.
        rollout_logprobs: (N, R) float32, or None.
        rollout_expert_indices: (N, T, L, K), or None; `arange(K)` where no route was recorded.
        router_padding_mask: (N, T) bool, True where no route was recorded; None without routes.
        uids: N; padding rows are `pad0`, `pad1`, ...
        is_last_step: N; True in padding rows, each of which is a separate trajectory.
        pad_size: padding rows at the end.
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


def pad_to_tensors(
    tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    responses: Mapping[str, torch.Tensor | None],
    cu_responses: torch.Tensor,
    *,
    row_rewards: torch.Tensor,
    pad_token_id: int,
    pad_size: int,
    pad_mode: str,
) -> dict[str, torch.Tensor]:
    """Return `sequences`, `attention_mask`, `response_mask` and the padded `responses`, by name.

    Args:
        tokens: (S,) int32, with (N + 1,) offsets `cu_seqlens`.
        responses: name -> (A,) values per response token, or None; with (N + 1,) `cu_responses`.
        row_rewards: (N,) float32; must be 0 for empty responses.
    """
    num_rows = len(row_rewards)
    check_pad_mode(OP, pad_size, pad_mode)
    if pad_size and num_rows == 0:
        raise ValueError(f"{OP}: an empty batch has no row 0 to repeat in padding rows")
    response_lengths = cu_responses.diff().long()
    check_rewards_of_empty(OP, row_rewards, response_lengths)
    fields = {
        name: _ragged.read_field(OP, name, (values, cu_responses))
        for name, values in responses.items()
        if values is not None
    }
    tensors = pad_rows(
        OP,
        _ragged.read_field(OP, "sequences", (tokens, cu_seqlens)),
        response_lengths,
        fields,
        pad_token_id=pad_token_id,
        pad_size=pad_size,
    )
    for name, tensor in tensors.items():
        write_padding_rows(name, tensor, num_rows, pad_mode)
    return tensors


def pad_routes(
    routes: torch.Tensor | None,
    cu_experts: torch.Tensor | None,
    lengths: torch.Tensor,
    pad_size: int,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return (N + pad_size, T, L, K) routes and the mask of tokens without one, or None for both.

    Args:
        routes: (E, L, K) integers of the rows' first tokens, with (N + 1,) offsets `cu_experts`.
        lengths: (N,) tokens of each row.
    """
    if routes is None or cu_experts is None:
        return None, None
    num_routes, num_layers, top_k = routes.shape
    num_rows = len(lengths)
    width = int(lengths.max())
    dummy = torch.arange(top_k, dtype=routes.dtype, device=routes.device)
    shape = (num_rows + pad_size, width, num_layers, top_k)
    out = dummy.expand(shape).clone()
    rows = torch.arange(num_rows, device=lengths.device)
    padding = width - lengths.long()
    starts = rows * width + padding
    captured = cu_experts.diff().long()
    before = cu_experts[:-1].long()
    shift = torch.repeat_interleave(starts - before, captured)
    cells = torch.arange(num_routes, device=shift.device) + shift
    out.view(-1, num_layers, top_k)[cells] = routes
    mask = torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)
    mask.view(-1)[cells] = False
    return out, mask
