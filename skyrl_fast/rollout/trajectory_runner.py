"""Runs one trajectory of an agent: its deadline, its attempts, and what its errors mean."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from skyrl_fast.config import GeneratorConfig
from skyrl_fast.rollout.activity import CLOSING, MAKING, Activity, ActivityBoard
from skyrl_fast.rollout.chat_template import ContextError
from skyrl_fast.rollout.engine.protocol import EngineDeadError, EngineError
from skyrl_fast.rollout.env.errors import EnvError
from skyrl_fast.rollout.loop_settings import RolloutPrompt
from skyrl_fast.rollout.stop_reason import ENGINE_ERROR, ENV_ERROR, TIMEOUT
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.system.printable import MAX_FAILURE, log_line, shorten

log = logging.getLogger(__name__)


class Episode(Protocol):
    """One attempt of a trajectory."""

    async def play(self) -> str:
        """Append the trajectory's steps as they happen; return its stop reason.

        Raises:
            EnvError, ContextError: the agent or its environment failed. EngineError: the engine.
        """

    async def close(self) -> None:
        """Free what the episode holds; called once, whatever happened.

        The trajectory's `failure` says whether it is used.
        """


class Agent(Protocol):
    """What plays trajectories: the agent loop with an environment, or an agent at the gateway."""

    def episode(
        self, trajectory: Trajectory, prompt: RolloutPrompt, entry: Activity, *, policy_version: int
    ) -> Episode:
        """Return an attempt, not started; its entry on the board has the number of the attempt."""


@dataclass(frozen=True, slots=True)
class TrajectoryRunner:
    """Run one trajectory per call of `run`; calls may overlap."""

    agent: Agent
    config: GeneratorConfig
    board: ActivityBoard
    faults: Counter[str]

    async def run(
        self,
        prompt: RolloutPrompt,
        repetition_id: int,
        *,
        phase: str,
        policy_version: int,
        entry: Activity,
        first_attempt: int = 0,
    ) -> Trajectory:
        """Return one trajectory; retry it if its environment or the engine failed.

        The deadline starts here and covers all attempts. A trajectory at its deadline ends with
        the steps it has; it has failed only if it has none.

        Args:
            first_attempt: number of the first attempt, for the seeds.

        Raises:
            EngineDeadError: the engine died.
        """
        started = time.perf_counter()
        # On the clock of `asyncio.timeout_at`, and for all attempts: retries must not delay the
        # batch.
        deadline = asyncio.get_running_loop().time() + self.config.trajectory_timeout_seconds
        attempt = first_attempt
        while True:
            trajectory = Trajectory(
                uid=prompt.uid,
                repetition_id=repetition_id,
                env_class=prompt.env_class,
                phase=phase,
                data_source=prompt.data_source,
            )
            self.board.set_phase(entry, MAKING, attempt=attempt, turn=0)
            episode = self.agent.episode(trajectory, prompt, entry, policy_version=policy_version)
            await self._attempt(episode, trajectory, deadline, entry)
            trajectory.seconds = time.perf_counter() - started
            # After the deadline another attempt would be cancelled before its first turn.
            late = asyncio.get_running_loop().time() >= deadline
            last = attempt - first_attempt == self.config.max_retries
            if trajectory.failure is None or last or late:
                self.board.leave(entry)
                return trajectory
            self.faults["retried_trajectories"] += 1
            failure = log_line(trajectory.failure)
            log.info("%s/%d, attempt %d: %s", prompt.uid, repetition_id, attempt, failure)
            attempt += 1

    async def _attempt(
        self, episode: Episode, trajectory: Trajectory, deadline: float, entry: Activity
    ) -> None:
        try:
            async with asyncio.timeout_at(deadline) as clock:
                trajectory.stop_reason = await episode.play()
        # Not a failure of this trajectory: another attempt would find the same dead engine.
        except EngineDeadError:
            raise
        except EnvError as error:
            self.faults["environment_errors"] += 1
            end_trajectory(trajectory, ENV_ERROR, str(error))
            trajectory.failure_trace = error.trace
        except ContextError as error:
            self.faults["environment_errors"] += 1
            end_trajectory(trajectory, ENV_ERROR, str(error))
        except EngineError as error:
            self.faults["engine_errors"] += 1
            end_trajectory(trajectory, ENGINE_ERROR, str(error))
        except TimeoutError as error:
            if not clock.expired():  # the timeout of some connection, not our deadline
                end_trajectory(trajectory, ENGINE_ERROR, f"TimeoutError: {error}")
            elif trajectory.steps:
                log.info("at its deadline: %s", entry.describe(self.board.clock()))
                trajectory.stop_reason = TIMEOUT
            else:
                end_trajectory(trajectory, TIMEOUT, self._late(entry))
        finally:
            # Also reached when the complete rollout is cancelled.
            self.board.set_phase(entry, CLOSING, attempt=entry.attempt, turn=entry.turn)
            await episode.close()
        if trajectory.steps:
            trajectory.steps[-1].stop_reason = trajectory.stop_reason

    def _late(self, entry: Activity) -> str:
        return (
            f"turn 1 of attempt {entry.attempt + 1} did not finish within "
            f"{self.config.trajectory_timeout_seconds:g} s, the deadline of a trajectory "
            f"({entry.phase} for {self.board.clock() - entry.since:.1f} s)"
        )


def end_trajectory(trajectory: Trajectory, stop_reason: str, failure: str) -> None:
    trajectory.stop_reason, trajectory.failure = stop_reason, shorten(failure, MAX_FAILURE)
