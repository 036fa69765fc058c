"""Agents in processes: one per trajectory.

A process is killed with what it has started where its trajectory's deadline passes; see
`rollout/workers/processes.py`, which does the same for environments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from skyrl_fast.gateway.agents.command import CommandAgent
from skyrl_fast.gateway.agents.function import FunctionAgent
from skyrl_fast.gateway.agents.outcome import outcome_of
from skyrl_fast.gateway.agents.task import AgentTask, BlackBox
from skyrl_fast.gateway.messages import Outcome
from skyrl_fast.rollout.env.errors import EnvError, EnvLostError
from skyrl_fast.rollout.workers.processes import ProcessWorkers
from skyrl_fast.rollout.workers.protocol import CallResult, HandlerSettings
from skyrl_fast.system.importing import load_object
from skyrl_fast.system.printable import MAX_FAILURE, shorten

CALL = "agent"  # the only one of a handler
MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class AgentSettings(HandlerSettings):
    """What the process of an agent needs.

    Args:
        function: module:function or /path/file.py:function; None: the command.
    """

    function: str | None = None
    command: Sequence[str] = ()
    verifier: Sequence[str] = ()
    reward_file: str | None = None

    first_call: ClassVar[str] = CALL
    max_bytes: ClassVar[int] = MAX_ANSWER_BYTES

    @property
    def modules(self) -> Sequence[str]:
        if self.function is None:
            return ()
        return (self.function.rpartition(":")[0],)

    @property
    def optional_modules(self) -> Sequence[str]:
        if self.function is None:
            return ()
        return ("openai", "anthropic")

    def agent(self) -> BlackBox:
        """Return the function or command, to run here; ValueError if it cannot be imported."""
        if self.function is None:
            return CommandAgent(self.command, verifier=self.verifier, reward_file=self.reward_file)
        try:
            function = load_object(self.function)
        except ValueError as error:
            raise ValueError(f"agent.function: {error}") from error
        if not callable(function):
            raise ValueError(f"agent.function: expected a function, got {self.function!r}")
        return FunctionAgent(function)

    def handler(self) -> AgentHandler:
        return AgentHandler(self)

    def check_value(self, what: str, value: Any) -> Outcome:
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError(f"{what}: expected an outcome, got {type(value).__name__}")
        return replace(outcome_of(value[0]), unless_posted=value[1] is True)

    def check_importable(self) -> None:
        if self.modules == ("__main__",):
            raise ValueError(
                "agent.workers=process: expected a function that other processes can import "
                f"(module:function or file.py:function), got {self.function}"
            )


class AgentProcesses(BlackBox):
    """Runs each task in a process."""

    def __init__(self, workers: ProcessWorkers) -> None:
        self._workers = workers

    async def run(self, task: AgentTask) -> Outcome:
        # The process is killed if this call is cancelled.
        try:
            worker = await self._workers.acquire()
        except OSError as error:
            raise EnvError(f"{CALL}: {error}") from error
        called = await worker.call(CALL, task, None)
        if not worker.usable:
            raise EnvLostError(called.failure)
        worker.release()
        if called.failure is not None:
            raise EnvError(called.failure, called.trace)
        outcome: Outcome = called.value
        return outcome

    async def close(self) -> None:
        await self._workers.close()


class AgentHandler:
    """An agent in a process; its tasks are run in one event loop."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._agent: BlackBox | None = None
        self._runner = asyncio.Runner()

    def call(self, what: str, argument: AgentTask) -> CallResult:
        try:
            self._agent = self._agent or self._settings.agent()
            outcome = self._runner.run(self._agent.run(argument))
        except EnvError as error:
            return CallResult(failure=shorten(str(error), MAX_FAILURE), trace=error.trace)
        except BaseException as error:
            text = f"{what}: {type(error).__name__}: {error}"
            return CallResult(failure=shorten(text, MAX_FAILURE))
        value: dict[str, Any] = dict(outcome.metrics)
        value |= {"reward": outcome.reward, "call_rewards": dict(outcome.call_rewards)}
        value |= {"policy_rewards": dict(outcome.policy_rewards)}
        return CallResult((value, outcome.unless_posted))
