"""New weights as a file for an engine's process, deleted once they are loaded."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from skyrl_fast.file_lock import close_locked, lock_file
from skyrl_fast.rollout.engine.tensor_digest import tensor_digest
from skyrl_fast.rollout.engine.weight_receipt import WeightSyncError

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "skyrl_fast-weights-"
_NAME = "weights.safetensors"


def weights_folders(folder: str | None) -> list[Path]:
    """Return the folders in which weights are handed over.

    Args:
        folder: that of `WeightsFile`.
    """
    return [Path(folder)] if folder else [SHARED_MEMORY, Path(tempfile.gettempdir())]


def is_weights_file(path: Path, folders: Sequence[Path]) -> bool:
    """Return whether a `WeightsFile` of this user in one of these folders has this path.

    Other users may create folders in shared memory, too.

    Args:
        path: without symbolic links.
    """
    places = [folder.resolve() for folder in folders]
    named = path.name == _NAME and path.parent.name.startswith(_PREFIX)
    return (
        named
        and path.parent.parent in places
        and _is_private(path.parent.stat())
        and path.is_file()
    )


def _is_private(folder: os.stat_result) -> bool:
    """Return whether only this user can change the folder; root may read those of all users."""
    owned = folder.st_uid == os.getuid() or os.getuid() == 0
    return owned and not stat.S_IMODE(folder.st_mode) & 0o022


class WeightsFile:
    """A safetensors file in shared memory (or a temporary folder) that only this user can read.

    safetensors holds tensors and no executable code. The file is deleted at the end of the
    context. A file that a killed process left behind is deleted when the next one is written: the
    lock on its folder ended with the process.

    Args:
        folder: where to write it instead, such as a folder that several machines share.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._where = folder
        self._folder: Path | None = None
        self._lock = -1

    def __enter__(self) -> WeightsFile:
        """Return the file; nothing is written yet."""
        return self

    def __exit__(self, *error: object) -> None:
        """Delete the file."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            close_locked(self._lock)
            self._folder = None

    @property
    def path(self) -> Path:
        """Path of the written weights."""
        if self._folder is None:
            raise WeightSyncError("no weights were written yet")
        return self._folder / _NAME

    def write(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Write all tensors and their digests; one with several names (tied) is written once.

        Raises:
            WeightSyncError: there is nothing to write, or not enough space.
        """
        from safetensors.torch import save_file

        tensors = _host_tensors(weights)
        if not tensors:
            raise WeightSyncError("there are no weights to hand over")
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        for place in {self._where, str(SHARED_MEMORY), tempfile.gettempdir()} - {None}:
            _remove_stale_folders(Path(str(place)))
        self._folder, self._lock = _locked_folder(self._where or _room_for(size))
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        save_file(tensors, self.path, metadata=digests)


def _host_tensors(
    weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    items = weights.items() if isinstance(weights, Mapping) else weights
    result: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, tensor in items:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        result[name] = tensor.detach().to("cpu").contiguous()
    return result


def _room_for(size: int) -> str | None:
    """Return shared memory if it has room for `size` bytes, else the temporary folder, or raise."""
    margin = size + size // 16
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        if shutil.disk_usage(SHARED_MEMORY).free > margin:
            return str(SHARED_MEMORY)
        log.warning("%s has no room for %d bytes of weights", SHARED_MEMORY, size)
    folder = tempfile.gettempdir()
    if shutil.disk_usage(folder).free <= margin:
        raise WeightSyncError(
            f"no room to hand over {size} bytes of weights: neither in {SHARED_MEMORY} nor in "
            f"{folder}. Free some, or set TMPDIR to a larger folder"
        )
    return folder


def _locked_folder(where: str | None) -> tuple[Path, int]:
    """Return a new folder, locked as long as this process lives and the descriptor is open."""
    # Until it is locked, its name does not match the pattern of _remove_stale_folders.
    folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=where))
    lock = os.open(folder, os.O_RDONLY)
    lock_file(lock)
    return folder.rename(folder.with_name(folder.name[1:])), lock


def _remove_stale_folders(where: Path) -> None:
    """Remove the folders of dead processes, which would fill up shared memory."""
    for folder in where.glob(f"{_PREFIX}*"):
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
