"""Checkpoints of files of the test's choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from skyrl_fast.train.checkpoint.local import begin_checkpoint, complete_checkpoint


def write_checkpoint(
    folder: Path, step: int, write: Callable[[Path], object], *, keep: int = -1
) -> Path:
    """Return the folder of a checkpoint with the files that `write(folder)` writes."""
    with begin_checkpoint(folder, step) as temporary:
        write(temporary)
    return complete_checkpoint(folder, step, keep=keep)
