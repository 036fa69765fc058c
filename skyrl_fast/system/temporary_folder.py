"""Temporary folders of one process, which a later process removes if this one is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_fast.system.file_lock import close_locked, lock_file

_TAKEN = ".taken"


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder in TMPDIR that only this user can read; remove it at the end.

    Those of this prefix that killed processes have left are removed first.
    """
    where = Path(tempfile.gettempdir())
    remove_stale_folders(where, prefix)
    folder, lock = locked_folder(where, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        close_locked(lock)


def locked_folder(where: str | Path, prefix: str, *, name: str | None = None) -> tuple[Path, int]:
    """Return a new folder, locked as long as this process lives and the descriptor is open.

    Args:
        name: begins with the prefix; None: one that is free.

    Raises:
        FileExistsError: another process has a folder of this name.
    """
    # Until it is locked, its name does not match the pattern of remove_stale_folders.
    folder = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=where))
    lock = os.open(folder, os.O_RDONLY)
    lock_file(lock)
    if name is None:
        return folder.rename(folder.with_name(folder.name[1:])), lock
    (folder / _TAKEN).touch()  # an empty folder would be replaced by the next one of this name
    try:
        return folder.rename(folder.with_name(name)), lock
    except OSError as error:
        shutil.rmtree(folder)
        close_locked(lock)
        raise FileExistsError(f"{where}/{name}: {error}") from error


def remove_stale_folders(where: Path, prefix: str) -> None:
    """Remove the folders of dead processes of this user, which would fill up a disk or memory."""
    for folder in where.glob(f"{prefix}*"):
        try:
            # O_DIRECTORY: in a folder for all users, the name may be that of someone's FIFO.
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        except OSError:
            continue  # of another user, no folder, or already removed
        try:
            if os.fstat(lock).st_uid != os.getuid():
                raise PermissionError
            lock_file(lock)
        except OSError:  # of another user, or in use
            os.close(lock)
            continue
        shutil.rmtree(folder, ignore_errors=True)
        close_locked(lock)
