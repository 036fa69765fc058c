"""Flat arrays of a batch from the lists of a generator output.

N rows, S tokens, A response tokens, E captured routes, L layers, K experts per token.

Design: docs/design/006-step-batch.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch.generator_output import rewards_are_per_token, validate_generator_output
from skyrl_fast.batch.row_index import row_index
from skyrl_fast.batch.segments import segment_sums
from skyrl_fast.ops import _backend, _ragged
from skyrl_fast.ops._ragged import INT32_MAX
from skyrl_fast.ops.merge.steps import MergePlan, merge_steps

OP = "StepBatch.from_generator_output"
TOKENS = ("prompt_token_ids", "response_ids")


def columns_of_output(
    output: Mapping[str, Any],
    *,
    uids: Sequence[str] | Sequence[int] | None = None,
    num_prompts: int | None = None,
    step_wise: bool | None = None,
    merge: bool = False,
) -> dict[str, Any]:
    """Return the fields of a `StepBatch`; arguments and errors as its `from_generator_output`.

    With `merge`, steps are merged while they are read (drift "fork"); of prompts and responses only
    those of the last step of each merged row are read. The output must have no `rollout_kept_ids`.
    """
    validate_generator_output(output, num_prompts=num_prompts, step_wise=step_wise)
    index = row_index(OP, output, uids, step_wise=step_wise)
    names = _token_fields(output)
    of_steps = {name: output[name] for name in names}
    fields = _ragged.read_fields(OP, of_steps)
    plan = None
    # First and last step of each row; without merging a row is both.
    every = np.arange(len(index.group_ids))
    heads = every
    ends = every
    response_lengths = fields["response_ids"].lengths
    cu_responses = offsets(response_lengths)
    response_starts = cu_responses[:-1].to(torch.int64)
    if merge:
        # The tokens of a merged row are the prompt and response of its last step: earlier prompts,
        # which are most of all tokens, are compared and never copied.
        prompts = output["prompt_token_ids"]
        responses = output["response_ids"]
        plan = merge_steps(prompts, responses, index.trajectory_ids)
        heads = plan.heads
        ends = plan.ends
        cu_responses = offsets(torch.from_numpy(plan.merged_response_lengths))
        row_starts = cu_responses[plan.merged_rows]
        response_starts = row_starts + torch.from_numpy(plan.starts)
        last_steps = {}
        for name in TOKENS:
            last_steps[name] = _at(output[name], ends)
        fields |= _ragged.read_fields(OP, last_steps)
    prompt_lengths = fields["prompt_token_ids"].lengths
    response_lengths = fields["response_ids"].lengths
    cu_seqlens = offsets(prompt_lengths + response_lengths)
    num_responses = int(cu_responses[-1])
    flat = flat_values(OP, fields, cu_seqlens, response_starts, num_responses, gaps=merge)
    scalars = None
    if "rewards" not in flat:
        scalars = _at(output["rewards"], ends)
    per_token = flat.get("rewards")
    rewards, row_rewards = _rewards(scalars, per_token, cu_responses)
    versions = torch.zeros(len(ends), dtype=torch.int32, device="cpu")
    given_versions = output.get("policy_versions")
    if given_versions is not None:
        each = np.array(given_versions, np.int32)
        oldest = _oldest(each, heads)
        versions = torch.from_numpy(oldest)
    stop_reasons = None
    given_reasons = output.get("stop_reasons")
    if given_reasons is not None:
        of_ends = _at(given_reasons, ends)
        stop_reasons = tuple(of_ends)
    routes = output.get("rollout_expert_indices")
    experts, cu_experts = flat_experts(OP, routes, plan)
    kept_rows = output.get("rollout_kept_ids")
    num_kept, kept_ids, cu_kept = flat_kept_ids(OP, kept_rows, cu_responses)
    return {
        "tokens": flat["tokens"],
        "cu_seqlens": cu_seqlens,
        "cu_responses": cu_responses,
        "loss_mask": flat["loss_masks"],
        "rewards": rewards,
        "row_rewards": row_rewards,
        "group_ids": torch.from_numpy(index.group_ids[ends]),
        "trajectory_ids": torch.from_numpy(index.trajectory_ids[ends]),
        "is_last_step": torch.from_numpy(index.is_last_step[ends]),
        "policy_version": versions,
        "uids": index.uids,
        "stop_reasons": stop_reasons,
        "reward_per_row": scalars is not None,
        "rollout_logprobs": flat.get("rollout_logprobs"),
        "expert_indices": experts,
        "cu_experts": cu_experts,
        "num_kept": num_kept,
        "kept_ids": kept_ids,
        "cu_kept": cu_kept,
    }


def _oldest(versions: np.ndarray, heads: np.ndarray) -> np.ndarray:
    if len(heads) == len(versions):
        return versions
    return np.minimum.reduceat(versions, heads)


def _token_fields(output: Mapping[str, Any]) -> list[str]:
    names = ["prompt_token_ids", "response_ids", "loss_masks"]
    if rewards_are_per_token(OP, output["rewards"]):
        names.append("rewards")
    if output.get("rollout_logprobs") is not None:
        names.append("rollout_logprobs")
    return names


def _at(rows: Sequence[Any], index: np.ndarray) -> Sequence[Any]:
    if len(index) == len(rows):
        return rows
    return [rows[row] for row in index.tolist()]


def flat_values(
    op: str,
    fields: Mapping[str, _ragged.Field],
    cu_seqlens: torch.Tensor,
    response_starts: torch.Tensor,
    num_responses: int,
    *,
    gaps: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the flat values of all fields, read in one pass; prompt and response are joined.

    Args:
        response_starts: (N,) offset of each row's values per response token.
        gaps: some of the A elements belong to no row and are set to 0.
    """
    num_tokens = int(cu_seqlens[-1])
    tokens = _backend.empty((num_tokens,), torch.int32)
    # A row is its prompt, then its response. All fields are copied by one call, which checks every
    # value as it goes.
    prompt_starts = cu_seqlens[:-1].to(torch.int64)
    starts = {
        "prompt_token_ids": prompt_starts,
        "response_ids": prompt_starts + fields["prompt_token_ids"].lengths,
    }
    copies: list[tuple[Any, ...]] = []
    for name, first in starts.items():
        copies += _ragged.copy_jobs(fields[name], tokens, first, 0, INT32_MAX)
    flat = {"tokens": tokens}
    for name in (name for name in fields if name not in starts):
        is_mask = name == "loss_masks"
        dtype = torch.uint8 if is_mask else torch.float32
        out = _backend.empty((num_responses,), dtype)
        if gaps:
            out.zero_()
        flat[name] = out
        bounds = (0, 1) if is_mask else ()
        copies += _ragged.copy_jobs(fields[name], out, response_starts, *bounds)
    _ragged.fill(op, copies)
    return flat


def offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Return the (N + 1,) offsets of rows of these lengths: int32, or int64 if needed."""
    cu = _ragged.offsets(lengths)
    if int(cu[-1]) <= INT32_MAX:
        return cu.to(torch.int32)
    return cu


def _rewards(
    rewards: Sequence[Any] | None, per_token: torch.Tensor | None, cu_responses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (A,) rewards per token and (N,) per row, from either form."""
    if per_token is not None:
        sums = segment_sums(per_token.numpy(), cu_responses.numpy(), np.float64)
        rounded = sums.astype(np.float32)
        return per_token, torch.from_numpy(rounded)
    values = np.array(rewards, dtype=np.float32)
    per_row = torch.from_numpy(values)
    return rewards_on_last_tokens(per_row, cu_responses), per_row


def rewards_on_last_tokens(per_row: torch.Tensor, cu_responses: torch.Tensor) -> torch.Tensor:
    """Return (A,) float32: each row's reward on its last response token, 0 elsewhere."""
    num_responses = int(cu_responses[-1])
    flat = torch.zeros(num_responses, dtype=torch.float32, device="cpu")
    filled = cu_responses.diff() > 0
    ends = cu_responses[1:]
    last_tokens = ends[filled].long() - 1
    flat[last_tokens] = per_row[filled]
    return flat


