"""Conversion of rows to the padded batch of SkyRL's trainer, with data-parallel padding rows.

Shapes: N rows (steps), T padded sequence length, R padded response length, L layers, K experts per
token. Sequences are left padded; response-side tensors are right-aligned.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from skyrl_fast import _C
from skyrl_fast.ops import _backend, _ragged
from skyrl_fast.ops._ragged import Rows
from skyrl_fast.ops.pack import reference
from skyrl_fast.ops.pack.padding_rows import check_pad_mode, dummy_route, write_padding_rows
from skyrl_fast.ops.pack.steps import pad_rows

logger = logging.getLogger(__name__)

OP = "convert_prompts_responses_to_batch_tensors"

BatchTensors: TypeAlias = (
    "tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]"
)


def convert_prompts_responses_to_batch_tensors(
    pad_token_id: Any,
    prompts: Rows,
    responses: Rows,
    rewards: Rows | Sequence[float],
    loss_masks: Rows,
    logprobs: Rows | None = None,
    rollout_expert_indices: Sequence[Any] | None = None,
    max_seq_len: int | None = None,
    *,
    pad_size: int = 0,
    pad_mode: str = "repeat",
    vocab_size: int | None = None,
    backend: str | None = None,
) -> BatchTensors:
    """Return the seven tensors of a padded training batch, in SkyRL's order and layout.

    Each row is one left-padded block of prompt and response in T = max(prompt_i + response_i)
    columns; response-side tensors are right-aligned in R = max(response_i) columns. Nothing is
    truncated.

    Args:
        pad_token_id: an int, or a tokenizer with a `pad_token_id`: SkyRL passes its tokenizer, so
            this function can replace SkyRL's.
        prompts, responses: N rows of token ids, as lists, 1-D arrays or (values, cu_seqlens).
        rewards: one float per response token, or one per row, for the last token.
        loss_masks: one number per response token; 1 = trained.
        logprobs: one float per response token. None or an empty list: no logprobs.
        rollout_expert_indices: per row an integer array (tokens, L, K) of the experts of the
            row's first tokens (at most as many as it has), nested lists, or None for none.
        max_seq_len: logs a warning if T is larger.
        pad_size: rows to add after the N for data-parallel padding, as `pad_batch` would. Use
            `padding_metadata` for the batch's metadata.
        pad_mode: "repeat" or "cheap", as in `pad_batch`.
        vocab_size: upper bound of ids, if given. Ids must not be negative.
        backend: "native", "torch", or None to choose.

    Returns:
        sequences (N, T) int64, attention_mask (N, T) int64, response_mask (N, R) int64,
        rewards (N, R) float32, loss_masks (N, R) float32, logprobs (N, R) float32 or None,
        rollout_expert_indices (N, T, L, K) uint8, int16 or int32 (the smallest that holds the
        largest id; tokens without a captured route have the dummy route 0, 1, ... K - 1) or None.
        All with N + pad_size rows. `router_padding_mask` distinguishes real routes from dummies.

    Raises:
        TypeError: an element that is not a number, or an id that is not an integer.
        ValueError: no rows, fields of different lengths, ids out of range, more routes than tokens.

    Example:
        >>> out = convert_prompts_responses_to_batch_tensors(
        ...     0, [[5, 5], [6]], [[7], [8, 8, 8]], [[1.0], [0.0, 0.0, 1.0]], [[1], [1, 1, 1]])
        >>> out[0].tolist(), out[2].tolist()
        ([[0, 5, 5, 7], [6, 8, 8, 8]], [[0, 0, 1], [1, 1, 1]])
    """
    use_torch = _backend.select(OP, backend=backend) == "torch"
    pad_token_id = _check_pad_token(getattr(pad_token_id, "pad_token_id", pad_token_id))
    check_pad_mode(OP, pad_size, pad_mode)
    fields = _read_fields(prompts, responses, rewards, loss_masks, logprobs)
    response_lengths = fields["responses"].lengths
    lengths = fields["prompts"].lengths + response_lengths
    num_rows = len(lengths)
    width = int(lengths.max())
    if max_seq_len is not None and width > max_seq_len:
        logger.warning(
            "The longest row has %d tokens, over max_seq_len %d; nothing is truncated.",
            width,
            max_seq_len,
        )
    if use_torch:
        tensors = reference.batch_tensors(
            pad_token_id,
            prompts,
            responses,
            rewards,
            loss_masks,
            fields.get("logprobs") and logprobs,
        )
        if pad_size:
            tensors = [t if t is None else _with_rows(t, pad_size) for t in tensors]
    else:
        tensors = _convert(fields, pad_token_id, vocab_size, pad_size)
    routes = _convert_routes(rollout_expert_indices, lengths, width, pad_size)
    # Last, as they may be copies of row 0.
    names = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask", "logprobs")
    for name, tensor in zip((*names, "rollout_expert_indices"), (*tensors, routes), strict=True):
        if tensor is not None:
            write_padding_rows(name, tensor, num_rows, pad_mode)
    return cast(BatchTensors, (*tensors, routes))


def router_padding_mask(
    rollout_expert_indices: Sequence[Any], attention_mask: torch.Tensor
) -> torch.Tensor:
    """Return (N, T) bool, True where a token has no captured route.

    Args:
        rollout_expert_indices: per row an array (tokens, L, K), nested lists, or None, as given to
            `convert_prompts_responses_to_batch_tensors`. Rows of the mask beyond these are
            padding rows: True.
        attention_mask: (N, T) of the left-padded batch.

    Raises:
        ValueError: fewer mask rows than route rows, or more routes than tokens in a row.

    Example:
        >>> router_padding_mask([np.zeros((1, 1, 1), np.uint8)], torch.tensor([[0, 1, 1]]))
        tensor([[ True, False,  True]])
    """
    op = "router_padding_mask"
    num_rows, width = attention_mask.shape
    if len(rollout_expert_indices) > num_rows:
        raise ValueError(
            f"{op}: attention_mask: expected a row per entry of rollout_expert_indices "
            f"({len(rollout_expert_indices)}), got {num_rows}"
        )
    captured = torch.zeros(num_rows, dtype=torch.int64, device="cpu")
    captured[: len(rollout_expert_indices)] = torch.tensor(
        [0 if routes is None else len(routes) for routes in rollout_expert_indices],
        dtype=torch.int64,
        device="cpu",
    )
    captured = captured.to(attention_mask.device)
    lengths = attention_mask.sum(1)
    _check_captured(op, captured, lengths)
    starts = (width - lengths)[:, None]
    columns = torch.arange(width, device=attention_mask.device)
    return (columns < starts) | (columns >= starts + captured[:, None])


def _read_fields(
    prompts: Rows,
    responses: Rows,
    rewards: Rows | Sequence[float],
    loss_masks: Rows,
    logprobs: Rows | None,
) -> dict[str, _ragged.Field]:
    rows = {"prompts": prompts, "responses": responses, "loss_masks": loss_masks}
    if logprobs is not None and len(logprobs) > 0:
        rows["logprobs"] = logprobs
    fields = _ragged.read_fields(OP, rows)
    num_rows = len(fields["prompts"].lengths)
    if num_rows == 0:
        raise ValueError(f"{OP}: prompts: expected at least one row, got none")
    for name in fields:
        if name != "prompts":
            _ragged.check_aligned(OP, fields["responses"], fields[name])
    # SkyRL has both forms: a list per token, or one number per row.
    if not _is_scalar_per_row(rewards):
        fields["rewards"] = _ragged.read_field(OP, "rewards", rewards)
        if len(fields["rewards"].lengths) != num_rows:
            raise ValueError(
                f"{OP}: rewards: expected one entry per row ({num_rows}), got "
                f"{len(fields['rewards'].lengths)}"
            )
        _ragged.check_aligned(OP, fields["responses"], fields["rewards"])
        return fields
    # One float per row: written to the last column.
    scores = _ragged.read_field(OP, "rewards", [rewards])
    if int(scores.lengths[0]) != num_rows:
        raise ValueError(
            f"{OP}: rewards: expected one entry per row ({num_rows}), got {int(scores.lengths[0])}"
        )
    fields["row_rewards"] = scores
    return fields


def _is_scalar_per_row(rewards: Any) -> bool:
    if _ragged.is_flat(rewards):
        return False
    if _ragged.is_array(rewards):
        return rewards.ndim == 1
    if rewards is None:
        raise TypeError(f"{OP}: rewards: expected them, got None")
    return len(rewards) > 0 and not hasattr(rewards[0], "__len__")


def _convert(
    fields: dict[str, _ragged.Field],
    pad_token_id: int,
    vocab_size: int | None,
    pad_size: int,
) -> list[torch.Tensor | None]:
    prompts = fields["prompts"]
    responses = fields["responses"]
    # As parts of one field: a row's prompt and response are copied side by side.
    tokens = _ragged.Field(
        "sequences",
        prompts.parts + responses.parts,
        prompts.part_lengths + responses.part_lengths,
        prompts.lengths + responses.lengths,
    )
    names = ("rewards", "loss_masks", "logprobs")
    if vocab_size is None:
        highest_id = _ragged.INT64_MAX
    else:
        highest_id = vocab_size - 1
    columns = pad_rows(
        OP,
        tokens,
        responses.lengths,
        {name: fields[name] for name in names if name in fields},
        pad_token_id=pad_token_id,
        pad_size=pad_size,
        highest_id=highest_id,
    )
    if "row_rewards" in fields:
        columns["rewards"] = _place_row_rewards(
            fields["row_rewards"], responses.lengths, columns["response_mask"]
        )
    return [columns.get(name) for name in ("sequences", "attention_mask", "response_mask", *names)]


def _place_row_rewards(
    scores: _ragged.Field, response_lengths: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """Return rewards in the last column, float32; raise for a reward of an empty response."""
    values = torch.empty(len(response_lengths), dtype=torch.float32, device="cpu")
    first = torch.zeros(1, dtype=torch.int64, device="cpu")
    _ragged.fill(OP, _ragged.copy_jobs(scores, values, first))
    check_rewards_of_empty(OP, values, response_lengths)
    out = _backend.empty(like.shape, torch.float32).zero_()
    if out.shape[1] > 0:
        out[: len(values), -1] = values
    return out


def check_rewards_of_empty(
    op: str, row_rewards: torch.Tensor, response_lengths: torch.Tensor
) -> None:
    # A padded batch has no cell for such a reward.
    lost = (response_lengths == 0) & (row_rewards != 0)
    if bool(lost.any()):
        row = int(lost.nonzero()[0])
        raise ValueError(
            f"{op}: rewards: expected 0 for an empty response (there is no token to hold it), got "
            f"{float(row_rewards[row])} in row {row}"
        )


def _convert_routes(
    routes: Sequence[Any] | None, lengths: torch.Tensor, width: int, pad_size: int
) -> torch.Tensor | None:
    if routes is None or len(routes) == 0:
        return None
    if len(routes) != len(lengths):
        raise ValueError(
            f"{OP}: rollout_expert_indices: expected one entry per row ({len(lengths)}), got "
            f"{len(routes)}"
        )
    arrays = [_route_array(row, entry) for row, entry in enumerate(routes)]
    known = next((array for array in arrays if array is not None), None)
    if known is None:
        return None
    num_layers, top_k = known.shape[1:]
    counts = [0 if a is None else len(a) for a in arrays]
    captured = torch.tensor(counts, dtype=torch.int64, device="cpu")
    _check_captured(OP, captured, lengths)
    for row, array in enumerate(arrays):
        if array is not None and array.shape[1:] != (num_layers, top_k):
            raise ValueError(
                f"{OP}: rollout_expert_indices must agree in layers and experts per token, got "
                f"{tuple(array.shape[1:])} in row {row} and {(num_layers, top_k)} before"
            )
    dtype = _route_dtype(arrays, top_k)
    shape = (len(lengths) + pad_size, width, num_layers, top_k)
    out = _backend.empty(shape, dtype)
    starts = width - lengths
    threads = _backend.num_threads()
    if out.numel() == 0:
        return out
    cell = dummy_route(out)
    # Around the captured routes, so that each cell is written once.
    _C.fill_around(out, starts, captured, cell.contiguous(), threads)
    # As ragged rows of ids, by the copy that tokens take.
    flat = [np.empty(0, dtype=np.uint8) if a is None else a.reshape(-1) for a in arrays]
    field = _ragged.read_field(OP, "rollout_expert_indices", flat)
    cells = torch.arange(len(lengths), device=lengths.device) * width + starts
    jobs = _ragged.copy_jobs(field, out.view(-1), cells * (num_layers * top_k), 0)
    _ragged.fill(OP, jobs)
    return out


def _route_array(row: int, entry: Any) -> np.ndarray | None:
    """Return a row's routes as a 3-D integer array, or None where L and K are unknown."""
    if entry is None or (isinstance(entry, (list, tuple)) and len(entry) == 0):
        return None
    if isinstance(entry, torch.Tensor):
        array = entry.numpy()
    else:
        array = np.asarray(entry)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{OP}: rollout_expert_indices: expected integers of shape (tokens, L, K), got "
            f"{array.dtype} of shape {array.shape} in row {row}"
        )
    return array


