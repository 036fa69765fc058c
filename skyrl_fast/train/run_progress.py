"""How far a run has got."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from skyrl_fast.rollout.trajectory import Trajectory


@dataclass(slots=True)
class RunProgress:
    """How far a run has got.

    Args:
        step: batches trained.
        stopped: the run was asked to stop before its end.
        stopped_by: class of the callback that requested the stop, or None.
        checkpoint: folder of the newest complete one, or None.
        trajectories: trajectories of the last evaluation or batch, whichever is newer.
    """

    step: int = 0
    stopped: bool = False
    stopped_by: str | None = None
    checkpoint: Path | None = None
    trajectories: list[Trajectory] = field(default_factory=list)
