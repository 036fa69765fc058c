"""Interface between the trainer and what generates trajectories: vLLM, or a fake in tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from skyrl_fast.config import Config
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.model.policy import Policy


class Rollouts(Protocol):
    """Generates trajectories with the weights it was last given; `generate` calls may overlap."""

    board: ActivityBoard  # what its running trajectories are doing

    async def generate(
        self, prompts: Sequence[Prompt], *, step: int, phase: str
    ) -> list[Trajectory]:
        """Return all trajectories of the prompts, in the order of prompts and repetitions.

        The same weights, seed, step and phase produce the same trajectories. Cancelling the call
        stops all of them.

        Args:
            step: policy version at their start, for the sampling seeds; 0 in evaluation.
            phase: "train" or "eval".

        Raises:
            GroupDroppedError: no trajectory of a prompt's group finished, in training.
        """

    async def sleep(self, policy: Policy) -> None:
        """Free the engine's GPU memory until the next `update_weights`, if it shares the trainer's.

        Then all weights of the policy are on its device. No `generate` call is running.
        """

    async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
        """Send the policy's weights to the engine, verify that it uses them, and return metrics.

        Trajectories in flight continue with the new weights.

        Raises:
            WeightSyncError: the engine's logprobs differ from the trainer's.
        """

    async def wait_for_fault(self) -> None:
        """Return when an engine has died that can be restarted."""

    async def repair(self, policy: Policy | None, *, version: int) -> None:
        """Restart dead engines with the policy's weights, which are those of `version`.

        Without a policy: with those of the model's folder.

        Raises:
            EngineDeadError: an engine died too often, or cannot be started.
        """

    def activity(self, uids: Sequence[str]) -> list[str]:
        """Return descriptions of what the slowest trajectories of these groups are doing."""

    def faults(self) -> dict[str, float]:
        """Return fault counts since the start, keyed by name."""

    async def close(self) -> None:
        """Stop the engine and all other resources."""


# Called with the settings, the tokenizer and the model's folder.
MakeRollouts = Callable[[Config, Any, str], Awaitable[Rollouts]]


def split_rollout_time(times: dict[str, float], trajectories: Sequence[Trajectory]) -> None:
    """Split the rollouts' wall time into generate and environment, in proportion to their sums."""
    # Both run concurrently for many trajectories, so that only their proportion is known.
    wall = times.pop("rollout")
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    environment = sum(step.env_seconds for step in steps)
    both = environment + sum(step.llm_seconds for step in steps)
    if both:
        times["environment"] = wall * environment / both
    else:
        times["environment"] = 0.0
    times["generate"] = wall - times["environment"]


def count_sampled_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Return the tokens that were sampled in all turns, without appended end tokens."""
    return sum(sum(step.loss_mask) for t in trajectories for step in t.steps)
