"""Plain-torch conversion of rows to the padded batch. Shapes: N rows, T, R padded lengths."""

from __future__ import annotations

from typing import Any

import torch

from skyrl_fast.ops._ragged import Concat, Rows
from skyrl_fast.ops.pack import reference as pack


def convert(
    pad_token_id: int,
    prompts: Rows,
    responses: Rows,
    rewards: Any,
    loss_masks: Rows,
    logprobs: Rows | None,
) -> list[torch.Tensor | None]:
    """Return sequences, attention_mask, response_mask, rewards, loss_masks, logprobs."""
    tokens = Concat(prompts, responses)
    lengths = torch.tensor([len(row) for row in pack.row_tensors(tokens, torch.int64)])
    response_rows = pack.row_tensors(responses, torch.int64)
    response_lengths = torch.tensor([len(row) for row in response_rows])
    width, columns = int(lengths.max()), int(response_lengths.max())
    response_mask = pack.real_cells(response_lengths, columns, "left").to(torch.int64)

    def right_aligned(rows: Rows) -> torch.Tensor:
        return pack.pad(rows, torch.float32, columns, "left", 0.0)

    sequences = pack.pad(tokens, torch.int64, width, "left", pad_token_id)
    if bool((sequences[pack.real_cells(lengths, width, "left")] < 0).any()):
        raise ValueError("token ids must not be negative")
    try:
        scores = torch.as_tensor(rewards, dtype=torch.float32)
    except (TypeError, ValueError):
        scores = torch.empty(0, 0)
    if scores.dim() == 1:
        reward_tensor = torch.zeros(len(lengths), columns)
        if columns > 0:
            reward_tensor[:, -1] = scores
    else:
        reward_tensor = right_aligned(rewards)
    return [
        sequences,
        pack.real_cells(lengths, width, "left").to(torch.int64),
        response_mask,
        reward_tensor,
        right_aligned(loss_masks),
        None if logprobs is None else right_aligned(logprobs),
    ]
