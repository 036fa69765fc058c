"""Temporary folders of one process, which a later process removes if this one is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from skyrl_fast.system.file_lock import close_locked, lock_file


def lock_new_folder(where: str | Path, prefix: str) -> tuple[Path, int]:
    """Return a new folder, locked as long as this process lives and the descriptor is open."""
    # Until it is locked, its name does not match the pattern of remove_stale_folders.
    folder = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=where))
    lock = os.open(folder, os.O_RDONLY)
    lock_file(lock)
    return folder.rename(folder.with_name(folder.name[1:])), lock


def remove_stale_folders(where: Path, prefix: str, user: int | None = None) -> None:
    """Remove the folders of a user's dead processes, which would fill up a disk or memory.

    Args:
        where: parent of the folders.
        prefix: of their names.
        user: id of the user; None: this process's.
    """
    user = os.getuid() if user is None else user
    for folder in where.glob(f"{prefix}*"):
        try:
            # O_DIRECTORY: in a folder for all users, the name may be that of someone's FIFO.
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        except OSError:
            continue  # another user's, no folder, or already removed
        try:
            if os.fstat(lock).st_uid != user:
                raise PermissionError
            lock_file(lock)
        except OSError:  # another user's, or in use
            os.close(lock)
            continue
        shutil.rmtree(folder, ignore_errors=True)
        close_locked(lock)
