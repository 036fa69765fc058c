"""The key of a run's engine servers: a file that only its owner can read, or a variable."""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

from skyrl_fast.system.child_environment import KEY_VARIABLE

DEFAULT_NAME = "engine_key"  # in the run folder
_KEY = re.compile(r"[!-~]{16,1024}")  # characters that a header may have
_MAX_BYTES = 4096
_SETTING = "generator.inference_engine.api_key_file"


def engine_key(file: Path) -> str:
    """Return the key: that of the variable SKYRL_FAST_ENGINE_KEY, else that of the file.

    A missing file is created with a new random key, so that trainer and servers of one run agree
    whichever starts first.

    Raises:
        ValueError: the key is too short, or others can read or replace the file; the message says
            what to do.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is not None:
        return _check_key(key, KEY_VARIABLE)
    return read_or_create_key(file, _SETTING)


def read_or_create_key(file: Path, setting: str) -> str:
    try:
        if not os.path.lexists(file):
            _create(file)
        return _check_key(_read(file, setting), f"{setting}: {file}")
    except OSError as error:
        raise ValueError(f"{setting}: cannot read or create {file}: {error}") from error


def _create(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as out:
            out.write(secrets.token_urlsafe(32) + "\n")
        os.link(temporary, file)  # complete, or not at all
    except FileExistsError:
        pass  # another process was faster
    finally:
        os.unlink(temporary)


def _read(file: Path, setting: str) -> str:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
            raise ValueError(
                f"{setting}: {file}: expected a file of this user with mode 600, got user "
                f"{status.st_uid} and mode {mode:o}: chmod 600, or delete it to get a new key"
            )
        return opened.read(_MAX_BYTES).decode("ascii", "replace").strip()


def _check_key(key: str, where: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"{where}: expected a key of 16 to 1024 printable ASCII characters without spaces, got "
            f"{len(key)} characters"
        )
    return key
