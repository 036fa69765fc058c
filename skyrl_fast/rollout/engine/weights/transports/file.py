"""Weights as a safetensors file, deleted once they are loaded.

safetensors holds tensors and no executable code. The file is in shared memory, or in a temporary
folder, and only this user can read it. One that a killed process left behind is deleted when the
next one is written: the lock on its folder ended with the process.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from skyrl_fast.rollout.engine.weights.receipt import SentWeights, WeightSyncError
from skyrl_fast.rollout.engine.weights.tensor_file import (
    StreamedWeights,
    infos_of,
    num_bytes,
    write_tensors,
)
from skyrl_fast.rollout.engine.weights.transfer import Weights, WorkerCall, distinct_tensors
from skyrl_fast.system.file_lock import close_locked
from skyrl_fast.system.http_guard import RefusedError
from skyrl_fast.system.temporary_folder import lock_new_folder, remove_stale_folders

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


def free_bytes(folder: Path) -> int:
    """Return how many bytes can be written into a folder."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return 0
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True)
class WeightPlaces:
    """Where weights may be written.

    Args:
        shared_memory: folder of files in memory, the first choice.
        temporary: folder on a disk; None: the one of temporary files.
        free_bytes: room in a folder.
    """

    shared_memory: Path = SHARED_MEMORY
    temporary: Path | None = None
    free_bytes: Callable[[Path], int] = free_bytes

    def folders(self) -> list[Path]:
        return [self.shared_memory, self.disk()]

    def disk(self) -> Path:
        return Path(tempfile.gettempdir()) if self.temporary is None else self.temporary

    def have_room(self, folder: Path, size: int) -> bool:
        return self.free_bytes(folder) > size + size // 16


PLACES = WeightPlaces()
_PREFIX = "skyrl_fast-weights-"
_NAME = "weights.safetensors"


@contextmanager
def send_by_file(
    weights: Weights,
    dtype: torch.dtype | None = None,
    *,
    folder: str | None = None,
    unnamed: bool = False,
    places: WeightPlaces = PLACES,
) -> Iterator[WorkerCall]:
    """Write all tensors into a file that workers load; it is deleted at the end of the context.

    Args:
        weights: a tensor with several names (tied) is written once.
        dtype: that floating-point tensors are cast to on their device, before they are copied;
            None: as they are.
        folder: where to write it instead, such as a folder that several machines share.
        unnamed: whether an unnamed file in memory may replace one in shared memory, of which
            containers often have 64 MiB. Only processes of this user on this machine can open it,
            and only by its path, which is not one of a folder.
        places: where to write it without `folder`.

    Raises:
        WeightSyncError: there is nothing to write, or not enough space.
    """
    with ExitStack() as stack:
        # In a function of its own: its copies of the weights are freed before the engines load.
        path, sent = _write(stack, weights, dtype, folder, unnamed, places)
        yield WorkerCall("file", [str(path)], sent)


def receive_by_file(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file, which is mapped and not copied."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            yield name, file.get_tensor(name)


def write_adapter_folder(path: Path, config: Mapping[str, Any]) -> Path:
    """Make the folder of a file of `send_by_file` an adapter's, in PEFT's format; return it."""
    folder = path.parent
    text = json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", **config})
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    matrices = folder / "adapter_model.safetensors"
    if not matrices.exists():  # several servers read it
        os.link(path, matrices)
    return folder


def weights_folders(folder: str | None) -> list[Path]:
    if folder:
        return [Path(folder)]
    return PLACES.folders()


def check_file_call(
    arguments: list[Any], folders: Sequence[Path], trainer: str | None
) -> list[Any] | None:
    match arguments:
        case [str(path)]:
            return [str(check_path(path, folders))]
    return None


def check_path(text: str, folders: Sequence[Path], user: int | None = None) -> Path:
    """Return the path, without links, of a file of `send_by_file` in one of these folders.

    Args:
        text: the path.
        folders: the trainer's.
        user: id of the user who may have written it; None: this process's.

    Raises:
        RefusedError: it is of another user, or missing; the error does not reveal which.
    """
    user = os.getuid() if user is None else user
    try:
        path = Path(text).resolve(strict=True)
        in_folder = path.parent.parent in [folder.resolve() for folder in folders]
        has_name = path.name == _NAME and path.parent.name.startswith(_PREFIX)
        # Other users may create folders in shared memory, too.
        if has_name and in_folder and _is_private(path.parent.stat(), user) and path.is_file():
            return path
    except (OSError, ValueError, RuntimeError):  # NUL, too long, a cycle of links
        pass
    raise RefusedError(403, "expected weights that a trainer has written into the shared folder")


def _is_private(folder: os.stat_result, user: int) -> bool:
    """Return whether only this user can change the folder; root may read those of all users."""
    owned = folder.st_uid == user or user == 0
    return owned and not stat.S_IMODE(folder.st_mode) & 0o022


def _write(
    stack: ExitStack,
    weights: Weights,
    dtype: torch.dtype | None,
    folder: str | None,
    unnamed: bool,
    places: WeightPlaces,
) -> tuple[Path, SentWeights]:
    sent = SentWeights()
    tensors: Iterable[tuple[str, torch.Tensor]] = _copy_each(weights, dtype, sent)
    infos = None
    if isinstance(weights, StreamedWeights):
        infos = weights.infos(dtype)
    if infos is None:
        copies = dict(tensors)
        infos = infos_of(copies)
        tensors = copies.items()
    if not infos:
        raise WeightSyncError("there are no weights to hand over")
    path, opened = _make_file(stack, num_bytes(infos), folder, unnamed, places)
    with opened as file:
        write_tensors(file, infos, tensors)
    return path, sent


def _copy_each(
    weights: Weights, dtype: torch.dtype | None, sent: SentWeights
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, one in distinct_tensors(weights):
        tensor = _copy_to_host(one, dtype)
        sent.add(name, tensor)
        yield name, tensor


def _make_file(
    stack: ExitStack, size: int, folder: str | None, unnamed: bool, places: WeightPlaces
) -> tuple[Path, BinaryIO]:
    """Return the path of a new file with room for some bytes, and the file itself."""
    for parent in {*weights_folders(folder), *places.folders()}:
        remove_stale_folders(parent, _PREFIX)
    if unnamed and folder is None and not places.have_room(places.shared_memory, size):
        memory = os.memfd_create(_NAME)
        stack.callback(os.close, memory)
        file = os.fdopen(memory, "wb", closefd=False)
        return Path(f"/proc/{os.getpid()}/fd/{memory}"), file
    private, lock = lock_new_folder(folder or _find_room(places, size), _PREFIX)
    stack.callback(close_locked, lock)
    stack.callback(shutil.rmtree, private, ignore_errors=True)
    return private / _NAME, (private / _NAME).open("wb")


def _copy_to_host(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    if tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.contiguous()


def _find_room(places: WeightPlaces, size: int) -> Path:
    memory = places.shared_memory
    if places.have_room(memory, size):
        return memory
    folder = places.disk()
    if not places.have_room(folder, size):
        raise WeightSyncError(
            f"no room to hand over {size} bytes of weights: neither in {memory} nor in "
            f"{folder}. Free some, or set TMPDIR to a larger folder"
        )
    log.warning(
        "%s has no room for %.1f GiB of weights: every update writes them to %s, which may be a "
        "disk. More shared memory (docker run --shm-size) is faster",
        memory,
        size / 2**30,
        folder,
    )
    return folder
