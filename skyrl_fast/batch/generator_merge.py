"""Merging of steps in a generator output; lists in, lists out. N rows become M."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from skyrl_fast.batch.generator_output import (
    TIME_SPLITS,
    GeneratorOutput,
    rewards_are_per_token,
    validate_generator_output,
)
from skyrl_fast.batch.row_index import row_index
from skyrl_fast.ops.merge.steps import MAX_DRIFT_TOKENS, MergePlan, join_lists, merge_steps

OP = "merge_stepwise_output"
IMAGES = ("pixel_values", "image_grid_thw")


def merge_stepwise_output(
    generator_output: Mapping[str, Any],
    *,
    drift: str = "fork",
    max_drift_tokens: int = MAX_DRIFT_TOKENS,
) -> GeneratorOutput:
    """Return the output with consecutive steps of a trajectory merged where contexts only grew.

    A merged row has the first step's prompt; its response is the rest of the last step's prompt
    and response. Tokens that no step sampled have mask, log-probability and token reward 0. Fields
    with one value per row (scalar rewards, stop reasons, times, environment metrics, unknown
    fields) are the last step's, `policy_versions` the oldest. The lists are new; `rollout_metrics`
    are kept, as they describe the steps. Callers that keep uids separately get them as
    `[t.instance_id for t in merged["trajectory_ids"]]`.

    Args:
        generator_output: step-wise, with `trajectory_ids` and `is_last_step`. Rows that are arrays
            become arrays.
        drift, max_drift_tokens: handling of prompts that differ from the tokens before in the last
            few, see `ops.merge.steps.merge_steps`.

    Raises:
        TypeError: a token id that is not an integer.
        ValueError: as `validate_generator_output`; images; a field that is not a list of N; fewer
            routes of experts than an earlier step recorded.

    Example:
        >>> steps = {"prompt_token_ids": [[1], [1, 2, 9]], "response_ids": [[2], [3]],
        ...          "loss_masks": [[1], [1]], "rewards": [0.0, 1.0],
        ...          "trajectory_ids": [("a", 0), ("a", 0)], "is_last_step": [False, True]}
        >>> merged = merge_stepwise_output(steps)
        >>> merged["response_ids"], merged["loss_masks"], merged["rewards"]
        ([[2, 9, 3]], [[1, 0, 1]], [1.0])
    """
    output = generator_output
    validate_generator_output(output, step_wise=True)
    for field in IMAGES:
        if output.get(field) is not None:
            raise ValueError(f"{OP}: {field}: expected None, as steps with images cannot be merged")
    plan = merge_steps(
        output["prompt_token_ids"],
        output["response_ids"],
        row_index(OP, output, step_wise=True).trajectory_ids,
        loss_masks=output["loss_masks"],
        drift=drift,
        max_drift_tokens=max_drift_tokens,
    )
    heads = plan.heads.tolist()
    ends = plan.ends.tolist()
    prompts = output["prompt_token_ids"]
    merged: dict[str, Any] = {}
    responses = output["response_ids"]
    masks = output["loss_masks"]
    merged["prompt_token_ids"] = [_copy_row(prompts[head]) for head in heads]
    merged["response_ids"] = _responses(prompts, responses, plan)
    merged["loss_masks"] = _per_token("loss_masks", masks, plan, 0)
    if output.get("rollout_logprobs") is not None:
        merged["rollout_logprobs"] = _per_token(
            "rollout_logprobs", output["rollout_logprobs"], plan, 0.0
        )
    if rewards_are_per_token(OP, output["rewards"]):
        merged["rewards"] = _per_token("rewards", output["rewards"], plan, 0.0)
        _keep_sums(merged["rewards"], output["rewards"], plan)
    if output.get("rollout_expert_indices") is not None:
        merged["rollout_expert_indices"] = _routes(output["rollout_expert_indices"], plan)
    if output.get("rollout_kept_ids") is not None:
        merged["rollout_kept_ids"] = _kept_ids(output["rollout_kept_ids"], plan)
    if output.get("policy_versions") is not None:
        versions = np.array(output["policy_versions"], np.int64)
        oldest = np.minimum.reduceat(versions, plan.heads)
        merged["policy_versions"] = oldest.tolist()
    num_rows = len(plan.joins)
    for field, value in output.items():
        if field not in merged:
            merged[field] = _last_step_values(field, value, ends, num_rows)
    in_order = {field: merged[field] for field in output}
    return cast(GeneratorOutput, in_order)


def _copy_row(row: Any) -> Any:
    if isinstance(row, (list, tuple)):
        return list(row)
    return np.array(row)


def _responses(prompts: Sequence[Any], responses: Sequence[Any], plan: MergePlan) -> list[Any]:
    """Return M responses: the last step's prompt beyond the first one's, and its response."""
    ends = plan.ends.tolist()
    rows = []
    for end in ends:
        rows.append(prompts[end])
        rows.append(responses[end])
    # Pieces by turns: of a prompt, of the response after it.
    first_prompts = plan.prompt_lengths[plan.heads]
    added = plan.prompt_lengths[plan.ends] - first_prompts
    begins = np.zeros(len(rows), dtype=np.int64)
    begins[::2] = first_prompts
    counts = np.empty_like(begins)
    counts[::2] = added
    counts[1::2] = plan.response_lengths[plan.ends]
    starts = np.zeros_like(begins)
    starts[1::2] = added
    numbers = np.arange(len(ends))
    targets = np.repeat(numbers, 2)
    pieces = (begins, counts, starts, targets)
    return _join("response_ids", rows, pieces, plan, 0)


def _per_token(field: str, rows: Sequence[Any], plan: MergePlan, zero: float) -> list[Any]:
    """Return M rows of values per response token: the steps' values, zeros between."""
    pieces = (np.zeros_like(plan.kept), plan.kept, plan.starts, plan.merged_rows)
    return _join(field, rows, pieces, plan, zero)


