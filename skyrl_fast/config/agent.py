"""Settings of agents that call the policy through the gateway."""
# ruff: noqa: RUF009 - setting() returns dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl_fast.config.upstream import upstreams_of
from skyrl_fast.setting import ConfigError, setting


@dataclass(slots=True)
class AgentConfig:
    """An agent with an OpenAI or Anthropic client, in place of an environment."""

    function: str | None = setting(
        None,
        "agent: module:function or file.py:function, called with an AgentTask, which returns a "
        "reward, a mapping with reward and metrics, or null (posted rewards only)",
    )
    command: list[str] = setting(
        [],
        "agent: program and arguments, run for each task in a folder of its own with "
        "OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and "
        "SKYRL_FAST_TASK, a JSON file with the row. Reward: 1 for exit code 0, else 0",
    )
    verifier: list[str] = setting(
        [], "command that runs after agent.command in its folder, and gives the reward in its place"
    )
    reward_file: str | None = setting(
        None, "JSON file in the folder of agent.command with the reward, in place of the exit code"
    )
    model: str = setting(
        "policy",
        "name under which the agent calls the policy; not used with "
        "trainer.policy.model.lora.policies, of which the first is `AgentTask.model`",
    )
    untrained_models: list[str] = setting(
        [],
        "names whose calls are sampled from the policy, too, but not trained, such as a judge's; "
        "with trainer.policy.model.lora.policies from the model without an adapter",
    )
    upstreams: dict[str, Any] = setting(
        {},
        "other models, by the name that the agent calls: each with base_url (of an "
        "OpenAI-compatible server, with /v1), api_key (such as ${oc.env:JUDGE_KEY}) and model, its "
        "name there. Their calls are shown, and not trained",
    )
    workers: str = setting(
        "thread",
        "where agents run. thread: functions in the trainer's event loop and threads; process: a "
        "process for each trajectory, which is killed at its deadline. A command has processes in "
        "any case",
        choices=("thread", "process"),
    )
    host: str | None = setting(None, "address at which the gateway listens; null: 127.0.0.1")
    port: int = setting(0, "port of the gateway; 0: a free one", at_least=0, at_most=65535)

    @property
    def is_set(self) -> bool:
        """Whether an agent is trained in place of an environment's loop."""
        return self.function is not None or bool(self.command)


def check_agent_names(config: Any) -> None:
    """Raise ConfigError if a name under which models are called has two meanings."""
    agent = config.agent
    policies = config.call_names
    for name in upstreams_of(agent.upstreams):
        if name in (policies or [agent.model]) or name in agent.untrained_models:
            raise ConfigError(
                "agent.upstreams: expected other names than agent.model and "
                f"agent.untrained_models, got {name!r}"
            )
    for name in agent.untrained_models:
        if name in (policies or [agent.model]):
            raise ConfigError(
                "agent.untrained_models: expected other names than agent.model and those of "
                f"trainer.policy.model.lora.policies and trainer.policy.roles, got {name!r}"
            )
