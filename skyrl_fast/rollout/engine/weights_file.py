"""New weights as a file that an engine's process can read, for as long as it takes to load them."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from skyrl_fast.rollout.engine.weight_update import WeightSyncError

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "skyrl_fast-weights-"


class WeightsFile:
    """A safetensors file in shared memory (or a temporary folder) that only this user can read.

    safetensors holds tensors and nothing that could run. The file goes away on leaving the
    context. One that a killed process left goes when the next one is written: its folder's lock
    went with the process.

    Args:
        folder: where to put it instead, such as one that several machines share.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._where = folder
        self._folder: Path | None = None
        self._lock = -1

    def __enter__(self) -> WeightsFile:
        """The file itself; nothing is written yet."""
        return self

    def __exit__(self, *error: object) -> None:
        """Delete the file."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None

    @property
    def path(self) -> Path:
        """Where the weights lie once written."""
        if self._folder is None:
            raise WeightSyncError("no weights were written yet")
        return self._folder / "weights.safetensors"

    def write(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Write all tensors; a tensor met again under another name (tied) is written once.

        Raises:
            WeightSyncError: nothing to write, or no room for it.
        """
        from safetensors.torch import save_file

        tensors = _host_tensors(weights)
        if not tensors:
            raise WeightSyncError("there are no weights to hand over")
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        for place in {self._where, str(SHARED_MEMORY), tempfile.gettempdir()} - {None}:
            _remove_left_behind(Path(str(place)))
        self._folder, self._lock = _locked_folder(self._where or _room_for(size))
        save_file(tensors, self.path)


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
    """Shared memory if it can take `size` bytes, else the temporary folder, else an error."""
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
    """A new folder, locked for as long as this process lives and the descriptor is open."""
    # Until it is locked it has a name that nobody looks for.
    folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=where))
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder.rename(folder.with_name(folder.name[1:])), lock


def _remove_left_behind(where: Path) -> None:
    """Remove the folders of processes that are gone: in shared memory they would fill it."""
    for folder in where.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue  # somebody else's, or gone by now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use
        finally:
            os.close(lock)
