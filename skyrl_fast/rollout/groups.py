"""Rollouts of many prompts at once: each prompt's group of trajectories, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from skyrl_fast.rollout.agent_loop import AgentLoop
from skyrl_fast.rollout.engine import Engine
from skyrl_fast.rollout.env import EnvFactory
from skyrl_fast.rollout.failures import log_failures
from skyrl_fast.rollout.rollout_config import PHASES, RolloutConfig, RolloutPrompt
from skyrl_fast.rollout.trajectory import Trajectory


async def rollout(
    prompts: Sequence[RolloutPrompt],
    engine: Engine,
    tokenizer: Any,
    env_factory: EnvFactory,
    config: RolloutConfig,
    *,
    phase: str,
    policy_version: int,
    seed: int,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Every prompt's group of trajectories, ordered by prompt, then repetition.

    A trajectory whose environment or engine failed is tried again `max_retries` times; then it
    stays with its `failure` named and without trainable rows, and the others go on. Failures are
    logged, also when every trajectory failed; `FailureWatch` tells when that is too often.

    Args:
        prompts: one per group; uids differ.
        engine: started.
        tokenizer: of transformers, with a chat template and an end-of-sequence token.
        env_factory: makes the environments.
        config: of the loop.
        phase: "train" or "eval".
        policy_version: number of weight updates behind the engine's weights.
        seed: of the run; every request's own seed follows from it and from its place in the run.
        on_trajectory: called with each trajectory as it ends, in order of completion.

    Raises:
        ValueError: an unknown phase, two prompts of one uid, a tokenizer without end token.
        EngineDeadError: the engine is gone.
    """
    if phase not in PHASES:
        raise ValueError(f"rollout: phase: wanted one of {PHASES}, got {phase!r}")
    if len({prompt.uid for prompt in prompts}) != len(prompts):
        raise ValueError("rollout: prompts: two prompts have the same uid")
    if tokenizer.eos_token_id is None:
        raise ValueError("rollout: tokenizer: it has no end-of-sequence token (eos_token)")
    loop = AgentLoop(
        engine,
        tokenizer,
        env_factory,
        config,
        phase=phase,
        policy_version=policy_version,
        seed=seed,
    )
    slots = asyncio.Semaphore(config.max_concurrent_trajectories)

    async def one(prompt: RolloutPrompt, repetition_id: int) -> Trajectory:
        async with slots:
            trajectory = await loop.run(prompt, repetition_id)
        if on_trajectory is not None:
            on_trajectory(trajectory)
        return trajectory

    async with _first_error() as tasks:
        running = [
            tasks.create_task(one(prompt, repetition_id))
            for prompt in prompts
            for repetition_id in range(config.samples(phase))
        ]
    trajectories = [task.result() for task in running]
    log_failures(trajectories)
    return trajectories


class _first_error:  # noqa: N801 - used like a function
    """A task group that raises the first error itself instead of a group of errors."""

    def __init__(self) -> None:
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> asyncio.TaskGroup:
        return await self._tasks.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._tasks.__aexit__(*error)
        except* Exception as group:
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            failure = first
        else:
            return
        raise failure