def _route_dtype(arrays: Sequence[np.ndarray | None], top_k: int) -> torch.dtype:
    # Bytes fit by their dtype; only wider arrays have to be read.
    wide = []
    for a in arrays:
        if a is not None and a.dtype != np.uint8 and a.size > 0:
            wide.append(a)
    largest = max([top_k - 1, *(int(array.max()) for array in wide)])
    if largest < 2**8:
        return torch.uint8
    if largest < 2**15:
        return torch.int16
    return torch.int32


def _check_captured(op: str, captured: torch.Tensor, lengths: torch.Tensor) -> None:
    bad = captured > lengths
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"{op}: rollout_expert_indices: expected at most one route per token, got "
            f"{int(captured[row])} for {int(lengths[row])} tokens in row {row}"
        )


def _check_pad_token(pad_token_id: Any) -> int:
    is_number = isinstance(pad_token_id, (int, np.integer)) and not isinstance(pad_token_id, bool)
    if not is_number:
        raise TypeError(
            f"{OP}: pad_token_id: expected an int or a tokenizer that has one, got {pad_token_id!r}"
        )
    if not -(2**31) <= pad_token_id < 2**31:
        raise ValueError(f"{OP}: pad_token_id: expected an id of 32 bits, got {pad_token_id}")
    return int(pad_token_id)


def _with_rows(tensor: torch.Tensor, pad_size: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_empty(pad_size, *tensor.shape[1:])])
