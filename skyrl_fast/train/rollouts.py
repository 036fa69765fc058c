"""What the trainer asks of whoever generates trajectories; vLLM behind it, or a test's script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.policy import Policy
from skyrl_fast.train.prompts import Prompt


class Rollouts(Protocol):
    """Generates trajectories with weights that it is given."""

    async def generate(
        self, prompts: Sequence[Prompt], *, step: int, phase: str
    ) -> list[Trajectory]:
        """Return all trajectories of the prompts, in the order of prompts and repetitions.

        The same weights, seed, step and phase give the same trajectories. Cancelling it stops all.

        Args:
            step: number of the batch, for the sampling seeds.
            phase: "train" or "eval".
        """

    async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
        """Give the engine the policy's weights, check that it uses them, and return metrics.

        Raises:
            RuntimeError: the engine's logprobs are not the trainer's.
        """

    async def close(self) -> None:
        """Stop the engine and everything that was started."""