def flat_experts(
    op: str, rows: Sequence[Any] | None, plan: MergePlan | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (E, L, K) routes of all rows, or merged rows, and their (N + 1,) offsets."""
    if rows is None:
        return None, None
    arrays: list[np.ndarray | None] = []
    for row in rows:
        if row is None or len(row) == 0:
            arrays.append(None)
        else:
            arrays.append(np.asarray(row))
    recorded = [array for array in arrays if array is not None]
    if not recorded:
        return None, None
    shape = recorded[0].shape[1:]
    for row, array in enumerate(arrays):
        if array is None:
            continue
        is_integer = array.dtype.kind in "iu"
        if not is_integer or array.ndim != 3 or array.shape[1:] != shape:
            raise ValueError(
                f"{op}: rollout_expert_indices: expected integers [tokens, {shape[0]}, "
                f"{shape[-1]}] in row {row}, got {array.dtype} {list(array.shape)}"
            )
    # Routes are the largest column: layers times experts for each token.
    largest = [int(array.max()) for array in recorded]
    dtype = routes_dtype(max(largest))
    counts = np.zeros(len(arrays), dtype=np.int64)
    for number, array in enumerate(arrays):
        if array is not None:
            counts[number] = len(array)
    begins = np.zeros_like(counts)
    ends = counts
    if plan is not None:
        begins, ends = plan.route_pieces(op, counts)
        of_steps = ends - begins
        counts = np.add.reduceat(of_steps, plan.heads)
    pieces = []
    for number, array in enumerate(arrays):
        if array is not None:
            begin = begins[number]
            end = ends[number]
            piece = array[begin:end]
            pieces.append(piece.astype(dtype, copy=False))
    routes = torch.from_numpy(np.concatenate(pieces))
    cu_experts = offsets(torch.from_numpy(counts))
    return routes, cu_experts


def routes_dtype(largest: int) -> type[np.integer[Any]]:
    """Return the smallest dtype of routes that holds a number of an expert."""
    for dtype in (np.uint8, np.int16):
        if largest <= np.iinfo(dtype).max:
            return dtype
    return np.int32


def flat_kept_ids(
    op: str, rows: Sequence[Sequence[Any] | None] | None, cu_responses: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the columns `num_kept`, `kept_ids` and `cu_kept` of a batch; None without kept tokens.

    Args:
        rows: for each of N rows a sequence of ids per response token; None or no sequence where
            all of its tokens were sampled from the vocabulary.
    """
    if rows is None:
        return None, None, None
    lengths = cu_responses.diff().tolist()
    has_ids = any(row is not None and len(row) > 0 for row in rows)
    if not has_ids:
        return None, None, None
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row and len(row) != length:
            raise ValueError(
                f"{op}: kept_ids: expected one entry per response token ({length}) in row "
                f"{number}, got {len(row)}"
            )
    vocabulary = np.zeros(0, np.int32)
    flat: list[np.ndarray] = []
    for row, length in zip(rows, lengths, strict=True):
        if not row:
            flat += [vocabulary] * length
            continue
        for one in row:
            flat.append(np.asarray(one, dtype=np.int32))
    counts = [len(one) for one in flat]
    num_kept = np.array(counts, dtype=np.int32)
    sums = np.cumsum(num_kept, dtype=np.int64)
    cu_tokens = np.concatenate([[0], sums])
    cu_rows = cu_tokens[cu_responses.numpy()]
    row_counts = torch.from_numpy(np.diff(cu_rows))
    ids = torch.from_numpy(np.concatenate(flat))
    return torch.from_numpy(num_kept), ids, offsets(row_counts)
