"""Frozen adapters that samplers name: one for each checkpoint that was sampled from."""

from __future__ import annotations

import itertools

from skyrl_fast.tinker.checkpoints import CheckpointStore, SavedAdapter, TinkerPath
from skyrl_fast.tinker.sampling import Snapshot

EPHEMERAL = "_ephemeral-"  # first part of the names of snapshots that end with their sampler


def is_ephemeral(path: TinkerPath) -> bool:
    return path.name.startswith(EPHEMERAL)


class Snapshots:
    """The snapshots of checkpoints, which the engine knows by their numbers."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._numbers = itertools.count(1)
        self._by_checkpoint: dict[tuple[str, str], Snapshot] = {}

    def get(self, path: TinkerPath, saved: SavedAdapter) -> Snapshot:
        """Return a checkpoint's snapshot; another one if it was saved again."""
        key = (str(path), saved.time)
        if key not in self._by_checkpoint:
            number = next(self._numbers)
            folder = self._store.folder(path)
            self._by_checkpoint[key] = Snapshot(f"snapshot-{number}", number, folder)
        return self._by_checkpoint[key]

    def open(self, path: TinkerPath) -> Snapshot:
        """Return a checkpoint's snapshot; its files are verified once.

        Raises:
            RefusedCallError: there is none, or it is damaged.
        """
        known = self._by_checkpoint.get((str(path), self._store.read(path).time))
        return known or self.get(path, self._store.find(path))

    def forget_ephemeral(self, snapshot: Snapshot | None) -> None:
        for key in [key for key, one in self._by_checkpoint.items() if one is snapshot]:
            if is_ephemeral(TinkerPath.parse(key[0])):
                del self._by_checkpoint[key]
