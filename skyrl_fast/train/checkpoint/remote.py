"""Checkpoints at an fsspec URL (s3://bucket/run): copies of local ones, complete with a manifest.

A local checkpoint (`local.py`) is uploaded, the manifest last, and deleted manifest first. Object
stores have no rename and no locks, but an object appears with its full content or not at all.
Nothing that a manifest names is replaced, so that a kill cannot mix two checkpoints: a second one
of step 12 is `step_000012-2`.

Design: docs/design/020-several-gpus.md
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs

from skyrl_fast.train.checkpoint.local import (
    CheckpointError,
    RunInUseError,
    set_aside,
    verify_checkpoint,
)
from skyrl_fast.train.checkpoint.manifest import MANIFEST, list_files

logger = logging.getLogger(__name__)

CLAIM = "run.json"  # names the run that writes at the URL, while it does
ASIDE = "manifest.aside.json"  # manifest of a checkpoint that is not to be read any more
DOWNLOADS = 8  # at a time
WAITS = (1.0, 4.0, 16.0)  # seconds before a request is repeated
_NAME = re.compile(r"step_(\d{6,})(?:-(\d+))?")


class ObjectStoreError(CheckpointError):
    """Requests for a URL failed, repeatedly."""


class CheckpointStore:
    """The checkpoints of a run at a URL, of which the newest `keep` are kept; -1: all."""

    def __init__(self, url: str, *, keep: int = -1) -> None:
        self.url = url.rstrip("/")
        self._keep = keep

    @contextmanager
    def claim(self, run_name: str, run_path: Path, *, resumes: bool) -> Iterator[None]:
        """Claim the URL, or take over the claim of this run if it was killed; clean up there.

        Raises:
            RunInUseError: another run has claimed the URL, or it cannot be used.
        """
        url = f"{self.url}/{CLAIM}"
        run = {"run_name": run_name, "run_path": str(run_path)}
        mine = run | {"process": f"process {os.getpid()} on {socket.gethostname()}"}
        try:
            if not _create(url, json.dumps(mine).encode()):
                owner = _read_claim(url)
                # A repeated request finds what the first one has created.
                if owner != mine and not (resumes and owner.items() >= run.items()):
                    raise RunInUseError(
                        f"checkpoint folder {self.url} is in use by {owner.get('process')}, run "
                        f"folder {owner.get('run_path')}: wait for it, stop it, or choose another "
                        "trainer.ckpt_path; if it was killed, --resume it with its "
                        f"trainer.run_path and trainer.run_name, or delete {url}"
                    )
                _write(url, json.dumps(mine).encode())
            self._remove_old(keep=-1)
        except ObjectStoreError as error:
            raise RunInUseError(f"checkpoint folder cannot be used: {error}") from error
        try:
            yield
        finally:
            # Without the claim's removal a resumed run takes it over.
            with suppress(ObjectStoreError):
                if _read_claim(url) == mine:
                    _remove(url)

    def list_saved(self) -> list[tuple[int, str]]:
        """Return the complete checkpoints as (step, URL), oldest first."""
        result: list[tuple[int, str]] = []
        for step, name in _newest(self._files()).items():
            result.append((step, f"{self.url}/{name}"))
        return result

    def upload(self, checkpoint: Path) -> None:
        """Upload a complete local checkpoint, the manifest last; delete old ones.

        Raises:
            CheckpointError: it could not be uploaded; the local one and earlier ones are intact.
        """
        try:
            taken = _list(self.url)
            names = (checkpoint.name + (f"-{n}" if n > 1 else "") for n in count(1))
            name = next(name for name in names if name not in taken)
            for file in (*list_files((checkpoint / MANIFEST).read_bytes()), MANIFEST):
                _upload(checkpoint / file, f"{self.url}/{name}/{file}")
        except (ObjectStoreError, OSError) as error:
            raise CheckpointError(
                f"checkpoint {checkpoint} not uploaded to {self.url}: {error}; it is intact: "
                "resume when the URL can be written"
            ) from error
        try:
            self._remove_old(keep=self._keep)
        except ObjectStoreError as error:
            logger.warning("old checkpoints remain, the next one tries again: %s", error)

    def set_later_aside(self, step: int) -> list[str]:
        """Rename the manifests of later checkpoints, so that none is read; return their URLs."""
        later = [url for saved, url in self.list_saved() if saved > step]
        for url in later:
            _write(f"{url}/{ASIDE}", _read(f"{url}/{MANIFEST}") or b"")
            _remove(f"{url}/{MANIFEST}")
        return later

    def _files(self) -> dict[str, list[str]]:
        result: dict[str, list[str]] = {}
        for n in _list(self.url):
            if _NAME.fullmatch(n):
                result[n] = _list(f"{self.url}/{n}")
        return result

    def _remove_old(self, *, keep: int) -> None:
        """Delete incomplete and replaced checkpoints, and complete ones that are not kept."""
        files = self._files()
        complete = list(_newest(files).values())
        # Replaced ones of a step that is kept are not in `complete`.
        kept = set(complete[-keep:] if keep > 0 else complete)
        for name, content in files.items():
            if name not in kept and ASIDE not in content:
                # The manifest first: what a kill leaves is then incomplete, not damaged.
                _remove(f"{self.url}/{name}/{MANIFEST}")
                _remove(f"{self.url}/{name}")


def download(url: str, target: Path) -> Path:
    """Download a checkpoint and verify it; an existing target is set aside."""
    manifest = _read(f"{url}/{MANIFEST}")
    if manifest is None:
        raise CheckpointError(f"no complete checkpoint at {url}: {MANIFEST} is missing")
    local = target.with_name(f".{target.name}.partial")  # `local.py` removes what a kill leaves
    shutil.rmtree(local, ignore_errors=True)
    local.mkdir(parents=True)
    try:
        with ThreadPoolExecutor(DOWNLOADS) as pool:
            list(pool.map(partial(_download, url, local), list_files(manifest)))
        (local / MANIFEST).write_bytes(manifest)
        verify_checkpoint(local)
    except CheckpointError as error:
        raise type(error)(str(error).replace(str(local), url)) from error
    if target.exists():
        set_aside(target, "replaced")
    return local.rename(target)


def _newest(files: dict[str, list[str]]) -> dict[int, str]:
    """Return the newest complete checkpoint of each step by name, in the order of the steps."""
    matches = (_NAME.fullmatch(name) for name, content in files.items() if MANIFEST in content)
    numbers = sorted((int(match[1]), int(match[2] or 1), match[0]) for match in matches if match)
    return {step: name for step, _, name in numbers}


def _request(url: str, request: Callable[[Any, str], Any], *, missing: Any = ...) -> Any:
    """Return `request(file system, path in it)`, or `missing` if there is no object."""
    for wait in (*WAITS, None):
        try:
            fs, path = url_to_fs(url)
            # fsspec keeps listings, which another process may have changed since.
            fs.invalidate_cache()
            return request(fs, path)
        except Exception as error:  # raised by botocore, aiohttp, ...
            if missing is not ... and isinstance(error, FileNotFoundError):
                return missing
            reason = f"{url}: {type(error).__name__}: {error}"
            if wait is None:
                raise ObjectStoreError(reason) from error
            logger.warning("%s; again in %g s", reason, wait)
            time.sleep(wait)
    raise AssertionError


def _list(url: str) -> list[str]:
    """Return the names of objects and folders directly below."""
    found = _request(url, lambda fs, path: fs.ls(path, detail=False), missing=[])
    return sorted({name for each in found if (name := each.rstrip("/").rpartition("/")[2])})


def _read(url: str) -> bytes | None:
    return _request(url, lambda fs, path: bytes(fs.cat_file(path)), missing=None)


def _read_claim(url: str) -> dict[str, Any]:
    try:
        return dict(json.loads(_read(url) or b""))
    except (TypeError, ValueError):
        return {}  # cut, or of another program


def _remove(url: str) -> None:
    _request(url, lambda fs, path: fs.rm(path, recursive=True), missing=None)


def _create(url: str, content: bytes) -> bool:
    """Create an object, at once where the file system can; return False if it exists."""

    def create(fs: Any, path: str) -> bool:
        if fs.exists(path):
            return False
        try:
            _with_parents(fs, path, lambda: fs.pipe_file(path, content, mode="create"))
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError):  # it has no such mode
            fs.pipe_file(path, content)
        return True

    return bool(_request(url, create))


def _write(url: str, content: bytes) -> None:
    _request(url, lambda fs, path: fs.pipe_file(path, content))


def _upload(file: Path, url: str) -> None:
    def put(fs: Any, path: str) -> None:
        _with_parents(fs, path, lambda: fs.put_file(str(file), path))
        fs.invalidate_cache()
        expected = file.stat().st_size
        size = fs.info(path)["size"]
        if size != expected:
            raise OSError(f"expected {expected} bytes, got {size}")

    _request(url, put)


def _download(url: str, folder: Path, name: str) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    _request(f"{url}/{name}", lambda fs, path: fs.get_file(path, str(file)), missing="damage")


def _with_parents(fs: Any, path: str, write: Callable[[], object]) -> None:
    """Write; where a file system wants folders to exist first, create those below the bucket."""
    try:
        write()
    except FileNotFoundError:
        for parent in reversed(PurePosixPath(path).parents[:-2]):
            with suppress(FileExistsError):
                fs.mkdir(str(parent), create_parents=False)
        write()
