"""What an agent gets: its row, and how to call the policy; and what an agent is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from skyrl_fast.gateway.messages import Outcome


@dataclass(frozen=True)
class AgentTask:
    """One task for an agent.

    Args:
        row: the columns of the data, `prompt` included.
        url: URL of the gateway.
        api_key: key of this attempt at the task; it is valid until the agent returns.
        model: name of the policy.

    Example:
        async def agent(task):
            answer = await task.async_openai.chat.completions.create(
                model=task.model, messages=task.row["prompt"]
            )
            return float(task.row["answer"] in answer.choices[0].message.content)
    """

    row: Mapping[str, Any]
    url: str
    api_key: str
    model: str

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients; Anthropic's take `url`."""
        return f"{self.url}/v1"

    @cached_property
    def openai(self) -> Any:
        import openai

        return self._client(openai.OpenAI, openai.DefaultHttpxClient, self.base_url)

    @cached_property
    def async_openai(self) -> Any:
        import openai

        return self._client(openai.AsyncOpenAI, openai.DefaultAsyncHttpxClient, self.base_url)

    @cached_property
    def anthropic(self) -> Any:
        import anthropic

        return self._client(anthropic.Anthropic, anthropic.DefaultHttpxClient, self.url)

    @cached_property
    def async_anthropic(self) -> Any:
        import anthropic

        return self._client(anthropic.AsyncAnthropic, anthropic.DefaultAsyncHttpxClient, self.url)

    def _client(self, client: Any, http_client: Any, url: str) -> Any:
        # Plain HTTP to this machine: without certificates, whose loading takes 20 ms for each
        # client, and without proxies.
        plain = http_client(verify=False, trust_env=False)
        return client(base_url=url, api_key=self.api_key, http_client=plain)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which the official clients find the gateway."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }

    async def close(self) -> None:
        """Close the clients that were used."""
        for name in ("openai", "anthropic"):
            if name in self.__dict__:
                self.__dict__[name].close()
            if f"async_{name}" in self.__dict__:
                await self.__dict__[f"async_{name}"].close()


class BlackBox(Protocol):
    """A function or command that solves tasks by calls of the gateway."""

    async def run(self, task: AgentTask) -> Outcome:
        """Return the reward of a task; EnvError if it failed. Free everything also if cancelled."""

    async def close(self) -> None:
        """End the processes that it keeps; none, unless said otherwise."""
        return
