"""The gateway's policy and agent from the settings of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_fast.config import AgentConfig, GeneratorConfig
from skyrl_fast.config.upstream import upstreams_of
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.chat_template import ChatTemplate
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.reasoning import ReasoningParser
from skyrl_fast.rollout.tool_calls import ToolCallParser
from skyrl_fast.rollout.workers.processes import ProcessWorkers
from skyrl_fast.system.importing import absolute_name

if TYPE_CHECKING:
    from skyrl_fast.gateway.agent import GatewayAgent
    from skyrl_fast.gateway.agents.task import BlackBox
    from skyrl_fast.gateway.policy import ServedPolicy

PACKAGES = ("starlette", "uvicorn", "pydantic", "httpx", "msgspec", "xxhash")


def check_packages() -> None:
    missing = []
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            missing.append(name)
    if missing:
        raise ValueError(
            f"agent: the gateway needs {', '.join(missing)}: pip install 'skyrl-fast[gateway]'"
        )


def black_box(settings: AgentConfig) -> BlackBox:
    """Return the function or command of the settings, and where it runs.

    Raises:
        ValueError: it cannot be imported, or a package is missing.
    """
    check_packages()
    from skyrl_fast.gateway.agents.processes import AgentProcesses, AgentSettings

    name = settings.function
    hosts = AgentSettings(
        None if name is None else absolute_name(name, Path.cwd()),
        list(settings.command),
        list(settings.verifier),
        settings.reward_file,
    )
    agent = hosts.agent()
    if settings.workers == "process":
        return AgentProcesses(ProcessWorkers(hosts))
    return agent


def gateway_agent(
    settings: AgentConfig,
    calls: PolicyCalls,
    config: GeneratorConfig,
    *,
    one_line: bool = False,
    agent: BlackBox | None = None,
) -> GatewayAgent:
    """Return the agent of the settings at a gateway that is not started.

    Args:
        one_line: whether a trajectory's calls must follow each other, for estimators per turn.
        agent: None: a new one of the settings.

    Raises:
        ValueError: the agent cannot be imported, a package is missing, a tokenizer without end
            token, or no tool parser of that name.
    """
    agent = agent or black_box(settings)
    from skyrl_fast.gateway.agent import GatewayAgent
    from skyrl_fast.gateway.server import Gateway

    policy = gateway_policy(settings, calls, config, one_line=one_line)
    return GatewayAgent(Gateway(host=settings.host, port=settings.port), policy, agent)


def gateway_policy(
    settings: AgentConfig, calls: PolicyCalls, config: GeneratorConfig, *, one_line: bool = False
) -> ServedPolicy:
    """Return what all sessions share; arguments and errors as of `gateway_agent`."""
    from skyrl_fast.gateway.policy import ServedPolicy

    tokenizer = calls.tokenizer
    if tokenizer.eos_token_id is None:
        raise ValueError("agent: tokenizer: it has no end-of-sequence token (eos_token)")
    name = config.tool_parser
    thoughts = config.reasoning_parser
    if name is None:
        tool_parser = None
    else:
        tool_parser = ToolCallParser(name, tokenizer)
    if thoughts is None:
        reasoning_parser = None
    else:
        reasoning_parser = ReasoningParser(thoughts, tokenizer)
    return ServedPolicy(
        calls,
        config,
        ChatTemplate(
            tokenizer,
            config.chat_template,
            config.chat_template_kwargs,
            max_length=config.max_input_length,
        ),
        ActivityBoard(),
        calls.policies[0] if calls.policies else settings.model,
        untrained_models=tuple(settings.untrained_models),
        upstreams=upstreams_of(settings.upstreams),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        one_line=one_line,
        takes_rewards=not settings.verifier,
    )
