"""SkyRL's generator output from trajectories, for training in SkyRL. N rows, one per step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from skyrl_fast.batch.from_trajectories import (
    batch_from_trajectories,
    logprobs_in_all_or_none,
    stop_reasons_of,
)
from skyrl_fast.batch.generator_output import GeneratorOutput, TrajectoryID
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.metrics.rollouts import trajectory_metrics

OP = "generator_output_from_trajectories"


def generator_output_from_trajectories(trajectories: Sequence[Trajectory]) -> GeneratorOutput:
    """Return the rows of these trajectories, one per step, in order.

    A trajectory that failed or has no steps becomes one row with an empty response and reward 0,
    so that its group keeps its size. The last row has the trajectory's stop reason; times and
    environment metrics are the trajectory's, repeated on each of its rows.

    Raises:
        ValueError: no trajectories, or log-probabilities in only some steps.
    """
    if not trajectories:
        raise ValueError(f"{OP}: trajectories: expected at least one, got none")
    steps = [t.steps_or_placeholder() for t in trajectories]
    rows = list(chain.from_iterable(steps))
    owners = [t for t, turns in zip(trajectories, steps, strict=True) for _ in turns]
    output: GeneratorOutput = {
        "prompt_token_ids": [list(s.prompt_token_ids) for s in rows],
        "response_ids": [s.response_ids for s in rows],
        "loss_masks": [s.loss_mask for s in rows],
        "rewards": [float(s.reward) for s in rows],
        "rollout_logprobs": logprobs_in_all_or_none(OP, rows),
        "stop_reasons": stop_reasons_of(trajectories, steps),
        "env_metrics": [t.env_metrics for t in owners],
        "trajectory_generation_times": [t.seconds for t in owners],
        "trajectory_time_splits": {
            "llm": [t.llm_seconds for t in owners],
            "env": [t.env_seconds for t in owners],
        },
        "rollout_expert_indices": _expert_indices(rows),
        "trajectory_ids": [TrajectoryID(t.uid, t.repetition_id) for t in owners],
        "is_last_step": [k + 1 == len(turns) for turns in steps for k in range(len(turns))],
        "policy_versions": [s.policy_version for s in rows],
        "env_classes": [t.env_class for t in owners],
        "data_sources": [t.data_source for t in owners],
    }
    if any(step.kept_ids is not None for step in rows):
        output["rollout_kept_ids"] = [step.kept_ids or [] for step in rows]
    output["rollout_metrics"] = {
        **trajectory_metrics(trajectories, batch_from_trajectories(trajectories)),
        "generate/num_failed_trajectories": float(sum(t.failure is not None for t in trajectories)),
    }
    return output


def _expert_indices(rows: Sequence[Step]) -> list[np.ndarray] | None:
    captured = [s.expert_indices for s in rows]
    shape = next((c.shape[1:] for c in captured if c is not None), None)
    if shape is None:
        return None
    empty = np.zeros((0, *shape), dtype=np.uint8)
    return [empty if c is None else c for c in captured]
