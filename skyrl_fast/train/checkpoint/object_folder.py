"""A folder at an fsspec URL: s3://bucket/run, gs://bucket/run.

An object store has no folders, no rename and no locks; an object appears with its full content or
not at all. Each request is repeated a few times: networks fail more often than disks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsspec import get_filesystem_class
from fsspec.core import split_protocol, url_to_fs

from skyrl_fast.train.checkpoint.local import CheckpointError

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAITS = (1.0, 4.0, 16.0)  # seconds before a request is repeated


class ObjectStoreError(CheckpointError):
    """Requests for a URL failed, repeatedly."""


def is_url(path: str) -> bool:
    """Return whether a path is scheme://..., not one of a mounted file system."""
    return "://" in path


def check_url(url: str) -> None:
    """Check that there is a file system for the URL; it is not accessed.

    Raises:
        ValueError: the scheme is unknown, its package is missing, or URLs are chained.
    """
    protocol, _ = split_protocol(url)
    if protocol is None or "::" in url:
        raise ValueError(f"wanted one scheme://, got {url}")
    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url}: {error}") from error


@dataclass(frozen=True, slots=True)
class ObjectFolder:
    """The objects below a URL; names are relative to it.

    Every method raises ObjectStoreError, naming the URL, if requests fail.

    Args:
        url: without a slash at its end.
    """

    url: str

    def __truediv__(self, name: str) -> ObjectFolder:
        """Return a folder in this one."""
        return ObjectFolder(f"{self.url}/{name}")

    def names(self) -> list[str]:
        """Return the names of objects and folders directly in it; none if it does not exist."""

        def listed(fs: Any, path: str) -> list[str]:
            fs.invalidate_cache()
            try:
                found = fs.ls(path, detail=False)
            except FileNotFoundError:
                return []
            names = (each.rstrip("/") for each in found)
            return sorted(each.rpartition("/")[2] for each in names if each != path.rstrip("/"))

        return self._request(listed)

    def read(self, name: str) -> bytes | None:
        """Return an object's content; None if it does not exist."""

        def content(fs: Any, path: str) -> bytes | None:
            fs.invalidate_cache()
            try:
                return bytes(fs.cat_file(path))
            except FileNotFoundError:
                return None

        return self._request(content, name)

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object."""
        self._request(lambda fs, path: _with_parents(fs, path, fs.pipe_file, path, content), name)

    def create(self, name: str, content: bytes) -> bool:
        """Create an object, at once where the file system can; return False if it exists."""

        def created(fs: Any, path: str) -> bool:
            try:
                _with_parents(fs, path, fs.pipe_file, path, content, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, TypeError):  # it has no such mode
                if fs.exists(path):
                    return False
                _with_parents(fs, path, fs.pipe_file, path, content)
            return True

        return self._request(created, name)

    def upload(self, root: Path, files: Sequence[Path]) -> None:
        """Upload files below a local folder, under their paths in it."""

        def put(fs: Any, path: str) -> None:
            _with_parents(fs, path, fs.put_file, str(file), path)
            fs.invalidate_cache()
            wanted, got = file.stat().st_size, fs.info(path)["size"]
            if got != wanted:
                raise OSError(f"wanted {wanted} bytes, got {got}")

        for file in files:
            self._request(put, file.relative_to(root).as_posix())

    def download(self, root: Path, names: Sequence[str]) -> None:
        """Download objects to a local folder; those that do not exist are left out."""

        def get(fs: Any, path: str) -> None:
            fs.invalidate_cache()
            sizes = {key: info["size"] for key, info in fs.find(path, detail=True).items()}
            files = {f"{path}/{name}": root / name for name in names if f"{path}/{name}" in sizes}
            files = {key: file for key, file in files.items() if _size(file) != sizes[key]}
            for file in files.values():
                file.parent.mkdir(parents=True, exist_ok=True)
            fs.get(list(files), list(map(str, files.values())))

        self._request(get)

    def remove(self, name: str) -> None:
        """Delete an object or a folder, if it exists."""

        def removed(fs: Any, path: str) -> None:
            fs.invalidate_cache()
            with suppress(FileNotFoundError):
                fs.rm(path, recursive=True)

        self._request(removed, name)

    def _request(self, request: Callable[[Any, str], T], name: str = "") -> T:
        """Return `request(file system, path in it)`, after repetitions if it fails."""
        url = f"{self.url}/{name}" if name else self.url
        for wait in (*WAITS, None):
            try:
                return request(*url_to_fs(url))
            except Exception as error:  # of botocore, aiohttp, ...
                reason = f"{url}: {type(error).__name__}: {error}"
                if wait is None:
                    raise ObjectStoreError(reason) from error
                logger.warning("%s; again in %g s", reason, wait)
                time.sleep(wait)
        raise AssertionError


def _with_parents(
    fs: Any, path: str, write: Callable[..., object], *arguments: Any, **options: Any
) -> None:
    """Write; create the folders of the path first if the file system has folders and wants them."""
    try:
        write(*arguments, **options)
    except FileNotFoundError:
        for parent in _parents(path):
            with suppress(FileExistsError):
                fs.mkdir(parent, create_parents=False)
        write(*arguments, **options)


def _parents(path: str) -> Iterator[str]:
    """Yield the folders of a path but the first: a bucket is not created."""
    parts = path.split("/")
    first = next(number for number, part in enumerate(parts) if part)
    for end in range(first + 2, len(parts)):
        yield "/".join(parts[:end])


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1
