"""Detection of runs whose gradients have become infinite or NaN."""

from __future__ import annotations

from collections import deque

from skyrl_fast.errors import RunError

WINDOW = 10  # optimizer steps that are looked at


class DivergedError(RunError):
    """Most optimizer steps are skipped for a gradient that is infinite or NaN."""


class DivergenceWatch:
    """End a run that no longer trains.

    An optimizer step with a gradient that is not finite is skipped, and may be an accident. Once
    most of the last `WINDOW` steps were skipped, the weights are beyond repair.
    """

    def __init__(self) -> None:
        self._skipped: deque[bool] = deque(maxlen=WINDOW)

    def see(self, skipped: int, steps: int) -> None:
        """Record the steps of a batch; DivergedError if most of the last `WINDOW` were skipped."""
        self._skipped.extend([True] * skipped + [False] * (steps - skipped))
        total = sum(self._skipped)
        if total > WINDOW // 2:
            raise DivergedError(
                f"{total} of the last {len(self._skipped)} optimizer steps were skipped, because "
                "the gradient is infinite or NaN: resume from an earlier checkpoint "
                "(trainer.resume_path) with a lower trainer.policy.optimizer_config.lr or "
                "max_grad_norm"
            )
