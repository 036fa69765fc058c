"""SkyRL's generator outputs: checked, concatenated, merged. N rows, one per step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from skyrl_fast.batch import generator_merge, generator_output
from skyrl_fast.integrations.skyrl import output_metrics
from skyrl_fast.integrations.skyrl.names import NEWEST
from skyrl_fast.integrations.skyrl.replacement import ORIGINALS, replaces, require

VALIDATE = "validate_generator_output"
CONCATENATE = "concatenate_generator_outputs"
MERGE = "merge_stepwise_output"
TIME_SPLITS = "trajectory_time_splits"
ALWAYS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks")
OPTIONAL = ("stop_reasons", "rollout_logprobs", "trajectory_generation_times")
IMAGES = ("pixel_values", "image_grid_thw")
LISTED = ("loss_masks", "rollout_logprobs")  # SkyRL's merge returns their rows as lists
# The fields of a row that SkyRL's merge returns.
MERGED = (*ALWAYS, "stop_reasons", "rollout_logprobs", "trajectory_ids", "is_last_step")


@replaces(VALIDATE)
def validate_generator_output(
    num_prompts: int, generator_output: Any, step_wise: bool = False
) -> None:
    """Check a generator output, as SkyRL's function of that name.

    Args:
        num_prompts: the required number of rows, on the default path.
        generator_output: SkyRL's mapping of lists.
        step_wise: whether to check the step-wise rules.

    Raises:
        AssertionError, RuntimeError, KeyError: SkyRL's.
    """
    _check(num_prompts, generator_output, step_wise)


def _check(num_prompts: int, output: Any, step_wise: bool) -> None:
    """Return if SkyRL would accept the output; otherwise raise, and SkyRL's function decides."""
    require("rollout_logprobs" in output, "no rollout_logprobs key")
    require(all(output.get(field) is None for field in IMAGES), "images")
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


def _check_ids(output: Any) -> None:
    last = output.get("is_last_step")
    require(isinstance(last, list) and set(map(type, last)) <= {bool}, "is_last_step of non-bools")
    ids = output.get("trajectory_ids")
    require(isinstance(ids, list), "trajectory_ids that are no list")
    require(
        all(hasattr(kind, "to_string") for kind in set(map(type, ids))), "ids of unsupported type"
    )
    kinds = set(map(type, map(attrgetter("instance_id"), ids)))
    require(kinds <= {str}, "instance ids that are no strings")


@replaces(CONCATENATE)
def concatenate_generator_outputs(
    generator_outputs: Sequence[Any], step_wise: bool = False
) -> dict[str, Any]:
    """Return one output with the rows of all and their common metrics, as SkyRL's function.

    Args:
        generator_outputs: at least one.
        step_wise: whether the result must follow the step-wise rules.

    Raises:
        ValueError, AssertionError, KeyError: SkyRL's.
    """
    outputs = list(generator_outputs)
    newest = ORIGINALS.label(CONCATENATE) == NEWEST
    result: dict[str, Any] = {}
    for field in ALWAYS:
        result[field] = _joined([output[field] for output in outputs])
    for field in (*OPTIONAL, TIME_SPLITS) if newest else OPTIONAL:
        parts = [output.get(field) for output in outputs]
        given = [part is not None for part in parts]
        require(all(given) or not any(given), f"{field} in some outputs only")
        result[field] = _joined(parts) if all(given) else None
    for field, value in outputs[0].items():
        if field not in result and isinstance(value, list):
            result[field] = _joined([output[field] for output in outputs])
    times, splits = result["trajectory_generation_times"], result.get(TIME_SPLITS)
    if step_wise and result.get("is_last_step"):
        times = _last_step_values(times, result["is_last_step"])
        splits = _last_step_values(splits, result["is_last_step"])
    metrics = output_metrics.get_rollout_metrics(
        result["response_ids"],
        result["rewards"],
        loss_masks=result["loss_masks"],
        trajectory_completion_times=times,
        **({"trajectory_time_splits": splits} if newest else {}),
    )
    metrics.update(_extra_metrics(outputs, metrics))
    result["rollout_metrics"] = metrics
    validate_generator_output(len(result["prompt_token_ids"]), result, step_wise=step_wise)
    return result


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {name: list(chain.from_iterable(p[name] for p in parts)) for name in parts[0]}
    require(all(isinstance(part, list) for part in parts), "a field that is no list")
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
            joined[name] = max(values) if "max" in name else sum(values)
    return joined


@replaces(MERGE)
def merge_stepwise_output(generator_output: Any) -> dict[str, Any]:
    """Return the output with steps merged where the context only grew, as SkyRL's function.

    Args:
        generator_output: a valid step-wise output.

    Raises:
        AssertionError, KeyError: SkyRL's.
    """
    output = generator_output
    for field in ("rollout_expert_indices", *IMAGES):
        require(output.get(field) is None, f"{field}, which SkyRL refuses here")
    for field, value in output.items():
        if field != "rollout_metrics" and value is not None:
            require(isinstance(value, list), f"{field} that is no list")
            require(len(value) == len(output["response_ids"]), f"{field} of different length")
    for field in ("prompt_token_ids", "response_ids"):  # a tuple never equals a list's beginning
        require(set(map(type, output[field])) <= {list}, f"{field} of unsupported type")
    given = {"rollout_logprobs": None, **output}
    _check(len(output["response_ids"]), given, step_wise=True)
    steps = {field: given[field] for field in MERGED if given.get(field) is not None}
    for field in LISTED:
        if field in steps and set(map(type, steps[field])) != {list}:
            steps[field] = [list(row) for row in steps[field]]
    merged = dict(generator_merge.merge_stepwise_output(steps))
    empty = dict.fromkeys((*OPTIONAL, *([TIME_SPLITS] if _has_splits() else [])))
    merged = {**empty, **merged}
    merged["rollout_metrics"] = output_metrics.get_rollout_metrics(
        merged["response_ids"], merged["rewards"], loss_masks=merged["loss_masks"]
    )
    return merged


def _has_splits() -> bool:
    return ORIGINALS.label(CONCATENATE) == NEWEST
