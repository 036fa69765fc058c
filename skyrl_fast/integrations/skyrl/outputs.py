"""SkyRL's generator outputs: checked, concatenated, merged. N rows, one per step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch import generator_merge, generator_output
from skyrl_fast.integrations.skyrl import output_metrics
from skyrl_fast.integrations.skyrl.names import AUGUST, NEWEST
from skyrl_fast.integrations.skyrl.replacement import (
    ORIGINALS,
    UnsupportedInputError,
    replaces,
    require,
)

VALIDATE = "validate_generator_output"
CONCATENATE = "concatenate_generator_outputs"
MERGE = "merge_stepwise_output"
TIME_SPLITS = "trajectory_time_splits"
ROUTES = "rollout_expert_indices"
SUPPORT = "rollout_sample_support"
ALWAYS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks")
TIMES = "trajectory_generation_times"
# Optional fields of SkyRL's concatenation, by the version of its source.
OPTIONAL = {
    "0.3.0": ("stop_reasons", "rollout_logprobs", TIMES),
    AUGUST: ("stop_reasons", "rollout_logprobs", TIMES, TIME_SPLITS),
    NEWEST: ("stop_reasons", "rollout_logprobs", ROUTES, SUPPORT, TIMES, TIME_SPLITS),
}
NO_TOKEN = -1  # SkyRL's padding of the support
IMAGES = ("pixel_values", "image_grid_thw")
LISTED = ("loss_masks", "rollout_logprobs")  # SkyRL's merge returns their rows as lists
# The fields of a row that SkyRL's merge returns.
MERGED = (*ALWAYS, "stop_reasons", "rollout_logprobs", "trajectory_ids", "is_last_step")


@replaces(VALIDATE)
def validate_generator_output(
    num_prompts: int, generator_output: Any, step_wise: bool = False, routes_expected: bool = False
) -> None:
    """Check a generator output; `routes_expected` (since 0.4.0): training ones must have routes."""
    _check(num_prompts, generator_output, step_wise)
    missing = routes_expected and generator_output.get(ROUTES) is None
    require(not missing, "expected routes that are missing")


def _check(num_prompts: int, output: Any, step_wise: bool) -> None:
    """Return if SkyRL would accept the output; otherwise raise, and SkyRL's function decides."""
    require("rollout_logprobs" in output, "no rollout_logprobs key")
    for field in IMAGES:
        require(output.get(field) is None, "images")
    listed = [output[field] for field in ALWAYS]
    logprobs = output["rollout_logprobs"]
    if logprobs is not None:
        require(len(logprobs) > 0, "an empty list of rollout_logprobs")
        listed.append(logprobs)
    require(all(isinstance(rows, list) for rows in listed), "a field that is no list")
    kinds = set(map(type, output["rewards"]))
    require(kinds <= {list} or kinds <= {float, int}, "rewards of unsupported type")
    if step_wise:
        _check_ids(output)
    masks, _ = output_metrics.flat(output["loss_masks"], "loss masks", torch.uint8)
    require(bool(masks.any()), "loss masks that are all zero")
    generator_output_check = generator_output.validate_generator_output
    generator_output_check(output, num_prompts=num_prompts, step_wise=step_wise)
    try:
        check_side_channels(output, step_wise)
    except AssertionError as error:
        raise UnsupportedInputError(str(error)) from error


def check_side_channels(output: Any, step_wise: bool) -> None:
    """Check routes and support of sampled tokens by SkyRL's own function, which 0.4.0 added."""
    fields = [output.get(field) for field in (ROUTES, SUPPORT)]
    is_newest = ORIGINALS.function(VALIDATE) and ORIGINALS.label(VALIDATE) == NEWEST
    if not is_newest or fields == [None, None]:
        return
    num_rows = len(output["prompt_token_ids"])
    for rows in fields:
        if rows is not None:
            is_listed = isinstance(rows, list) and len(rows) == num_rows
            require(is_listed, "routes or support of unsupported form")
    ORIGINALS.namespace(VALIDATE)["_validate_per_token_side_channels"](output, step_wise)


def _check_ids(output: Any) -> None:
    last = output.get("is_last_step")
    require(isinstance(last, list), "is_last_step that is no list")
    require(set(map(type, last)) <= {bool}, "is_last_step of non-bools")
    ids = output.get("trajectory_ids")
    require(isinstance(ids, list), "trajectory_ids that are no list")
    for kind in set(map(type, ids)):
        require(hasattr(kind, "to_string"), "ids of unsupported type")
    instances = map(attrgetter("instance_id"), ids)
    require(set(map(type, instances)) <= {str}, "instance ids that are no strings")


