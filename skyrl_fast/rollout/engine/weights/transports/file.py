"""New weights as a file for an engine's process, deleted once they are loaded."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from skyrl_fast.rollout.engine.weights.digest import tensor_digest
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.system.file_lock import close_locked
from skyrl_fast.system.temporary_folder import locked_folder, remove_stale_folders

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
        unnamed: whether an unnamed file in memory may replace one in shared memory, of which
            containers often have 64 MiB. Only processes of this user on this machine can open it,
            and only by its path, which is not one of a folder.
    """

    def __init__(self, folder: str | None = None, *, unnamed: bool = False) -> None:
        self._where = folder
        self._may_be_unnamed = unnamed and folder is None
        self._folder: Path | None = None
        self._lock = -1
        self._memory = -1  # descriptor of an unnamed file
        self.digests: dict[str, str] = {}  # of the written tensors, by name
        self.num_bytes = 0  # of the written tensors

    def __enter__(self) -> WeightsFile:
        """Return the file; nothing is written yet."""
        return self

    def __exit__(self, *error: object) -> None:
        """Delete the file."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            close_locked(self._lock)
            self._folder = None
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    @property
    def path(self) -> Path:
        """Path of the written weights."""
        if self._memory >= 0:
            return Path(f"/proc/{os.getpid()}/fd/{self._memory}")
        if self._folder is None:
            raise WeightSyncError("no weights were written yet")
        return self._folder / _NAME

    def write(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write all tensors and their digests; one with several names (tied) is written once.

        Args:
            dtype: of the floating-point tensors in the file; None: as they are. They are cast on
                their device, before they are copied.

        Raises:
            WeightSyncError: there is nothing to write, or not enough space.
        """
        from safetensors.torch import save, save_file

        tensors = {name: _host_tensor(one, dtype) for name, one in distinct_tensors(weights)}
        if not tensors:
            raise WeightSyncError("there are no weights to hand over")
        size = self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        for place in {self._where, str(SHARED_MEMORY), tempfile.gettempdir()} - {None}:
            remove_stale_folders(Path(str(place)), _PREFIX)
        self.digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        if self._may_be_unnamed and not _has_room(SHARED_MEMORY, size):
            self._memory = os.memfd_create(_NAME)
            with os.fdopen(self._memory, "wb", closefd=False) as file:
                file.write(save(tensors))
            return
        where = self._where or _folder_with_room(size)
        self._folder, self._lock = locked_folder(where, _PREFIX)
        save_file(tensors, self.path)


def distinct_tensors(
    weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors, one with several names (tied) under the first."""
    items = weights.items() if isinstance(weights, Mapping) else weights
    # Not the tensors: they may be gathered one after another. A later one may have the address of
    # one that was freed.
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], StorageWeakRef] = {}
    for name, tensor in items:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen and not seen[key].expired():
            continue
        seen[key] = StorageWeakRef(tensor.untyped_storage())
        yield name, tensor.detach()


def cast_weight(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a floating-point tensor in this dtype; None, or another tensor: as it is."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _host_tensor(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a contiguous copy in main memory, pinned if it comes from a GPU."""
    tensor = cast_weight(tensor, dtype)
    if tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.contiguous()


def _has_room(folder: Path, size: int) -> bool:
    """Return whether `size` bytes can be written there, and some more."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return False
    return shutil.disk_usage(folder).free > size + size // 16


def _folder_with_room(size: int) -> str:
    """Return shared memory if it has room for `size` bytes, else the temporary folder, or raise."""
    if _has_room(SHARED_MEMORY, size):
        return str(SHARED_MEMORY)
    folder = tempfile.gettempdir()
    if not _has_room(Path(folder), size):
        raise WeightSyncError(
            f"no room to hand over {size} bytes of weights: neither in {SHARED_MEMORY} nor in "
            f"{folder}. Free some, or set TMPDIR to a larger folder"
        )
    log.warning(
        "%s has no room for %.1f GiB of weights: every update writes them to %s, which may be a "
        "disk. More shared memory (docker run --shm-size) is faster",
        *(SHARED_MEMORY, size / 2**30, folder),
    )
    return folder
