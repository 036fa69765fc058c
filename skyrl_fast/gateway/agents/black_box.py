"""What solves tasks by calls of the gateway."""

from __future__ import annotations

from typing import Protocol

from skyrl_fast.gateway.agents.task import AgentTask
from skyrl_fast.gateway.messages import Outcome
from skyrl_fast.system.network_interface import LOOPBACK


class BlackBox(Protocol):
    """A function or command that solves tasks by calls of the gateway."""

    async def start(self) -> str:
        """Return the address of this machine at which the gateway is called."""
        return LOOPBACK

    async def run(self, task: AgentTask) -> Outcome:
        """Return the reward of one task; free everything also if cancelled.

        Raises:
            EnvError: it failed.
        """

    async def close(self) -> None:
        """End the processes that it keeps; none, unless said otherwise."""
        return
