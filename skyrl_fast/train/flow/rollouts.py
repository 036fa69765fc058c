"""What the trainer asks of whoever generates trajectories; vLLM behind it, or a test's script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.model.policy import Policy


class Rollouts(Protocol):
    """Generates trajectories with weights that it is given; calls of `generate` may overlap."""

    async def generate(
        self, prompts: Sequence[Prompt], *, step: int, phase: str
    ) -> list[Trajectory]:
        """Return all trajectories of the prompts, in the order of prompts and repetitions.

        The same weights, seed, step and phase give the same trajectories. Cancelling it stops all.

        Args:
            step: policy version when they start, for the sampling seeds; 0 in evaluation.
            phase: "train" or "eval".

        Raises:
            GroupDroppedError: nothing of a prompt's group ever came back, in training.
        """

    async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
        """Give the engine the policy's weights, check that it uses them, and return metrics.

        Trajectories on their way go on with the new weights.

        Raises:
            WeightSyncError: the engine's logprobs are not the trainer's.
        """

    async def wait_for_fault(self) -> None:
        """Return when an engine has died that could be brought back."""

    async def repair(self, policy: Policy, *, version: int) -> None:
        """Bring back engines that died, with the policy's weights, which are those of `version`.

        Raises:
            EngineDeadError: it died too often, or cannot be started.
        """

    def activity(self, uids: Sequence[str]) -> list[str]:
        """What the slowest trajectories of these groups are doing, in words."""

    def faults(self) -> dict[str, float]:
        """How often what went wrong since the start, by name."""

    async def close(self) -> None:
        """Stop the engine and everything that was started."""


def split_rollout_time(times: dict[str, float], trajectories: Sequence[Trajectory]) -> None:
    """Share the rollouts' wall time between generate and environment, as their own sums are.

    Both go on at once for many trajectories, so that only their proportion is known.
    """
    wall = times.pop("rollout")
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    environment = sum(step.env_seconds for step in steps)
    both = environment + sum(step.llm_seconds for step in steps)
    times["environment"] = wall * environment / both if both else 0.0
    times["generate"] = wall - times["environment"]