def _join(
    field: str, rows: Sequence[Any], pieces: tuple[np.ndarray, ...], plan: MergePlan, zero: float
) -> list[Any]:
    """Return M rows joined from pieces of rows: lists if all rows are lists, else arrays."""
    lengths = plan.merged_response_lengths
    kinds = set(map(type, rows))
    if all(issubclass(kind, (list, tuple)) for kind in kinds):
        return join_lists(OP, field, rows, pieces, lengths, zero)
    arrays = [np.asarray(row) for row in rows]
    # An empty row is float64 in NumPy, and would make all rows float64.
    typed = [array for array in arrays if len(array)]
    dtype = np.result_type(*typed or [arrays[0]])
    merged = []
    for length in lengths.tolist():
        merged.append(np.zeros(length, dtype))
    numbers = [piece.tolist() for piece in pieces]
    for array, begin, count, start, target in zip(arrays, *numbers, strict=True):
        row = merged[target]
        row[start : start + count] = array[begin : begin + count]
    return merged


def _keep_sums(merged: Sequence[Any], rewards: Sequence[Any], plan: MergePlan) -> None:
    """Move rewards of tokens that were replaced to the token before them."""
    kept = plan.kept
    places = plan.reward_places
    targets = plan.merged_rows
    is_cut = kept < plan.response_lengths
    for row in np.flatnonzero(is_cut).tolist():
        # Exact sums: merging must not change a return by a rounding error.
        cut = rewards[row][kept[row] :]
        moved = math.fsum(cut)
        target = merged[targets[row]]
        target[places[row]] += moved


def _routes(rows: Sequence[Any], plan: MergePlan) -> list[Any]:
    """Return the recorded routes of each merged row, None if no step of it has any."""
    arrays: list[np.ndarray | None] = []
    counts = []
    for recorded in rows:
        if recorded is None:
            arrays.append(None)
            counts.append(0)
        else:
            routes = np.asarray(recorded)
            arrays.append(routes)
            counts.append(len(routes))
    num_routes = np.array(counts, dtype=np.int64)
    begins, ends = plan.route_pieces(OP, num_routes)
    merged: list[Any] = []
    heads = plan.heads.tolist()
    lasts = plan.ends.tolist()
    for head, last in zip(heads, lasts, strict=True):
        pieces = []
        for row in range(head, last + 1):
            array = arrays[row]
            if array is not None:
                begin = begins[row]
                end = ends[row]
                pieces.append(array[begin:end])
        filled = [piece for piece in pieces if len(piece)]
        if pieces:
            joined = filled or pieces[:1]
            merged.append(np.concatenate(joined))
        else:
            merged.append(None)
    return merged


def _kept_ids(rows: Sequence[Any], plan: MergePlan) -> list[list[Any]]:
    """Return the kept tokens of each merged row's response tokens; none for unsampled ones."""
    nothing = np.zeros(0, np.int32)
    merged = []
    for length in plan.merged_response_lengths.tolist():
        merged.append([nothing] * length)
    targets = plan.merged_rows.tolist()
    starts = plan.starts.tolist()
    counts = plan.kept.tolist()
    for row, target, start, count in zip(rows, targets, starts, counts, strict=True):
        values = list(row)
        of_target = merged[target]
        of_target[start : start + count] = values[:count]
    return merged


def _last_step_values(field: str, value: Any, ends: Sequence[int], num_rows: int) -> Any:
    if field == TIME_SPLITS and value is not None:
        splits = {}
        for name, rows in value.items():
            place = f"{field}[{name!r}]"
            splits[name] = _last_step_values(place, rows, ends, num_rows)
        return splits
    if value is None or isinstance(value, Mapping):
        return value
    is_list = hasattr(value, "__len__") and not isinstance(value, str)
    if not is_list or len(value) != num_rows:
        raise ValueError(
            f"{OP}: {field}: expected a list with one entry for each of {num_rows} rows, a mapping "
            f"or None, got {type(value).__name__}"
        )
    return [value[end] for end in ends]
