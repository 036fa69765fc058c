"""A checkpoint at a URL that a run resumes from: a local copy on each node that has ranks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from skyrl_fast.system.temporary_folder import locked_folder, remove_stale_folders
from skyrl_fast.train.checkpoint.remote import TEMPORARY, fetch
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks

T = TypeVar("T")
POLL_SECONDS = 0.2


class HasRanks(Protocol):
    """A policy."""

    ranks: Ranks


@dataclass(frozen=True, slots=True)
class FetchedCheckpoint:
    """A checkpoint, and its copy at the same path of each node.

    Args:
        url: of the checkpoint.
        folder: in a temporary folder of rank 0.
    """

    url: str
    folder: Path

    def then(self, make: Callable[[Ranks], T], ranks: Ranks) -> T:
        """On every rank: return `make(ranks)` after all nodes have the copy."""
        self._on_this_node()
        ranks.gather([0])  # rank 0's first collective waits no longer than others do
        return make(ranks)

    def remove(self, owner: HasRanks) -> None:
        """On rank 0: remove all copies after each rank has read from them."""
        _wait(owner)
        _remove(owner, self.folder.parent)

    def _on_this_node(self) -> None:
        """Fetch the copy unless another rank of this node does, which is waited for."""
        if self.folder.is_dir():
            return
        parent = self.folder.parent
        remove_stale_folders(parent.parent, TEMPORARY)
        try:
            locked_folder(parent.parent, TEMPORARY, name=parent.name)  # until this process ends
        except FileExistsError:
            while not self.folder.is_dir():
                time.sleep(POLL_SECONDS)
        else:
            fetch(self.url, parent / "partial").rename(self.folder)


@run_on_all_ranks
def _wait(owner: HasRanks) -> list[int]:
    return owner.ranks.gather([0])


@run_on_all_ranks
def _remove(owner: HasRanks, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
