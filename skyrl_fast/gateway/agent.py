"""Trajectories of agents that call the gateway: an `Agent` for `GroupRunner`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from skyrl_fast.gateway.agents.task import AgentTask, BlackBox
from skyrl_fast.gateway.messages import ApiError, Outcome
from skyrl_fast.gateway.policy import ServedPolicy
from skyrl_fast.gateway.server import Gateway
from skyrl_fast.gateway.session import Session
from skyrl_fast.rollout.activity import ACTING, Activity
from skyrl_fast.rollout.env.errors import EnvError, EnvLostError
from skyrl_fast.rollout.loop_settings import RolloutPrompt
from skyrl_fast.rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class GatewayAgent:
    """An `Agent`: each episode is a session of the gateway, which may be started already."""

    gateway: Gateway
    policy: ServedPolicy
    agent: BlackBox

    async def start(self) -> None:
        """Listen where agents reach the gateway; ValueError if that address is not available."""
        await self.gateway.start()

    async def close(self) -> None:
        await self.gateway.close()
        await self.agent.close()

    def episode(
        self, trajectory: Trajectory, prompt: RolloutPrompt, entry: Activity, *, policy_version: int
    ) -> _AgentEpisode:
        trajectory.env_class = "agent"
        session = Session(self.policy, trajectory, entry, policy_version=policy_version)
        key = self.gateway.open(session)
        return _AgentEpisode(self, session, key, trajectory, prompt, entry)


@dataclass(frozen=True, slots=True)
class _AgentEpisode:
    parent: GatewayAgent
    session: Session
    key: str
    trajectory: Trajectory
    prompt: RolloutPrompt
    entry: Activity

    async def play(self) -> str:
        parent = self.parent
        session = self.session
        entry = self.entry
        parent.policy.board.set_phase(entry, ACTING, attempt=entry.attempt, turn=0)
        row = {"prompt": [dict(m) for m in self.prompt.messages], **self.prompt.env_extras}
        task = AgentTask(row, parent.gateway.url, self.key, parent.policy.model)
        running = asyncio.ensure_future(parent.agent.run(task))
        died = asyncio.ensure_future(session.engine_died.wait())
        try:
            await asyncio.wait([running, died], return_when=asyncio.FIRST_COMPLETED)
            if session.engine_died.is_set():
                assert session.engine_failure is not None
                raise session.engine_failure
            outcome = running.result()
        except EnvError as error:
            if session.engine_failure is not None:  # what the agent failed by
                raise session.engine_failure from None
            lost = isinstance(error, EnvLostError)
            if lost or session.refused is None or not self.trajectory.steps:
                raise
            outcome = Outcome(0.0)  # it did not expect that its context is full
        finally:
            died.cancel()
            running.cancel()
            await asyncio.wait([running])
        if not self.trajectory.steps:
            raise EnvError("the agent returned without an answer of the policy that is trained")
        try:
            return session.finish(outcome)
        except ApiError as error:
            raise EnvError(f"the agent's rewards: {error}") from error

    async def close(self) -> None:
        if self.trajectory.failure is None and not self.trajectory.env_metrics:  # at the deadline
            if self.trajectory.steps:
                self.session.finish(Outcome())  # with the rewards posted until then
            else:
                self.trajectory.env_metrics = self.session.metrics()
        await self.parent.gateway.end(self.key)
