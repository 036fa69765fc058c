"""GiGPO's anchor states: which rows of a batch acted in the same state. N rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_fast.batch.row_index import dense_ids
from skyrl_fast.rollout.trajectory import Trajectory, recorded_steps

START = 0  # not recorded, as of a first step made by hand: the prompt, which a group shares


def anchor_ids(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Return (N,) int32, equal where the environment showed the same before the step.

    Example:
        >>> anchor_ids([two_steps_that_saw("a door"), one_step])
        tensor([0, 1, 0], dtype=torch.int32)
    """
    # The text since the last answer, not the tokens of the context, which contains the agent's
    # earlier responses and is hardly ever the same twice. Trajectories that failed or have no steps
    # have one row.
    states: list[str | int] = []
    for trajectory in trajectories:
        if trajectory.has_acted:
            steps = recorded_steps(trajectory)
        else:
            steps = []
        states += [START if step.state is None else step.state for step in steps] or [START]
    return torch.from_numpy(dense_ids(states)).to(torch.int32)
