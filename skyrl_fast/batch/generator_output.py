"""SkyRL's generator output, a mapping of parallel lists, and its validation. N rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np

from skyrl_fast.batch.row_index import (
    bool_array,
    first_return,
    is_step_wise,
    row_lengths,
    run_starts,
    split_trajectory_ids,
    trajectory_keys,
)

logger = logging.getLogger(__name__)

PER_ROW_FIELDS = (
    "prompt_token_ids",
    "response_ids",
    "loss_masks",
    "rewards",
    "rollout_logprobs",
    "stop_reasons",
    "env_metrics",
    "trajectory_generation_times",
    "rollout_expert_indices",
    "rollout_kept_ids",
    "trajectory_ids",
    "is_last_step",
    "policy_versions",
    "env_classes",
    "data_sources",
)
TIME_SPLITS = "trajectory_time_splits"
REQUIRED_FIELDS = ("prompt_token_ids", "response_ids", "loss_masks", "rewards")


class TrajectoryID(NamedTuple):
    """Identifier of a trajectory: its prompt, and the number of the sample."""

    instance_id: str
    repetition_id: int


class GeneratorOutput(TypedDict, total=False):
    """Parallel lists, one entry per row. Only the first four are required.

    prompt_token_ids, response_ids: lists of ints or 1-D integer arrays. loss_masks: 0/1 per
    response token. rewards: one float per row or one per response token. rollout_logprobs: per
    response token; `[]` where the response is empty. stop_reasons, env_metrics,
    trajectory_generation_times: per row. trajectory_time_splits: name -> per row.
    rollout_expert_indices: per row an integer array [tokens, layers, experts per token].
    trajectory_ids, is_last_step: step-wise only. rollout_metrics: name -> number.
    policy_versions, env_classes, data_sources: per row; extensions of this package, as is
    rollout_kept_ids: per response token the ids that it was sampled from, see `Step.kept_ids`.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    loss_masks: list[list[int]]
    rewards: list[float] | list[list[float]]
    rollout_logprobs: list[list[float]] | None
    stop_reasons: list[str] | None
    env_metrics: list[dict[str, Any]] | None
    trajectory_generation_times: list[float] | None
    trajectory_time_splits: dict[str, list[float]] | None
    rollout_expert_indices: list[np.ndarray] | None
    trajectory_ids: list[TrajectoryID] | None
    is_last_step: list[bool] | None
    rollout_metrics: dict[str, Any]
    policy_versions: list[int] | None
    env_classes: list[str] | None
    data_sources: list[str | None] | None
    rollout_kept_ids: list[list[np.ndarray]] | None


def validate_generator_output(
    output: Mapping[str, Any], *, num_prompts: int | None = None, step_wise: bool | None = None
) -> None:
    """Check the output against the rules of training; warn if all loss masks are 0.

    Args:
        output: a generator output. A missing key and None are equivalent.
        num_prompts: number of prompts sent, repetitions included; without steps the output must
            have as many rows. None: not checked.
        step_wise: whether to apply the step-wise rules; None: if `is_last_step` is given.

    Raises:
        ValueError: the first violated rule, with the row.
    """
    op = "validate_generator_output"
    if step_wise is None:
        step_wise = is_step_wise(output)
    for field in REQUIRED_FIELDS:
        if output.get(field) is None:
            raise ValueError(f"{op}: {field}: expected it in the output, got none")
    num_rows = len(output["response_ids"])
    if num_rows == 0:
        raise ValueError(f"{op}: response_ids: expected at least one row, got none")
    if step_wise:
        for field in ("is_last_step", "trajectory_ids"):
            if output.get(field) is None:
                raise ValueError(f"{op}: {field}: expected it for step-wise training, got none")
    elif num_prompts is not None and num_rows != num_prompts:
        raise ValueError(
            f"{op}: response_ids: expected one row per prompt ({num_prompts}), got {num_rows}"
        )
    _check_row_counts(op, output, num_rows)
    if step_wise:
        _check_step_wise(op, output)
    _check_token_lists(op, output)
    if not _any_trained(output["loss_masks"]):
        logger.warning("%s: all %d loss masks are 0: nothing will be trained", op, num_rows)


