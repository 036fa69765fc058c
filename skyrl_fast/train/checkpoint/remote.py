"""Checkpoints at a URL: the files of `checkpoint.py`, complete when their manifest is there.

A checkpoint is written to a local folder and uploaded, the manifest last. Nothing that a manifest
names is replaced: a second checkpoint of step 12 is `step_000012-2`. The manifest is deleted first.
A checkpoint that must not be read any more has its manifest under another name.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path, PurePosixPath

from skyrl_fast.system.temporary_folder import temporary_folder
from skyrl_fast.train.checkpoint.local import (
    ADVICE,
    CheckpointError,
    RunInUseError,
    verify_checkpoint,
)
from skyrl_fast.train.checkpoint.manifest import MANIFEST, Entries, make_manifest
from skyrl_fast.train.checkpoint.object_folder import ObjectFolder, ObjectStoreError
from skyrl_fast.train.checkpoint.run_claim import RunClaim, run_id

logger = logging.getLogger(__name__)

TEMPORARY = "skyrl_fast-checkpoint-"  # prefix of the local folders
_NAME = re.compile(r"step_(\d{6,})(?:-(\d+))?")
_ASIDE = re.compile(r"manifest\.\w+\.json")


class RemoteCheckpoints:
    """The checkpoints of a run in the folder at a URL.

    Args:
        url: trainer.ckpt_path.
    """

    def __init__(self, url: str) -> None:
        self.folder = ObjectFolder(url.rstrip("/"))
        self._claim: RunClaim | None = None
        self._taken: set[str] = set()  # names of checkpoints, incomplete ones, too
        self._local = Path()

    def __str__(self) -> str:
        """Return the URL."""
        return self.folder.url

    @contextmanager
    def claimed(self, run_path: Path, *, resumes: bool) -> Iterator[None]:
        """Claim the folder for the run and remove what an interrupted one has left.

        Args:
            run_path: trainer.run_path, locked.
            resumes: whether the run may continue an earlier one.

        Raises:
            RunInUseError: another run has the folder, or an earlier one has.
        """
        claim = RunClaim(self.folder, run_id(run_path))
        with temporary_folder(TEMPORARY) as self._local, claim.held():
            if not resumes and self.saved():
                raise RunInUseError(
                    f"checkpoint folder {self} holds an earlier run: --resume continues it; for a "
                    "new run choose another trainer.ckpt_path"
                )
            self._claim = claim
            self._remove_old(keep=-1)
            yield

    def saved(self) -> list[tuple[int, str]]:
        """Return the complete checkpoints as (step, URL), oldest first."""
        newest = _newest(self._files())
        return [(step, (self.folder / name).url) for step, name in newest.items()]

    @contextmanager
    def begin(self, step: int) -> Iterator[tuple[Path, ObjectFolder]]:
        """Yield the empty local folder of a checkpoint and where its files belong.

        Raises:
            CheckpointError: the local folder cannot be written.
        """
        names = (f"step_{step:06d}" + (f"-{n}" if n > 1 else "") for n in count(1))
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        local = self._local / name
        with self._removed_on_error(step, local):
            local.mkdir()
            yield local, self.folder / name

    def complete(
        self,
        step: int,
        local: Path,
        target: ObjectFolder,
        *,
        keep: int = -1,
        written: Callable[[], Entries] = dict,
    ) -> str:
        """Upload what is in the local folder, then the manifest; delete old checkpoints.

        Args:
            local, target: of `begin`.
            keep: newest checkpoints to keep; -1: all.
            written: waits for files that others upload, and returns their entries of the manifest.

        Returns:
            The checkpoint's URL.

        Raises:
            CheckpointError: it could not be uploaded, or the folder is another run's by now.
        """
        with self._removed_on_error(step, local):
            known = written()
            manifest = make_manifest(local, known)
            mine = [local / name for name in manifest["files"] if name not in known]
            target.upload(local, mine)
            self._check_claim()
            target.write(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
        shutil.rmtree(local, ignore_errors=True)
        try:
            self._remove_old(keep=keep)
        except ObjectStoreError as error:
            logger.warning("old checkpoints remain, the next one tries again: %s", error)
        return target.url

    def newest_intact(self, folder: Path) -> tuple[str | None, Path | None, list[tuple[str, str]]]:
        """Download the newest checkpoint that is intact.

        Args:
            folder: local and empty; the checkpoint is put in it.

        Returns:
            Its URL and local folder, or None, and newer ones with what is wrong with them.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        errors: list[tuple[str, str]] = []
        for _, url in reversed(self.saved()):
            try:
                return url, fetch(url, folder), errors
            except ObjectStoreError:
                raise  # not damaged
            except CheckpointError as error:
                errors.append((url, str(error).removesuffix(ADVICE)))
        if errors:
            reasons = "; ".join(reason for _, reason in errors)
            raise CheckpointError(
                f"no intact checkpoint in {self}: {reasons}; put back a copy of one, or start a "
                "new run in another trainer.run_path and trainer.ckpt_path"
            )
        return None, None, []

    def _files(self) -> dict[str, list[str]]:
        """Return what is directly in the folder of each checkpoint."""
        names = [name for name in self.folder.names() if _NAME.fullmatch(name)]
        return {name: (self.folder / name).names() for name in names}

    def _remove_old(self, *, keep: int) -> None:
        """Delete incomplete and replaced checkpoints, and complete ones that are not kept."""
        files = self._files()
        complete = list(_newest(files).values())
        kept = set(complete[-keep:] if keep > 0 else complete)
        kept |= {name for name, found in files.items() if any(map(_ASIDE.fullmatch, found))}
        for name in sorted(files.keys() - kept):
            (self.folder / name).remove(MANIFEST)
            self.folder.remove(name)
        self._taken |= kept

    def _check_claim(self) -> None:
        assert self._claim is not None
        owner = self._claim.owner()
        if owner is not None:
            raise CheckpointError(
                f"checkpoint folder {self} has been taken over by {owner}: this run must not "
                "write there any more"
            )

    @contextmanager
    def _removed_on_error(self, step: int, local: Path) -> Iterator[None]:
        """Remove the local folder if the block raises; say what was not written."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(local, ignore_errors=True)
            if isinstance(error, OSError | ObjectStoreError) or "No space left" in str(error):
                raise CheckpointError(
                    f"checkpoint of step {step} not written to {self}: {error}; earlier "
                    "checkpoints are intact: resume when it can be written"
                ) from error
            raise


def fetch(url: str, folder: Path) -> Path:
    """Download a checkpoint to a folder of its name and verify it.

    Args:
        url: of a complete checkpoint, or of one that was set aside.
        folder: local; what it has of the same name is replaced.

    Raises:
        CheckpointError: it is incomplete or damaged; the message names the file by its URL.
        ObjectStoreError: it cannot be read.
    """
    source = ObjectFolder(url.rstrip("/"))
    content = next((found for name in manifests(url) if (found := source.read(name))), None)
    if content is None:
        raise CheckpointError(f"no checkpoint at {url}: {MANIFEST} is missing")
    local = folder / source.url.rpartition("/")[2]
    shutil.rmtree(local, ignore_errors=True)
    local.mkdir(parents=True)
    try:
        source.download(local, _inside(content))
        (local / MANIFEST).write_bytes(content)
        verify_checkpoint(local)
    except CheckpointError as error:
        shutil.rmtree(local, ignore_errors=True)
        raise CheckpointError(str(error).replace(str(local), source.url)) from error
    return local


def manifests(url: str) -> list[str]:
    """Return the names of a checkpoint's manifest, first that of one that is not set aside."""
    names = ObjectFolder(url.rstrip("/")).names()
    return [name for name in names if name == MANIFEST] + list(filter(_ASIDE.fullmatch, names))


