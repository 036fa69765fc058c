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
            raise ValueError(f"{OP}: {field} must be None: steps with images cannot be merged")
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
    merged: dict[str, Any] = {
        "prompt_token_ids": [_copy_row(output["prompt_token_ids"][head]) for head in heads],
        "response_ids": _responses(output["prompt_token_ids"], output["response_ids"], plan),
        "loss_masks": _per_token("loss_masks", output["loss_masks"], plan, 0),
    }
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
        versions = np.minimum.reduceat(np.array(output["policy_versions"], np.int64), plan.heads)
        merged["policy_versions"] = versions.tolist()
    for field, value in output.items():
        if field not in merged:
            merged[field] = _last_step_values(field, value, ends, len(plan.joins))
    return cast(GeneratorOutput, {field: merged[field] for field in output})


def _copy_row(row: Any) -> Any:
    return list(row) if isinstance(row, (list, tuple)) else np.array(row)


def _responses(prompts: Sequence[Any], responses: Sequence[Any], plan: MergePlan) -> list[Any]:
    """Return M responses: the last step's prompt beyond the first one's, and its response."""
    ends = plan.ends.tolist()
    rows = [row[end] for end in ends for row in (prompts, responses)]
    begins = np.zeros(len(rows), dtype=np.int64)
    begins[::2] = plan.prompt_lengths[plan.heads]
    counts = np.empty_like(begins)
    starts = np.zeros_like(begins)
    counts[::2] = starts[1::2] = plan.prompt_lengths[plan.ends] - begins[::2]
    counts[1::2] = plan.response_lengths[plan.ends]
    targets = np.repeat(np.arange(len(ends)), 2)
    return _join("response_ids", rows, (begins, counts, starts, targets), plan, 0)


def _per_token(field: str, rows: Sequence[Any], plan: MergePlan, zero: float) -> list[Any]:
    """Return M rows of values per response token: the steps' values, zeros between."""
    pieces = (np.zeros_like(plan.kept), plan.kept, plan.starts, plan.merged_rows)
    return _join(field, rows, pieces, plan, zero)


def _join(
    field: str, rows: Sequence[Any], pieces: tuple[np.ndarray, ...], plan: MergePlan, zero: float
) -> list[Any]:
    """Return M rows joined from pieces of rows: lists if all rows are lists, else arrays."""
    lengths = plan.merged_response_lengths
    if all(issubclass(kind, (list, tuple)) for kind in set(map(type, rows))):
        return join_lists(OP, field, rows, pieces, lengths, zero)
    arrays = [np.asarray(row) for row in rows]
    # An empty row is float64 in NumPy, and would make all rows float64.
    dtype = np.result_type(*[array for array in arrays if len(array)] or [arrays[0]])
    merged = [np.zeros(length, dtype) for length in lengths.tolist()]
    for array, begin, count, start, target in zip(
        arrays, *map(np.ndarray.tolist, pieces), strict=True
    ):
        merged[target][start : start + count] = array[begin : begin + count]
    return merged


def _keep_sums(merged: Sequence[Any], rewards: Sequence[Any], plan: MergePlan) -> None:
    """Move rewards of tokens that were replaced to the token before them."""
    kept = plan.kept
    places = plan.reward_places
    targets = plan.merged_rows
    for row in np.flatnonzero(kept < plan.response_lengths).tolist():
        # Exact sums: merging must not change a return by a rounding error.
        merged[targets[row]][places[row]] += math.fsum(rewards[row][kept[row] :])


def _routes(rows: Sequence[Any], plan: MergePlan) -> list[Any]:
    """Return the recorded routes of each merged row, None if no step of it has any."""
    arrays = [None if row is None else np.asarray(row) for row in rows]
    counts = np.array([0 if a is None else len(a) for a in arrays], dtype=np.int64)
    begins, ends = plan.route_pieces(OP, counts)
    merged = []
    for head, last in zip(plan.heads.tolist(), plan.ends.tolist(), strict=True):
        pieces = [
            array[begins[row] : ends[row]]
            for row, array in enumerate(arrays[head : last + 1], start=head)
            if array is not None
        ]
        filled = [piece for piece in pieces if len(piece)] or pieces[:1]
        merged.append(np.concatenate(filled) if filled else None)
    return merged


def _kept_ids(rows: Sequence[Any], plan: MergePlan) -> list[list[Any]]:
    """Return the kept tokens of each merged row's response tokens; none for unsampled ones."""
    nothing = np.zeros(0, np.int32)
    merged = [[nothing] * length for length in plan.merged_response_lengths.tolist()]
    places = zip(plan.merged_rows.tolist(), plan.starts.tolist(), plan.kept.tolist(), strict=True)
    for row, (target, start, kept) in zip(rows, places, strict=True):
        merged[target][start : start + kept] = list(row)[:kept]
    return merged


def _last_step_values(field: str, value: Any, ends: Sequence[int], num_rows: int) -> Any:
    if field == TIME_SPLITS and value is not None:
        return {
            name: _last_step_values(f"{field}[{name!r}]", rows, ends, num_rows)
            for name, rows in value.items()
        }
    if value is None or isinstance(value, Mapping):
        return value
    if not hasattr(value, "__len__") or isinstance(value, str) or len(value) != num_rows:
        raise ValueError(
            f"{OP}: {field} must be a list with one entry per row ({num_rows}), a mapping or None, "
            f"got {type(value).__name__}"
        )
    return [value[end] for end in ends]
