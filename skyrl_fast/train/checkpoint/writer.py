"""Checkpoints of a run: with one rank complete on return, with several written in the background.

Several ranks copy what they save to main memory, then train on while each writes its files. A
checkpoint gets its name when all files are on the disk, so at the next step at the earliest. An
upload to a URL is made in the background, too.

Design: docs/design/020-several-gpus.md.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from skyrl_fast.train.checkpoint.local import begin_checkpoint, complete_checkpoint
from skyrl_fast.train.parallel.ranks import Ranks


class CheckpointWriter:
    """Writes one checkpoint at a time.

    Args:
        keep: number of newest checkpoints to keep; -1: all.
        upload: called with each complete checkpoint, in the background.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        ranks: Ranks,
        upload: Callable[[Path], None] | None = None,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._ranks = ranks
        self._upload = upload
        self._writing: tuple[int, Future[Path]] | None = None

    def write(self, step: int, write_state: Callable[[Path], None]) -> None:
        """Begin a checkpoint; the last one must have been returned by `take_finished`.

        Args:
            write_state: writes the files; with several ranks it queues the large ones.

        Raises:
            CheckpointError: the disk is full or not writable. Earlier checkpoints are intact.
        """
        assert self._writing is None
        with begin_checkpoint(self._folder, step) as temporary:
            write_state(temporary)
            complete = partial(complete_checkpoint, self._folder, step, keep=self._keep)
            if self._ranks.size > 1:
                self._ranks.files.start(temporary)
                # The manifest has the size and digest of every file, also of those of other ranks.
                complete.keywords["written"] = self._ranks.files.wait
        if self._ranks.size == 1:
            path = complete()
        else:
            path = None
        self._writing = step, _in_background(partial(self._finish, complete, path))
        # With one rank nothing is left to write; the thread only makes both cases alike.
        if path is not None and self._upload is None:
            self.wait()

    def _finish(self, complete: Callable[[], Path], path: Path | None) -> Path:
        path = path or complete()
        if self._upload is not None:
            self._upload(path)
        return path

    def wait(self) -> None:
        """Wait until the last checkpoint is complete, or has failed: `take_finished` says which."""
        if self._writing is not None:
            self._writing[1].exception()

    def take_finished(self) -> tuple[int, Path] | None:
        """Return step and folder of the checkpoint that is complete since the last call, if any.

        Raises:
            CheckpointError: it could not be written or uploaded.
            RankError: a rank has exited.
        """
        if self._writing is None or not self._writing[1].done():
            return None
        (step, future), self._writing = self._writing, None
        return step, future.result()


def _in_background(complete: Callable[[], Path]) -> Future[Path]:
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = thread.submit(complete)
    # The thread ends with its only task.
    thread.shutdown(wait=False)
    return future
