"""Which run writes the checkpoints at a URL: a record in place of a lock.

`run.json` names the run; its writer renews it while it lives. A run with another id is refused as
long as that record is recent. The id is kept in the run folder, so that a run that starts again
there need not wait. Where two runs pass each other's checks, the later record wins: the other run
finds it before it completes a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from skyrl_fast.train.checkpoint.local import RunInUseError
from skyrl_fast.train.checkpoint.object_folder import ObjectFolder, ObjectStoreError

logger = logging.getLogger(__name__)

RECORD = "run.json"
ID_FILE = "checkpoint_run_id.txt"  # in the run folder
RENEW_SECONDS = 60.0
LEASE_SECONDS = 600.0  # after which a run that has not renewed its record is taken as dead


@dataclass(frozen=True, slots=True)
class _Record:
    """The content of `run.json`.

    Args:
        run: id of the run.
        process: pid and host of its rank 0.
        time: when it was written, in seconds since 1970; 0: the run has ended.
    """

    run: str
    process: str
    time: float

    @property
    def is_live(self) -> bool:
        """Whether its run may be running."""
        return time.time() - self.time < LEASE_SECONDS


class RunClaim:
    """This run's claim to the checkpoints in a folder; another run's record ends it.

    Args:
        folder: of the checkpoints.
        run: id of the run.
    """

    def __init__(self, folder: ObjectFolder, run: str) -> None:
        self._folder = folder
        self._mine = _Record(run, f"process {os.getpid()} on {socket.gethostname()}", 0.0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Write the record, renew it during the block, and mark it as ended after it.

        Raises:
            RunInUseError: another run has the folder, or it cannot be used.
        """
        try:
            self._take()
        except ObjectStoreError as error:
            raise RunInUseError(f"checkpoint folder cannot be used: {error}") from error
        ended = threading.Event()
        thread = threading.Thread(target=self._renew, args=(ended,), name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(ObjectStoreError):  # else it ends by itself
                if self.owner() is None:
                    self._folder.write(RECORD, _bytes(self._mine))

    def owner(self) -> str | None:
        """Return which other process has the folder; None: this one."""
        found = self._read()
        if found is None:
            return "an unknown process, which has deleted run.json"
        return None if found.run == self._mine.run else found.process

    def _take(self) -> None:
        now = _bytes(replace(self._mine, time=time.time()))
        if not self._folder.create(RECORD, now):
            found = self._read()
            if found is not None and found.run != self._mine.run and found.is_live:
                left = LEASE_SECONDS - (time.time() - found.time)
                raise RunInUseError(
                    f"checkpoint folder {self._folder.url} is in use by {found.process}: wait for "
                    "it, stop it, or choose another trainer.ckpt_path; if it was killed, its claim "
                    f"ends in {left:.0f} s, or with {self._folder.url}/{RECORD}"
                )
            self._folder.write(RECORD, now)
        owner = self.owner()
        if owner is not None:
            raise RunInUseError(f"checkpoint folder {self._folder.url} is in use by {owner}")

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(RENEW_SECONDS):
            try:
                if self.owner() is not None:
                    return  # the next checkpoint says so
                self._folder.write(RECORD, _bytes(replace(self._mine, time=time.time())))
            except ObjectStoreError as error:
                logger.warning("the claim to the checkpoints was not renewed: %s", error)

    def _read(self) -> _Record | None:
        content = self._folder.read(RECORD)
        if content is None:
            return None
        try:
            return _Record(**json.loads(content))
        except (TypeError, ValueError):  # cut, or of another program
            return _Record("", "an unknown process", 0.0)


def run_id(run_path: Path) -> str:
    """Return the id of the run in this folder; create one for a new run."""
    file = run_path / ID_FILE
    if not file.is_file():
        file.write_text(uuid.uuid4().hex, encoding="ascii")
    return file.read_text(encoding="ascii")


def _bytes(record: _Record) -> bytes:
    return json.dumps(asdict(record)).encode()
