"""GiGPO's anchor states: which rows of a batch acted in the same state. N rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_fast.batch.row_index import dense_ids
from skyrl_fast.rollout.trajectory import Trajectory

START = 0  # no observation yet: the prompt, which a group shares


def anchor_ids(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Return (N,) int32, equal where the last observations are equal.

    Example:
        >>> anchor_ids([two_steps_that_saw("a door"), one_step])
        tensor([0, 1, 0], dtype=torch.int32)
    """
    # The state of a step is the observation of the step before it; of the first step, the prompt.
    # It is the observation's text, not the tokens of the context, which contains the agent's
    # earlier responses and is hardly ever the same twice. Trajectories that failed or have no steps
    # have one row.
    states: list[str | int] = []
    for trajectory in trajectories:
        usable = trajectory.steps if trajectory.failure is None else []
        states.append(START)
        states += [step.observation for step in usable[:-1]]
    return torch.from_numpy(dense_ids(states)).to(torch.int32)
