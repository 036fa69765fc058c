"""Rollouts of many prompts at once: each prompt's group of trajectories, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_fast.config import GeneratorConfig
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.agent_loop import AgentLoop
from skyrl_fast.rollout.engine.protocol import Sampler
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.failures import log_failures
from skyrl_fast.rollout.group_runner import GroupRunner
from skyrl_fast.rollout.loop_settings import PHASES, RolloutPrompt, check_loop_settings
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.tool_calls import ToolCallParser
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.system.tasks import gather_or_cancel


async def rollout(
    prompts: Sequence[RolloutPrompt],
    engine: Sampler,
    tokenizer: Any,
    env_factory: EnvFactory,
    config: GeneratorConfig,
    *,
    phase: str,
    policy_version: int,
    seed: int,
) -> list[Trajectory]:
    """Return every prompt's group of trajectories, ordered by prompt, then repetition.

    A trajectory whose environment or engine failed is retried `max_retries` times; then it is
    returned with its `failure` and without trainable rows, and the others continue. Failures are
    logged, also if every trajectory failed; `FailureWatch` decides when that ends a run.

    Args:
        prompts: one per group; uids differ.
        tokenizer: tokenizer of transformers, with a chat template and an end-of-sequence token.
        policy_version: number of weight updates that the engine's weights have had.
        seed: seed of the run; every request's seed follows from it and from its place in the run.

    Raises:
        ValueError: settings that cannot work, an unknown phase, two prompts of one uid, a
            tokenizer without end token.
        EngineDeadError: the engine died.
    """
    calls = PolicyCalls(engine, WeightGate(policy_version), tokenizer, seed)
    runner = environment_runner(calls, env_factory, config)
    trajectories = await run_groups(runner, prompts, phase=phase, policy_version=policy_version)
    log_failures(trajectories)
    return trajectories


def environment_runner(
    calls: PolicyCalls, env_factory: EnvFactory, config: GeneratorConfig, **options: Any
) -> GroupRunner:
    """Return a runner of groups in environments.

    Raises:
        ValueError: settings that cannot work, a tokenizer without end token, or no tool parser of
            that name.
    """
    if calls.tokenizer.eos_token_id is None:
        raise ValueError("rollout: tokenizer: it has no end-of-sequence token (eos_token)")
    check_loop_settings(config)
    name = config.tool_parser
    if name is None:
        tool_parser = None
    else:
        tool_parser = ToolCallParser(name, calls.tokenizer)
    board = options.pop("board", None) or ActivityBoard()
    loop = AgentLoop(calls, env_factory, config, board=board, tool_parser=tool_parser)
    return GroupRunner(loop, config, board=board, **options)


async def run_groups(
    runner: GroupRunner, prompts: Sequence[RolloutPrompt], *, phase: str, policy_version: int
) -> list[Trajectory]:
    """Return the trajectories of these prompts, in order; the first error cancels all of them.

    Errors are those of `rollout`.
    """
    if phase not in PHASES:
        raise ValueError(f"rollout: phase: expected one of {PHASES}, got {phase!r}")
    if len({prompt.uid for prompt in prompts}) != len(prompts):
        raise ValueError("rollout: prompts: two prompts have the same uid")
    groups = await gather_or_cancel(
        runner.group(prompt, phase=phase, policy_version=policy_version) for prompt in prompts
    )
    return [trajectory for group in groups for trajectory in group]
