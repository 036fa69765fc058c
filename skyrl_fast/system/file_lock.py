"""Locks on files that end with the process that took them, even if its children live on."""

from __future__ import annotations

import fcntl
import os

_held: set[int] = set()  # descriptors of this process's locks


def lock_file(descriptor: int) -> None:
    """Lock an open file or folder until `close_locked`, or until this process ends.

    Raises:
        BlockingIOError: it is locked through another descriptor, by this or another process.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _held.add(descriptor)


def close_locked(descriptor: int) -> None:
    """Release a lock and close its descriptor; do nothing in a forked child."""
    if is_locked(descriptor):
        _held.discard(descriptor)
        os.close(descriptor)


def is_locked(descriptor: int) -> bool:
    """Return whether this process, not a parent of it, holds the lock."""
    return descriptor in _held


def _close_in_child() -> None:
    """Close what fork has inherited: the lock lasts until the last descriptor of it is closed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