def _check_row_counts(op: str, output: Mapping[str, Any], num_rows: int) -> None:
    counted = {field: output.get(field) for field in PER_ROW_FIELDS}
    splits = output.get(TIME_SPLITS) or {}
    for name, values in splits.items():
        counted[f"{TIME_SPLITS}[{name!r}]"] = values
    for field, values in counted.items():
        if values is not None and len(values) != num_rows:
            raise ValueError(
                f"{op}: {field}: expected one entry per row of response_ids ({num_rows}), "
                f"got {len(values)}"
            )


def _check_step_wise(op: str, output: Mapping[str, Any]) -> None:
    trajectory_ids = output["trajectory_ids"]
    last = bool_array(op, "is_last_step", output["is_last_step"])
    if not last[-1]:
        raise ValueError(
            f"{op}: is_last_step: expected True in the last row ({len(last) - 1}), got False"
        )
    instances, repetitions = split_trajectory_ids(op, trajectory_ids)
    keys = trajectory_keys(instances, repetitions)
    starts = run_starts(keys)
    row = first_return(keys)
    if row is not None:
        raise ValueError(
            f"{op}: trajectory_ids: expected rows of a trajectory next to each other, got "
            f"{trajectory_ids[row]!r} again in row {row}"
        )
    ends = np.append(starts[1:], True)
    wrong = np.flatnonzero(last != ends)
    if wrong.size:
        row = int(wrong[0])
        if ends[row]:
            why = "the next row has another trajectory id"
        else:
            why = "the trajectory continues"
        raise ValueError(
            f"{op}: is_last_step: expected {bool(ends[row])} in row {row}, because {why}, "
            f"got {bool(last[row])}"
        )
    group_ids = keys >> 32
    row = first_return(group_ids)
    if row is not None:
        raise ValueError(
            f"{op}: instance_id: expected rows of a group next to each other, got "
            f"{instances[row]!r} again in row {row}"
        )


def _check_token_lists(op: str, output: Mapping[str, Any]) -> None:
    lengths = row_lengths(op, "response_ids", output["response_ids"])
    prompts = row_lengths(op, "prompt_token_ids", output["prompt_token_ids"])
    fields = ["loss_masks"]
    if rewards_are_per_token(op, output["rewards"]):
        fields.append("rewards")
    if output.get("rollout_logprobs") is not None:
        fields.append("rollout_logprobs")
    for field in fields:
        got = row_lengths(op, field, output[field])
        wrong = np.flatnonzero(got != lengths)
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(
                f"{op}: {field}: expected as many entries as the response has "
                f"({lengths[row]} tokens) in row {row}, got {got[row]}"
            )
    if output.get("rollout_expert_indices") is not None:
        captured = []
        for rows in output["rollout_expert_indices"]:
            captured.append(() if rows is None else rows)
        got = row_lengths(op, "rollout_expert_indices", captured)
        wrong = np.flatnonzero(got > prompts + lengths)
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(
                f"{op}: rollout_expert_indices: expected at most one entry per token "
                f"({prompts[row] + lengths[row]}) in row {row}, got {got[row]}"
            )


def rewards_are_per_token(op: str, rewards: Sequence[Any]) -> bool:
    """Return whether each row's reward is a list (or 1-D array), rather than a number."""
    kinds = set(map(type, rewards))
    if kinds <= {float, int, bool}:
        return False
    if kinds <= {list, tuple}:
        return True
    ranks = [_reward_rank(r) for r in rewards]
    first = ranks[0]
    wrong = [row for row, rank in enumerate(ranks) if rank not in (0, 1) or rank != first]
    if not wrong:
        return first == 1
    row = wrong[0]
    kind = type(rewards[0]).__name__
    other = type(rewards[row]).__name__
    raise ValueError(
        f"{op}: rewards: expected one float per row or one list of floats per row, got a "
        f"{kind} in row 0 and a {other} in row {row}"
    )


def _reward_rank(reward: Any) -> int:
    if isinstance(reward, (list, tuple)):
        return 1
    if isinstance(reward, (float, int, np.number)):
        return 0
    return int(getattr(reward, "ndim", -1))  # -1: neither a number nor an array


def _any_trained(loss_masks: Iterable[Any]) -> bool:
    for mask in loss_masks:
        if isinstance(mask, (list, tuple)):
            is_trained = any(mask)
        else:
            is_trained = bool(mask.any())
        if is_trained:
            return True
    return False