def set_remote_aside(url: str, suffix: str) -> str:
    """Rename a checkpoint's manifest, so that it is not read any more; return its new URL."""
    checkpoint = ObjectFolder(url)
    content, name = checkpoint.read(MANIFEST), MANIFEST.replace(".json", f".{suffix}.json")
    assert content is not None
    checkpoint.write(name, content)
    checkpoint.remove(MANIFEST)
    return f"{url}/{name}"


def _inside(manifest: bytes) -> list[str]:
    """Return the files that a manifest lists, none outside its folder.

    A manifest that is none is damage, which `verify_checkpoint` names.
    """
    try:
        names = [str(name) for name in json.loads(manifest)["files"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
    paths = map(PurePosixPath, names)
    if any(path.is_absolute() or ".." in path.parts for path in paths):
        raise CheckpointError("checkpoint is damaged: its manifest lists files outside its folder")
    return names


def _newest(files: Mapping[str, Sequence[str]]) -> dict[int, str]:
    """Return the newest complete checkpoint of each step by name, in the order of the steps.

    Args:
        files: what is directly in the folder of each checkpoint.
    """
    matches = (_NAME.fullmatch(name) for name, found in files.items() if MANIFEST in found)
    numbers = sorted((int(match[1]), int(match[2] or 1), match[0]) for match in matches if match)
    return {step: name for step, _, name in numbers}
