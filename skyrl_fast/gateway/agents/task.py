"""What an agent gets: its row, and how to call the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# Of clients that speak plain HTTP to this machine: without certificates, whose loading takes 20 ms
# for each client, and without proxies.
_PLAIN: dict[str, Any] = {"verify": False, "trust_env": False}


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
        """An `openai.OpenAI` client."""
        import openai

        client = openai.DefaultHttpxClient(**_PLAIN)
        return openai.OpenAI(base_url=self.base_url, api_key=self.api_key, http_client=client)

    @cached_property
    def async_openai(self) -> Any:
        """An `openai.AsyncOpenAI` client."""
        import openai

        client = openai.DefaultAsyncHttpxClient(**_PLAIN)
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=client)

    @cached_property
    def anthropic(self) -> Any:
        """An `anthropic.Anthropic` client."""
        import anthropic

        client = anthropic.DefaultHttpxClient(**_PLAIN)
        return anthropic.Anthropic(base_url=self.url, api_key=self.api_key, http_client=client)

    @cached_property
    def async_anthropic(self) -> Any:
        """An `anthropic.AsyncAnthropic` client."""
        import anthropic

        client = anthropic.DefaultAsyncHttpxClient(**_PLAIN)
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=self.api_key, http_client=client)

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
        for name in ("async_openai", "async_anthropic"):
            if name in self.__dict__:
                await self.__dict__[name].close()
