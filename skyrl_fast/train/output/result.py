"""What a run returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How far a run got, and where its files are.

    Args:
        step, total_steps: batches trained, and batches of a complete run.
        signal: number of the signal that stopped it, or None.
        evaluations: mean evaluation reward, by step; `before` is that of step 0, `after` the last
            one after a step, or None.
        run_path: the run folder.
        metrics, trajectories: the file of the metrics, the folder of the trajectories.
        checkpoint: folder of the newest one, or None.
        plot: the learning curve, or None.
        sample: one trajectory as readable text.
        stopped_by: class of the callback that ended the run early, or None.
        warnings: metrics of the last steps that are not healthy, a line each.
    """

    step: int
    total_steps: int
    signal: int | None
    evaluations: Mapping[int, float]
    run_path: Path
    metrics: Path
    trajectories: Path
    checkpoint: Path | None
    plot: Path | None
    sample: str
    stopped_by: str | None = None
    warnings: Sequence[str] = ()

    @property
    def before(self) -> float | None:
        """Mean evaluation reward before the first step, or None."""
        return self.evaluations.get(0)

    @property
    def after(self) -> float | None:
        """The last mean evaluation reward after a step, or None."""
        last = max(self.evaluations, default=0)
        return self.evaluations[last] if last else None