@replaces(CONCATENATE)
def concatenate_generator_outputs(
    generator_outputs: Sequence[Any], step_wise: bool = False, routes_expected: bool = False
) -> dict[str, Any]:
    """Return one output with all rows and common metrics; `routes_expected` as in validation."""
    outputs = list(generator_outputs)
    optional = OPTIONAL[ORIGINALS.label(CONCATENATE)]
    result: dict[str, Any] = {}
    for field in ALWAYS:
        result[field] = _join([output[field] for output in outputs])
    for field in optional:
        parts = [output.get(field) for output in outputs]
        given = [part is not None for part in parts]
        if not any(given):
            result[field] = None
            continue
        require(all(given), f"{field} in some outputs only")
        result[field] = _join(parts)
    for field, value in outputs[0].items():
        if field not in result and isinstance(value, list):
            result[field] = _join([output[field] for output in outputs])
    times = result[TIMES]
    splits = result.get(TIME_SPLITS)
    if step_wise and result.get("is_last_step"):
        times = _last_step_values(times, result["is_last_step"])
        splits = _last_step_values(splits, result["is_last_step"])
    split_times = {}
    if TIME_SPLITS in optional:
        split_times[TIME_SPLITS] = splits
    metrics = output_metrics.get_rollout_metrics(
        result["response_ids"],
        result["rewards"],
        loss_masks=result["loss_masks"],
        trajectory_completion_times=times,
        **split_times,
    )
    metrics.update(_extra_metrics(outputs, metrics))
    result["rollout_metrics"] = metrics
    expected = {}
    if routes_expected:  # older versions lack it
        expected["routes_expected"] = True
    validate_generator_output(
        len(result["prompt_token_ids"]), result, step_wise=step_wise, **expected
    )
    return result


def _join(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        groups = {}
        for name in parts[0]:
            groups[name] = list(chain.from_iterable(part[name] for part in parts))
        return groups
    for part in parts:
        require(isinstance(part, list), "a field that is no list")
    return list(chain.from_iterable(parts))


def _last_step_values(values: Any, is_last_step: Sequence[bool]) -> Any:
    if isinstance(values, dict):
        return {name: _last_step_values(part, is_last_step) for name, part in values.items()}
    if not values:
        return values
    return [value for value, last in zip(values, is_last_step, strict=False) if last]


def _extra_metrics(outputs: list[Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that generators added themselves, combined by name as SkyRL does."""
    found: dict[str, list[Any]] = {}
    for output in outputs:
        for name, value in (output.get("rollout_metrics") or {}).items():
            if name not in known and isinstance(value, (int, float)):
                found.setdefault(name, []).append(value)
    joined: dict[str, Any] = {}
    for name, values in found.items():
        if "avg" in name or "mean" in name:
            joined[name] = sum(values) / len(values)
        elif "min" in name:
            joined[name] = min(values)
        else:
            if "max" in name:
                joined[name] = max(values)
            else:
                joined[name] = sum(values)
    return joined


@replaces(MERGE)
def merge_stepwise_output(generator_output: Any) -> dict[str, Any]:
    """Return the output with steps merged where the context only grew, as SkyRL's function."""
    output = generator_output
    optional = OPTIONAL[ORIGINALS.label(CONCATENATE)]
    for field in (ROUTES, *IMAGES):
        require(output.get(field) is None, f"{field}, which SkyRL refuses here")
    size = len(output["response_ids"])
    for field, value in output.items():
        if field != "rollout_metrics" and value is not None:
            is_group = isinstance(value, dict) and SUPPORT in optional
            for rows in value.values() if is_group else [value]:
                require(isinstance(rows, list), f"{field} that is no list")
                require(len(rows) == size, f"{field} of different length")
    for field in ("prompt_token_ids", "response_ids"):  # a tuple never equals a list's beginning
        kinds = set(map(type, output[field]))
        require(kinds <= {list}, f"{field} of unsupported type")
    given = {"rollout_logprobs": None, **output}
    _check(size, given, step_wise=True)
    steps = {}
    for field in MERGED:
        if given.get(field) is not None:
            steps[field] = given[field]
    for field in LISTED:
        kinds = set(map(type, steps.get(field, ())))
        if kinds - {list}:
            steps[field] = [list(row) for row in steps[field]]
    support = None
    if SUPPORT in optional:
        support = output.get(SUPPORT)
    merged = merge_steps_and_support(steps, support)
    merged = {**dict.fromkeys(optional), **merged}
    merged["rollout_metrics"] = output_metrics.get_rollout_metrics(
        merged["response_ids"], merged["rewards"], loss_masks=merged["loss_masks"]
    )
    return merged


def merge_steps_and_support(steps: dict[str, Any], support: Any) -> dict[str, Any]:
    """Return the merged output; `support` is SkyRL's, of the tokens that sampling could choose.

    Args:
        support: N arrays (response tokens, K), or None. Tokens that no step sampled get -1.
    """
    if support is None:
        return dict(generator_merge.merge_stepwise_output(steps))
    kinds = set()
    for rows in support:
        kinds.add((type(rows), rows.dtype.str, rows.shape[1:]))
    require(len(kinds) == 1, "support of several forms")
    first = support[0]
    require(first.ndim == 2 and first.dtype == np.int32, "support of unsupported form")
    width = first.shape[1]
    numbered = {**steps, "row": [*range(len(support))]}
    merged: dict[str, Any] = dict(generator_merge.merge_stepwise_output(numbered))
    prompts = steps["prompt_token_ids"]
    responses = steps["response_ids"]
    head = 0
    joined = []
    for last in merged.pop("row"):
        pieces = [support[head]]
        for row in range(head + 1, last + 1):
            known = len(prompts[row - 1]) + len(responses[row - 1])
            gap = len(prompts[row]) - known
            unsampled = np.full((gap, width), NO_TOKEN, first.dtype)
            pieces += [unsampled, support[row]]
        if len(pieces) == 1:
            joined.append(pieces[0])
        else:
            joined.append(np.concatenate(pieces))
        head = last + 1
    return {**merged, SUPPORT: joined}
