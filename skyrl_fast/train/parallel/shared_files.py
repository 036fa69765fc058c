"""Files of a checkpoint that several ranks write: each its own, in a thread, while they train.

Methods that save queue a write on every rank, with what it writes copied to main memory. `start`
lets each rank execute its writes in a thread, which has a process group for itself; then rank 0
waits for the entries of the manifest. An error on any rank is raised there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from skyrl_fast.train.checkpoint.local import flush
from skyrl_fast.train.checkpoint.manifest import Entries, entries
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks

Write = Callable[[], Sequence[Path]]


class SharedFiles:
    """The writes of this rank."""

    def __init__(self, ranks: Ranks, group: Any) -> None:
        self.ranks = ranks
        self.group = group  # on the CPU, for the threads alone, without a timeout
        self._queue: list[Write] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._running: Future[Entries] | None = None
        ranks.files = self
        ranks.register(self)

    def queue(self, write: Write) -> None:
        self._queue.append(write)

    @run_on_all_ranks
    def start(self, folder: Path) -> None:
        """Begin to execute the queued writes, all below `folder`; those before must have ended."""
        writes = self._queue
        self._queue = []
        self._running = self._thread.submit(self._write, folder, writes)

    def wait(self) -> Entries:
        """On rank 0: wait for the writes of all ranks; return the files' entries of the manifest.

        Raises:
            OSError: a rank could not write.
            RankError: a rank has exited.
        """
        assert self._running is not None
        with self.ranks.exits_named():
            return self._running.result()

    @property
    def is_writing(self) -> bool:
        """Whether the thread of this rank has not ended."""
        return self._running is not None and not self._running.done()

    def close(self) -> None:
        """Wait for this rank's thread, whose errors rank 0 has got."""
        self._thread.shutdown()

    def _write(self, folder: Path, writes: list[Write]) -> Entries:
        mine = {}
        fault = ""
        try:
            paths = [path for write in writes for path in write()]
            # On the disk before the manifest names them.
            for path in paths:
                flush(path)
            mine = entries(folder, paths)
        except Exception as error:  # rank 0 raises it: it waits for an answer of every rank
            fault = f"rank {self.ranks.rank}: {type(error).__name__}: {error}"
        found: list[Any] | None = [None] * self.ranks.size if self.ranks.rank == 0 else None
        dist.gather_object((mine, fault), found, dst=0, group=self.group)
        if found is None:
            return {}
        if any(fault for _, fault in found):
            raise OSError("; ".join(fault for _, fault in found if fault))
        return {name: entry for each, _ in found for name, entry in each.items()}
