"""Trajectories of finished jobs of Harbor, from the rollout details of their agents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_fast.rollout.env.answers import read_reward
from skyrl_fast.rollout.trajectory import STOP, Step, Trajectory

RESULT = "result.json"
LISTS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def read_job(folder: str | Path, *, reward: str = "reward") -> list[Trajectory]:
    """Return a trajectory for each trial of a job, groups adjacent, for `batch_from_trajectories`.

    Trials of one task are a group. Each call that the agent recorded is a step, those of summaries
    and sub-agents, too; the reward is the last step's. A trial with an exception, without a reward
    or without calls is a failed trajectory.

    Args:
        folder: of a job, with a folder for each trial.
        reward: the reward that is trained; of a trial with a single one that one is.

    Raises:
        ValueError: there is no trial, or a result is malformed: tokens without log-probabilities,
            as of agents that record a part of their calls.
    """
    paths = sorted(Path(folder).glob(f"*/{RESULT}"))
    if not paths:
        raise ValueError(f"read_job: expected folders with {RESULT} in {folder}, got none")
    groups: dict[str, list[Trajectory]] = {}
    numbers: Counter[str] = Counter()
    for path in paths:
        try:
            result = json.loads(path.read_text())
            uid = str(result["task_name"])
            trajectory = _trajectory(result, uid, numbers[uid], reward)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"read_job: {path}: {type(error).__name__}: {error}") from error
        numbers[uid] += 1
        groups.setdefault(uid, []).append(trajectory)
    return [trajectory for group in groups.values() for trajectory in group]


def _trajectory(result: Mapping[str, Any], uid: str, number: int, name: str) -> Trajectory:
    trajectory = Trajectory(uid=uid, repetition_id=number, env_class="harbor")
    agent_results = [result.get("agent_result")]
    for part in result.get("step_results") or []:
        agent_results.append(part.get("agent_result"))
    for agent_result in agent_results:
        for details in (agent_result or {}).get("rollout_details") or []:
            trajectory.steps += _steps(details)
    error = result.get("exception_info")
    if error:
        trajectory.failure = f"{error['exception_type']}: {error['exception_message']}"
        return trajectory
    verifier_result = result.get("verifier_result") or {}
    rewards = dict(verifier_result.get("rewards") or {})
    if len(rewards) == 1:
        (name,) = rewards
    if name not in rewards:
        names = ", ".join(rewards) or "none"
        trajectory.failure = f"expected a reward called {name!r}, got {names}"
    elif not trajectory.steps:
        trajectory.failure = "expected rollout details of the agent, got none"
    else:
        trajectory.steps[-1].reward = read_reward(rewards.pop(name), name)
        trajectory.env_metrics = rewards
    return trajectory


def _steps(details: Mapping[str, Any]) -> Iterator[Step]:
    """Yield the calls of one of the agent's conversations."""
    lists = [details.get(name) or [] for name in LISTS]
    counts = {len(values) for values in lists}
    if len(counts) > 1:
        found = ", ".join(
            f"{len(values)} {name}" for name, values in zip(LISTS, lists, strict=True)
        )
        raise ValueError(f"rollout_details: expected one of each for every call, got {found}")
    for prompt, response, logprobs in zip(*lists, strict=True):
        if len(response) != len(logprobs):
            raise ValueError(
                f"rollout_details: expected a log-probability for each of {len(response)} tokens, "
                f"got {len(logprobs)}"
            )
        yield Step(
            prompt_token_ids=prompt,
            response_ids=response,
            loss_mask=[1] * len(response),
            rollout_logprobs=logprobs,
            reward=0.0,
            stop_reason=STOP,
            policy_version=0,
            text="",
            observation="",
            llm_seconds=0.0,
            env_seconds=0.0,
        )
