"""The record of a trajectory's line: first what a person reads, then the tokens.

Design: docs/design/015-trajectory-store-and-viewer.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from skyrl_fast.rollout.token_ids import count_shared, ids_array
from skyrl_fast.rollout.trajectory import ACT, Step, Trajectory
from skyrl_fast.trajectory_store.lines import json_value, round_decimals
from skyrl_fast.trajectory_store.replay import list_replay_needs, replay_values
from skyrl_fast.trajectory_store.token_text import TokenText
from skyrl_fast.trajectory_store.trained import TrainedStep

FORMAT = 1
_SECOND_DECIMALS = 4


def trajectory_record(
    trajectory: Trajectory,
    text: TokenText,
    *,
    phase: str,
    step: int,
    trained: Sequence[TrainedStep] = (),
    trainer_version: int | None = None,
    with_replay: bool = False,
    sums_rewards: bool = False,
) -> dict[str, Any]:
    """Return the values of a trajectory's line; docs/spec.md, section 14, lists the keys.

    Args:
        step: number of the training batch, or the step after which the evaluation ran.
        trained: one per step; empty for an evaluation and for a trajectory that was replaced by a
            placeholder row.
        trainer_version: version of the policy that was trained; None: it was not trained.
        with_replay: whether to include kept ids and routes, which make lines several times longer.
        sums_rewards: whether the outcome is a sum, as of `Trajectory.outcome`.
    """
    steps = trajectory.steps
    shared_lengths = _count_shared(steps)
    responses = [text.decode_with_ends(item.response_ids) for item in steps]
    oldest = min((item.policy_version for item in steps), default=None)
    staleness = None
    if trainer_version is not None and oldest is not None:
        staleness = trainer_version - oldest
    evaluated = phase == "eval"
    values = [
        _token_values(item, trained[number] if trained else None, evaluated)
        for number, item in enumerate(steps)
    ]
    needed = list_replay_needs(steps)
    if with_replay:
        replay = replay_values(steps)
    else:
        replay = ({} for _ in steps)
    return {
        "format": FORMAT,
        "phase": phase,
        "step": step,
        "uid": trajectory.uid,
        "repetition_id": trajectory.repetition_id,
        "env_class": trajectory.env_class,
        "data_source": trajectory.data_source or "",
        "reward": json_value(trajectory.outcome(sums_rewards=sums_rewards)),
        "advantage": _advantage(trained),
        "stop_reason": trajectory.stop_reason,
        "failure": trajectory.failure or "",
        "filtered": _was_filtered(steps, trained),
        "policy_version": oldest,
        "staleness": staleness,
        "seconds": round(trajectory.seconds, _SECOND_DECIMALS),
        "env_metrics": _env_metrics(trajectory),
        **({"failure_trace": trace} if (trace := trajectory.failure_trace) else {}),
        **({"policy_rewards": rewards} if (rewards := trajectory.policy_rewards) else {}),
        **_other_calls(trajectory),
        **({"not_stored": needed} if needed and not with_replay else {}),
        "turns": [
            {
                "context": text.decode(item.prompt_token_ids[shared:]),
                "response": response,
                "observation": item.observation,
                "reward": json_value(float(item.reward)),
                "stop_reason": item.stop_reason,
                "prompt_tokens": len(item.prompt_token_ids),
                "response_tokens": len(item.response_ids),
                "trained_tokens": 0 if evaluated else sum(value["loss_mask"]),
                "policy_version": item.policy_version,
                "llm_seconds": round(item.llm_seconds, _SECOND_DECIMALS),
                "env_seconds": round(item.env_seconds, _SECOND_DECIMALS),
                **({} if item.policy is None else {"policy": item.policy}),
                **({} if item.kind == ACT else {"kind": item.kind}),
                **place,
            }
            for item, shared, (response, _), value, place in zip(
                steps, shared_lengths, responses, values, _places(steps), strict=True
            )
        ],
        "tokens": [
            {
                "prompt_shared": shared,
                "prompt_token_ids": list(item.prompt_token_ids[shared:]),
                "response_ids": list(item.response_ids),
                "response_ends": ends,
                **value,
                **more,
            }
            for item, shared, (_, ends), value, more in zip(
                steps, shared_lengths, responses, values, replay, strict=True
            )
        ],
    }


def _places(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Return `number`, `parent` and `state` of steps that are not those of one conversation."""
    places: list[dict[str, Any]] = []
    before: Step | None = None
    for index, step in enumerate(steps):
        if before is None:
            usual_parent = None
        else:
            usual_parent = before.number
        if before is None:
            usual_state = None
        else:
            usual_state = before.observation
        is_usual_place = step.number == index and step.parent == usual_parent
        is_usual_state = usual_state in (None, step.state)
        if step.number is None or (is_usual_place and is_usual_state):
            places.append({})
        else:
            place = {"number": step.number, "parent": step.parent, "state": step.state}
            places.append({name: json_value(value) for name, value in place.items()})
        before = step
    return places


def _other_calls(trajectory: Trajectory) -> dict[str, Any]:
    calls = []
    for call in trajectory.other_calls:
        calls.append({**asdict(call), "seconds": round(call.seconds, _SECOND_DECIMALS)})
    return {"other_calls": calls} if calls else {}


def _env_metrics(trajectory: Trajectory) -> Any:
    """Return the environment's metrics; a marker if they contain themselves or `str` fails."""
    try:
        return json_value(trajectory.env_metrics)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return {"unreadable": type(error).__name__}


def _count_shared(steps: Sequence[Step]) -> list[int]:
    result: list[int] = []
    before = np.zeros(0, np.int32)
    for step in steps:
        prompt = ids_array(step.prompt_token_ids)
        result.append(count_shared(prompt, before))
        before = np.concatenate([prompt, ids_array(step.response_ids)])
    return result


def _token_values(step: Step, trained: TrainedStep | None, evaluated: bool) -> dict[str, list[Any]]:
    """Return the lists per response token; a list that was not computed is empty."""
    if evaluated:
        mask = list(step.loss_mask)
    else:
        mask = [0] * len(step.response_ids)
    return {
        "loss_mask": mask if trained is None else trained.loss_mask.tolist(),
        "policy_versions": list(step.token_versions or []),
        "rollout_logprobs": round_decimals(step.rollout_logprobs or []),
        "trainer_logprobs": []
        if trained is None
        else _unless_all_missing(trained.trainer_logprobs),
        "advantages": [] if trained is None else _unless_all_missing(trained.advantages),
    }


def _unless_all_missing(values: np.ndarray) -> list[float | None]:
    numbers = round_decimals(values)
    if numbers.count(None) == len(numbers):
        return []
    return numbers


def _advantage(trained: Sequence[TrainedStep]) -> float | None:
    """Return the advantage of the last step's first response token."""
    # Outcome estimators give it to all tokens; for others it is the advantage where the trajectory
    # ends.
    if not trained or not len(trained[-1].advantages):
        return None
    return round_decimals(trained[-1].advantages[:1])[0]


def _was_filtered(steps: Sequence[Step], trained: Sequence[TrainedStep]) -> bool:
    return any(
        sum(step.loss_mask) > int(values.loss_mask.sum())
        for step, values in zip(steps, trained, strict=False)
    )
