"""Checkpoints of a run: with one rank complete on return, with several written in the background.

Several ranks copy what they save to main memory, then train on while each writes its files. A
checkpoint gets its name when all files are on the disk, so at the next step at the earliest. To a
URL one rank uploads in the background, too, from files that it has written before.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from skyrl_fast.train.checkpoint.local import begin_checkpoint, complete_checkpoint
from skyrl_fast.train.checkpoint.object_folder import ObjectFolder
from skyrl_fast.train.checkpoint.remote import RemoteCheckpoints
from skyrl_fast.train.parallel.ranks import Ranks

T = TypeVar("T")


class CheckpointWriter:
    """Writes one checkpoint at a time.

    Args:
        folder: of the run's checkpoints, or those at a URL.
        keep: newest checkpoints to keep; -1: all.
        ranks: that write.
    """

    def __init__(self, folder: Path | RemoteCheckpoints, *, keep: int, ranks: Ranks) -> None:
        self._folder = folder
        self._keep = keep
        self._ranks = ranks
        self._writing: tuple[int, Future[Path] | Future[str]] | None = None

    def write(self, step: int, write_state: Callable[[Path], None]) -> None:
        """Begin a checkpoint; the last one must have been returned by `finished`.

        Args:
            write_state: writes the files; with several ranks it queues the large ones.

        Raises:
            CheckpointError: the disk is full or not writable. Earlier checkpoints are intact.
        """
        assert self._writing is None
        if isinstance(self._folder, RemoteCheckpoints):
            with self._folder.begin(step) as (local, target):
                write_state(local)
                upload = partial(self._folder.complete, step, local, target, keep=self._keep)
                self._start_ranks(upload, local, target)
            self._writing = step, _in_background(upload)
            return
        with begin_checkpoint(self._folder, step) as temporary:
            write_state(temporary)
            complete = partial(complete_checkpoint, self._folder, step, keep=self._keep)
            self._start_ranks(complete, temporary)
        if self._ranks.size > 1:
            self._writing = step, _in_background(complete)
        else:
            future: Future[Path] = Future()
            future.set_result(complete())
            self._writing = step, future

    def _start_ranks(
        self, complete: partial[Any], folder: Path, target: ObjectFolder | None = None
    ) -> None:
        """Let several ranks write what they have queued, and `complete` wait for it."""
        if self._ranks.size > 1:
            self._ranks.files.start(folder, target)
            complete.keywords["written"] = self._ranks.files.wait

    def wait(self) -> None:
        """Wait until the last checkpoint is complete, or has failed: `finished` says which."""
        if self._writing is not None:
            self._writing[1].exception()

    def finished(self) -> tuple[int, Path | str] | None:
        """Return step and place of the checkpoint that is complete since the last call, if any.

        Raises:
            CheckpointError: it could not be written.
            RankError: a rank has exited.
        """
        if self._writing is None or not self._writing[1].done():
            return None
        (step, future), self._writing = self._writing, None
        return step, future.result()


def _in_background(complete: Callable[[], T]) -> Future[T]:
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = thread.submit(complete)
    thread.shutdown(wait=False)
    return future
