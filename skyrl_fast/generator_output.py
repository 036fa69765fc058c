"""The mapping of parallel lists that rollouts hand to training: made, checked, concatenated.

N rows, one per step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import numpy as np

from skyrl_fast.batch.row_index import (
    bool_array,
    dense_ids,
    is_step_wise,
    row_lengths,
    run_starts,
    split_trajectory_ids,
    trajectory_keys,
)
from skyrl_fast.metrics import rollout_metrics

if TYPE_CHECKING:
    from skyrl_fast.rollout.trajectory import Step, Trajectory

logger = logging.getLogger(__name__)

STUB_PROMPT = (0,)  # the one attended token of a row that stands for a trajectory without steps
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
    "trajectory_ids",
    "is_last_step",
    "policy_versions",
    "env_classes",
    "data_sources",
)
TIME_SPLITS = "trajectory_time_splits"
REQUIRED_FIELDS = ("prompt_token_ids", "response_ids", "loss_masks", "rewards")


class TrajectoryID(NamedTuple):
    """Name of one trajectory: its prompt, and which sample of it."""

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
    policy_versions, env_classes, data_sources: per row; this package's own.
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


# --- making ------------------------------------------------------------------------------------


def generator_output_from_trajectories(trajectories: Sequence[Trajectory]) -> GeneratorOutput:
    """Return the rows of these trajectories, one per step, in order.

    A trajectory that failed or has no steps becomes one row with an empty response and reward 0,
    so that its group keeps its size. The last row carries what ended the trajectory; times and
    environment metrics are the trajectory's, repeated on each of its rows.

    Args:
        trajectories: those of one group adjacent.

    Raises:
        ValueError: no trajectories, or log-probabilities in some steps only.
    """
    if not trajectories:
        raise ValueError("generator_output_from_trajectories: trajectories must not be empty")
    steps = [_steps_or_stub(t) for t in trajectories]
    rows = [step for own in steps for step in own]
    owners = [t for t, own in zip(trajectories, steps, strict=True) for _ in own]
    last = [k + 1 == len(own) for own in steps for k in range(len(own))]
    splits = [_time_split(t) for t in trajectories]
    output: GeneratorOutput = {
        "prompt_token_ids": [s.prompt_token_ids for s in rows],
        "response_ids": [s.response_ids for s in rows],
        "loss_masks": [s.loss_mask for s in rows],
        "rewards": [float(s.reward) for s in rows],
        "rollout_logprobs": _optional_field("rollout_logprobs", rows),
        "stop_reasons": [
            t.stop_reason if end else s.stop_reason
            for t, s, end in zip(owners, rows, last, strict=True)
        ],
        "env_metrics": [t.env_metrics for t in owners],
        "trajectory_generation_times": [t.seconds for t in owners],
        "trajectory_time_splits": {
            name: [split[name] for split, own in zip(splits, steps, strict=True) for _ in own]
            for name in ("llm", "env")
        },
        "rollout_expert_indices": _expert_indices(rows),
        "trajectory_ids": [TrajectoryID(t.uid, t.repetition_id) for t in owners],
        "is_last_step": last,
        "policy_versions": [s.policy_version for s in rows],
        "env_classes": [t.env_class for t in owners],
        "data_sources": [t.data_source for t in owners],
    }
    output["rollout_metrics"] = {
        **rollout_metrics(output),
        "generate/num_failed_trajectories": float(sum(t.failure is not None for t in trajectories)),
    }
    return output


def _steps_or_stub(trajectory: Trajectory) -> list[Step]:
    if trajectory.steps and trajectory.failure is None:
        return trajectory.steps
    from skyrl_fast.rollout.trajectory import Step

    first = trajectory.steps[0] if trajectory.steps else None
    return [
        Step(
            prompt_token_ids=first.prompt_token_ids if first else list(STUB_PROMPT),
            response_ids=[],
            loss_mask=[],
            rollout_logprobs=[],
            reward=0.0,
            stop_reason=trajectory.stop_reason,
            policy_version=first.policy_version if first else 0,
            text="",
            observation="",
            llm_seconds=0.0,
            env_seconds=0.0,
        )
    ]


def _time_split(trajectory: Trajectory) -> dict[str, float]:
    return {
        "llm": sum(s.llm_seconds for s in trajectory.steps),
        "env": sum(s.env_seconds for s in trajectory.steps),
    }


def _optional_field(field: str, rows: Sequence[Step]) -> list[Any] | None:
    values = [getattr(s, field) for s in rows]
    given = [v is not None for v, s in zip(values, rows, strict=True) if s.response_ids]
    if not any(given) and (given or all(v is None for v in values)):
        return None
    if not all(given):
        row = next(i for i, v in enumerate(values) if v is None)
        raise ValueError(
            f"generator_output_from_trajectories: {field} must be there in every step or in none, "
            f"but row {row} has none"
        )
    return [[] if v is None else v for v in values]


def _expert_indices(rows: Sequence[Step]) -> list[np.ndarray] | None:
    captured = [s.expert_indices for s in rows]
    shape = next((c.shape[1:] for c in captured if c is not None), None)
    if shape is None:
        return None
    nothing = np.zeros((0, *shape), dtype=np.uint8)
    return [nothing if c is None else c for c in captured]


# --- checking ----------------------------------------------------------------------------------


def validate_generator_output(
    output: Mapping[str, Any], *, num_prompts: int | None = None, step_wise: bool | None = None
) -> None:
    """Check the rules that training relies on; a batch whose loss masks are all 0 is only warned.

    Args:
        output: a generator output. A missing key and None mean the same.
        num_prompts: how many prompts (repetitions included) were sent; on the default path as many
            rows must have come back. None: not checked.
        step_wise: whether the step-wise rules hold; None: where `is_last_step` is given.

    Raises:
        ValueError: the first rule that is broken, with the row that breaks it.
    """
    op = "validate_generator_output"
    step_wise = is_step_wise(output) if step_wise is None else step_wise
    for field in REQUIRED_FIELDS:
        if output.get(field) is None:
            raise ValueError(f"{op}: {field} must be there, got none")
    num_rows = len(output["response_ids"])
    if num_rows == 0:
        raise ValueError(f"{op}: response_ids must have at least one row, got none")
    if step_wise:
        for field in ("is_last_step", "trajectory_ids"):
            if output.get(field) is None:
                raise ValueError(f"{op}: {field} must be there for step-wise training, got none")
    elif num_prompts is not None and num_rows != num_prompts:
        raise ValueError(
            f"{op}: response_ids must have one row per prompt ({num_prompts}), got {num_rows}"
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
    counted.update({f"{TIME_SPLITS}[{name!r}]": v for name, v in splits.items()})
    for field, values in counted.items():
        if values is not None and len(values) != num_rows:
            raise ValueError(
                f"{op}: {field} must have one entry per row of response_ids ({num_rows}), "
                f"got {len(values)}"
            )


def _check_step_wise(op: str, output: Mapping[str, Any]) -> None:
    trajectory_ids = output["trajectory_ids"]
    last = bool_array(op, "is_last_step", output["is_last_step"])
    if not last[-1]:
        raise ValueError(
            f"{op}: is_last_step must be True in the last row ({len(last) - 1}), got False"
        )
    instances, repetitions = split_trajectory_ids(op, trajectory_ids)
    keys = trajectory_keys(instances, repetitions)
    starts = run_starts(keys)
    row = _first_return(keys, starts)
    if row is not None:
        raise ValueError(
            f"{op}: rows of one trajectory must be adjacent, but trajectory_ids "
            f"{trajectory_ids[row]!r} returns in row {row}"
        )
    ends = np.append(starts[1:], True)
    wrong = np.flatnonzero(last != ends)
    if wrong.size:
        row = int(wrong[0])
        why = "the next row has another trajectory id" if ends[row] else "the trajectory goes on"
        raise ValueError(
            f"{op}: is_last_step must be {bool(ends[row])} in row {row}, because {why}, "
            f"got {bool(last[row])}"
        )
    group_ids = keys >> 32
    row = _first_return(group_ids, run_starts(group_ids))
    if row is not None:
        raise ValueError(
            f"{op}: rows of one group must be adjacent, but instance_id {instances[row]!r} "
            f"returns in row {row}"
        )


def _first_return(ids: np.ndarray, starts: np.ndarray) -> int | None:
    """Return the first row that starts a run of an id seen in an earlier run, or None."""
    heads = np.flatnonzero(starts)
    if dense_ids(ids[heads]).max() + 1 == len(heads):
        return None
    first_of_id = np.unique(ids[heads], return_index=True)[1]
    returned = np.ones(len(heads), dtype=bool)
    returned[first_of_id] = False
    return int(heads[np.flatnonzero(returned)[0]])


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
                f"{op}: {field} must be as long as the response ({lengths[row]} tokens) in row "
                f"{row}, got {got[row]}"
            )
    if output.get("rollout_expert_indices") is not None:
        captured = [() if rows is None else rows for rows in output["rollout_expert_indices"]]
        got = row_lengths(op, "rollout_expert_indices", captured)
        wrong = np.flatnonzero(got > prompts + lengths)
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(
                f"{op}: rollout_expert_indices must have at most one entry per token "
                f"({prompts[row] + lengths[row]}) in row {row}, got {got[row]}"
            )


def rewards_are_per_token(op: str, rewards: Sequence[Any]) -> bool:
    """Return whether each row's reward is a list (or 1-D array), rather than a number.

    Raises:
        ValueError: a mixture, or something that is neither.
    """
    kinds = set(map(type, rewards))
    if kinds <= {float, int, bool}:
        return False
    if kinds <= {list, tuple}:
        return True
    ranks = [_reward_rank(r) for r in rewards]
    if set(ranks) <= {0} or set(ranks) <= {1}:
        return ranks[0] == 1
    row = next(i for i, rank in enumerate(ranks) if rank not in (0, 1) or rank != ranks[0])
    raise ValueError(
        f"{op}: rewards must be one float per row or one list of floats per row, never a mixture; "
        f"row 0 is a {type(rewards[0]).__name__}, row {row} a {type(rewards[row]).__name__}"
    )


def _reward_rank(reward: Any) -> int:
    if isinstance(reward, (list, tuple)):
        return 1
    if isinstance(reward, (float, int, np.number)):
        return 0
    return int(getattr(reward, "ndim", -1))  # -1: no number and no array


def _any_trained(loss_masks: Iterable[Any]) -> bool:
    return any(
        any(mask) if isinstance(mask, (list, tuple)) else bool(mask.any()) for mask in loss_masks
    )


# --- concatenating -----------------------------------------------------------------------------


def concatenate_generator_outputs(
    outputs: Sequence[Mapping[str, Any]], *, step_wise: bool | None = None
) -> GeneratorOutput:
    """Return one output with the rows of all, in order, and metrics computed anew from them.

    Fields that are lists are joined, also those that this package does not know. Metrics that a
    generator wrote itself are dropped: a percentile or a ratio cannot be averaged.

    Args:
        outputs: at least one.
        step_wise: as for `validate_generator_output`, which checks the result.

    Raises:
        ValueError: no outputs, a field that only some have, or a result that breaks a rule.
    """
    op = "concatenate_generator_outputs"
    if not outputs:
        raise ValueError(f"{op}: outputs must not be empty")
    fields = dict.fromkeys(
        key
        for output in outputs
        for key, value in output.items()
        if isinstance(value, (list, tuple, np.ndarray))
        or (key == TIME_SPLITS and value is not None)
    )
    result: dict[str, Any] = {}
    for field in fields:
        parts = [output.get(field) for output in outputs]
        missing = next((i for i, part in enumerate(parts) if part is None), None)
        if missing is not None:
            raise ValueError(
                f"{op}: {field} must be in all outputs or in none, but output {missing} has none"
            )
        if field == TIME_SPLITS:
            result[field] = _join_mappings(op, field, cast(list[Mapping[str, Any]], parts))
        else:
            result[field] = list(chain.from_iterable(cast(list[list[Any]], parts)))
    validate_generator_output(result, step_wise=step_wise)
    result["rollout_metrics"] = rollout_metrics(result)
    return cast(GeneratorOutput, result)


def _join_mappings(op: str, field: str, parts: list[Mapping[str, Any]]) -> dict[str, list[Any]]:
    for i, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            raise ValueError(
                f"{op}: {field} must have the same keys in all outputs, got "
                f"{sorted(parts[0])} in output 0 and {sorted(part)} in output {i}"
            )
    return {name: list(chain.from_iterable(p[name] for p in parts)) for name in parts[0]}
