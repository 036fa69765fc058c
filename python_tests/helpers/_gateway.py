"""Agents at a gateway in front of a scripted engine."""

import asyncio
import importlib.util
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fake_envs import Call, FakePrompt, ScriptedEngine, loop_config, says

from skyrl_fast.config import SamplingParams
from skyrl_fast.gateway import form_compiler
from skyrl_fast.gateway.agent import GatewayAgent
from skyrl_fast.gateway.agents.function import FunctionAgent
from skyrl_fast.gateway.agents.task import BlackBox
from skyrl_fast.gateway.policy import ServedPolicy
from skyrl_fast.gateway.server import LIMITS, Gateway, GatewayLimits
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.chat_template import ChatTemplate
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.group_runner import GroupRunner
from skyrl_fast.rollout.groups import run_groups
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.trajectory import Step, Trajectory

MODEL = "policy"
USER = {"role": "user", "content": "task"}


def skip_without_anthropic() -> None:
    """Skip a module's tests without this client, whose import takes 2 seconds."""
    if importlib.util.find_spec("anthropic") is None:
        pytest.skip("anthropic is not installed", allow_module_level=True)


@pytest.fixture
def uncompiled_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check forms as without vLLM's compiler, whose process takes 4 seconds to start."""
    monkeypatch.setattr(form_compiler, "COMPILER", "absent")


gateways: list[Gateway] = []  # the last one is that of the running test


@dataclass
class Played:
    """What came of a rollout of agents."""

    trajectories: list[Trajectory]
    engine: Any
    faults: Counter[str]  # of the gateway
    runner: GroupRunner
    logprobs: list[list[float]]  # of each step's response, by a given engine

    @property
    def only(self) -> Trajectory:
        (trajectory,) = self.trajectories
        return trajectory


def played(
    agent: Callable[..., Any] | BlackBox,
    tokenizer: Any,
    *,
    answer: Callable[[Call, int], Generation | Exception | None] | None = None,
    prompts: list[FakePrompt] | None = None,
    tool_parser: Any = None,
    reasoning_parser: Any = None,
    untrained_models: tuple[str, ...] = (),
    policies: tuple[str, ...] = (),
    upstreams: Any = None,
    phase: str = "train",
    chat_template: str | None = None,
    engine: Any = None,
    one_line: bool = False,
    takes_rewards: bool = True,
    limits: GatewayLimits = LIMITS,
    **config: Any,
) -> Played:
    """Run an agent, a function or a `BlackBox`, on each prompt.

    Args:
        answer: of the scripted engine; None: a0, a1, ... as its calls are.
        engine: in place of the scripted one; started and closed here.
        limits: of the gateway.
        config: of the generator.
    """
    if answer is None:
        answer = lambda call, n: says(tokenizer, f"a{n}")  # noqa: E731

    async def go() -> Played:
        sampling = SamplingParams(max_generate_length=64)
        settings = loop_config(**{"max_turns": 50, "sampling_params": sampling, **config})
        sampler = ScriptedEngine(answer) if engine is None else engine
        await sampler.start()
        if hasattr(agent, "patch"):
            agent.patch(sampler)
        board = ActivityBoard()
        policy = ServedPolicy(
            PolicyCalls(sampler, WeightGate(7), tokenizer, 1, policies),
            settings,
            ChatTemplate(tokenizer, chat_template, max_length=settings.max_input_length),
            board,
            policies[0] if policies else MODEL,
            untrained_models=untrained_models,
            upstreams=upstreams or {},
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            one_line=one_line,
            takes_rewards=takes_rewards,
        )
        gateway = Gateway(limits=limits)
        gateways.append(gateway)
        box = agent if hasattr(agent, "run") else FunctionAgent(agent)
        player = GatewayAgent(gateway, policy, box)
        await player.start()
        runner = GroupRunner(player, settings, board=board)
        try:
            trajectories = await run_groups(
                runner, prompts or [FakePrompt("p")], phase=phase, policy_version=7
            )
        finally:
            await player.close()
        again = [await _again(engine, step) for t in trajectories for step in t.steps]
        await sampler.close()
        return Played(trajectories, sampler, gateway.faults, runner, again)

    return asyncio.run(go())


async def _again(engine: Any, step: Step) -> list[float]:
    """Return the log-probabilities of a response, computed from the recorded tokens."""
    if engine is None:
        return []
    logprobs = await engine.prompt_logprobs(step.prompt_token_ids + step.response_ids)
    return logprobs[len(step.prompt_token_ids) - 1 :]


async def chat(task: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """Return the answer to a chat, by the official client."""
    return await task.async_openai.chat.completions.create(
        model=task.model, messages=messages, **options
    )


def says_length(tokenizer: Any) -> Callable[[Call, int], Any]:
    """Return answers that depend on the prompt alone: which call comes first may differ."""
    return lambda call, _: says(tokenizer, f"a{len(call.prompt_token_ids)}")


class with_waits(BlackBox):  # noqa: N801 - used like a function
    """An agent at an engine that waits before each answer."""

    def __init__(self, agent: Any, wait: Any) -> None:
        self._agent, self._wait = agent, wait

    async def run(self, task: Any) -> Any:
        return await FunctionAgent(self._agent).run(task)

    def patch(self, engine: Any) -> None:
        self.engine = engine
        generate = engine.generate

        async def waiting(*arguments: Any, **options: Any) -> Any:
            await self._wait()
            return await generate(*arguments, **options)

        engine.generate = waiting
