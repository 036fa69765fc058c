"""When a run may be saved: its weights, counters and data position must be of the same step.

A step passes through these states; an error ends the run in one of them:

    begin_update    weights are between two steps: nothing can be saved
    complete_step   the step may be saved; a run that resumes from it reports its metrics
    end_report      the step is reported, and a checkpoint from before is outdated

Design: docs/design/008-trainer.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyrl_fast.train.checkpoint.writer import CheckpointWriter
from skyrl_fast.train.run_progress import RunProgress

logger = logging.getLogger(__name__)


class RunSaver:
    """Saves the last complete step of a run.

    Args:
        progress: the run's step, counted by the trainer; gets the newest complete checkpoint.
        prepare: called before a checkpoint is begun: blocks until all that belongs to the step is
            stored.
        write_state: writes all that a run resumes from into a folder.
        on_checkpoint: called with step and folder of each complete checkpoint, unless an error
            ended the run.
    """

    def __init__(
        self,
        progress: RunProgress,
        writer: CheckpointWriter,
        *,
        prepare: Callable[[], None],
        write_state: Callable[[Path], None],
        on_checkpoint: Callable[[int, Path], None],
    ) -> None:
        # Metrics of a complete step until they are reported, stored with it; None: they are.
        self.unreported: dict[str, Any] | None = None
        self._progress = progress
        self._writer = writer
        self._prepare = prepare
        self._write_state = write_state
        self._on_checkpoint = on_checkpoint
        self._is_consistent = True
        self._saved_step: int | None = None

    @property
    def is_saved(self) -> bool:
        """Whether the last complete step has a checkpoint, which may still be being written."""
        return self._saved_step == self._progress.step

    def resume(self, checkpoint: Path, unreported: dict[str, Any] | None) -> None:
        """Begin with the step of a checkpoint; `progress` has its number already."""
        self.unreported = unreported
        self._saved_step = self._progress.step
        self._progress.checkpoint = checkpoint

    def begin_update(self) -> None:
        """Forbid checkpoints: from here on weights and counters are of different steps."""
        self._is_consistent = False

    def complete_step(self, metrics: dict[str, Any]) -> None:
        """Allow checkpoints of the step that `progress` counts now; its metrics may still grow."""
        self._is_consistent = True
        self.unreported = metrics

    def end_report(self) -> None:
        """Record that the step is reported: a resumed run must not report it again."""
        self.unreported = None

    def discard(self) -> None:
        """Let the step be saved once more, as what is stored with it has changed."""
        self._saved_step = None

    def save(self) -> None:
        """Begin a checkpoint of the last complete step; `report_finished` says when it is written.

        Raises:
            CheckpointError: the disk is full or not writable. Earlier checkpoints are intact.
        """
        self._prepare()
        # Several ranks write in the background while training continues.
        self._writer.write(self._progress.step, self._write_state)
        self._saved_step = self._progress.step

    def save_last(self) -> None:
        """Save the last complete step unless it is saved, and wait until its files are written."""
        self.wait()
        self.report_finished()
        # The one in the background may have been of an earlier step.
        if not self.is_saved:
            self.save()
            self.wait()
            self.report_finished()

    def wait(self) -> None:
        """Wait until the last checkpoint is written, or has failed."""
        self._writer.wait()

    def report_finished(self) -> None:
        """Report the checkpoint that is complete now, if any; raise its error."""
        step = self._take_finished()
        if step is not None:
            assert self._progress.checkpoint is not None
            self._on_checkpoint(step, self._progress.checkpoint)

    def rescue(self) -> None:
        """After an error, save the last complete step; never hide the error."""
        with self._without_hiding_errors():
            self.wait()
            self._take_finished()
        # In the middle of an update, or at step 0, there is nothing to save.
        if self._is_consistent and not self.is_saved and self._progress.step != 0:
            with self._without_hiding_errors():
                self.save()
                self.wait()
                self._take_finished()

    def _take_finished(self) -> int | None:
        """Record the checkpoint that is complete now, if any, and return its step."""
        try:
            finished = self._writer.take_finished()
        except BaseException:
            # The step has no checkpoint after all, and the next save must not be left out.
            self.discard()
            raise
        if finished is None:
            return None
        step, self._progress.checkpoint = finished
        return step

    @contextmanager
    def _without_hiding_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            logger.exception(
                "no checkpoint written after the error; the last one is %s",
                self._progress.checkpoint,
            )
