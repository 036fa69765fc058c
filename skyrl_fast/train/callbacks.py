"""User code that runs between training steps: the `Callback` class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_fast.errors import RunError


class CallbackError(RunError):
    """A callback raised; the run ended with a checkpoint of its last complete step."""


class Callback:
    """Base class of callbacks; each method does nothing until it is overridden.

    The methods run between steps and block the run. One that raises ends the run with a checkpoint
    and a `CallbackError` that names it.

    Example:
        class UntilSolved(Callback):
            def on_eval(self, step, metrics):
                return metrics["eval/all/avg_score"] >= 0.95
    """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Handle the metrics of a trained step; return True to end the run with a checkpoint."""

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Handle the metrics of an evaluation; return True to end the run with a checkpoint.

        Args:
            step: number of trained batches; 0 before training.
        """

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Handle a complete checkpoint; several ranks, and uploads, complete it during later steps.

        Args:
            step: that it was written after.
            path: its local folder.
        """


class CallbackList:
    """Calls all callbacks, in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self.stopped_by: str | None = None  # class of the callback that requested the stop

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("on_step", step, metrics)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("on_eval", step, metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._call("on_checkpoint", step, path)

    def _call(self, event: str, step: int, value: Any) -> None:
        for callback in self._callbacks:
            name = type(callback).__name__
            try:
                stop = getattr(callback, event)(step, value)
            except Exception as error:
                raise CallbackError(
                    f"callback {name}.{event} raised {type(error).__name__}: {error}"
                ) from error
            if stop and self.stopped_by is None:
                self.stopped_by = name
