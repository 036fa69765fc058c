"""Atomic checkpoints, and the locks of the folders of a run.

A checkpoint is a folder `step_000012` with
    policy/                 the model and its tokenizer in Hugging Face format
    optimizer.safetensors   AdamW's moments by parameter name; of several ranks: the folder
                            optimizer/, with a file of each rank
    random.safetensors      torch's random states
    state.json              counters, data position, other small state
    manifest.json           digests of all other files
It is written under a hidden name, flushed to the disk, and renamed: a reader never sees an
incomplete one. Nothing in it is pickled. A resumed run compares the files with the manifest first.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from skyrl_fast.errors import RunError
from skyrl_fast.system.file_lock import close_locked, is_locked, lock_file
from skyrl_fast.train.checkpoint.manifest import (
    MANIFEST,
    Entries,
    ReadDigests,
    digest_pieces,
    find_damage,
    make_manifest,
)
from skyrl_fast.train.checkpoint.saved_state import check_state

STATE = "state.json"
_RUN_LOCK = "run.lock"
_CHECKPOINT_LOCK = "checkpoints.lock"
ADVICE = (
    "; choose another checkpoint (trainer.resume_path), or the newest intact one with --resume "
    "(trainer.resume_mode=latest)"
)
_NAME = re.compile(r"step_(\d{6,})")
_LEFT = re.compile(r"\.(step_\d{6,})\.(partial|old)")  # being written or deleted; replaced


class CheckpointError(RunError):
    """A checkpoint could not be written, or is damaged; the message says what to do."""


class RunInUseError(RunError):
    """A folder of the run belongs to a running process or to an earlier run."""

    exit_code = 2


@contextmanager
def begin_checkpoint(folder: Path, step: int) -> Iterator[Path]:
    """Yield the empty hidden folder of a checkpoint; remove it if the block raises.

    Raises:
        CheckpointError: the disk is full or not writable. Earlier checkpoints are intact.
    """
    temporary = _hidden_path(folder, step, "partial")
    with _remove_on_error(folder, step):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temporary.mkdir()
        yield temporary


def complete_checkpoint(
    folder: Path, step: int, *, keep: int = -1, written: Callable[[], Entries] = dict
) -> Path:
    """Add the manifest to a begun checkpoint, flush, rename; delete old ones; return its folder.

    Args:
        written: waits for files that others write, and returns their entries of the manifest.

    Raises:
        CheckpointError: the disk is full or not writable. Earlier checkpoints are intact.
    """
    final = folder / f"step_{step:06d}"
    temporary = _hidden_path(folder, step, "partial")
    with _remove_on_error(folder, step):
        known = written()
        with ThreadPoolExecutor(1) as pool:  # the digests are computed while the disk is waited for
            # From the page cache, before the files are evicted from it.
            manifest = pool.submit(make_manifest, temporary, known)
            flush_tree(temporary)
        write_json(temporary / MANIFEST, manifest.result())
        flush(temporary)
        if final.exists():
            # A folder cannot replace another in one step: the old one is hidden first, then
            # deleted.
            old = _hidden_path(folder, step, "old")
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            temporary.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.rename(final)
        # The new name must reach the disk, too.
        flush(folder)
    if keep > 0:
        for _, old in checkpoints(folder)[:-keep]:
            # Out of sight first: a deletion that is interrupted must not leave half a checkpoint.
            old.rename(folder / f".{old.name}.partial")
        _remove_leftovers(folder)
    return final


def _hidden_path(folder: Path, step: int, suffix: str) -> Path:
    return folder / f".step_{step:06d}.{suffix}"


@contextmanager
def _remove_on_error(folder: Path, step: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        # Also for KeyboardInterrupt: the next run must not find half a checkpoint.
        shutil.rmtree(_hidden_path(folder, step, "partial"), ignore_errors=True)
        if isinstance(error, OSError) or _says_disk_full(error):
            raise CheckpointError(_write_advice(folder, step, error)) from error
        raise


def _remove_leftovers(folder: Path) -> None:
    """Remove partly written or partly deleted checkpoints, also of a killed process."""
    for path, _ in _left(folder, "partial"):
        shutil.rmtree(path, ignore_errors=True)
    for path, final in _left(folder, "old"):
        # Else a kill came between the two renames, and the old one is the checkpoint.
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)


def _left(folder: Path, suffix: str) -> list[tuple[Path, Path]]:
    """Return the hidden folders of checkpoints with this suffix, each with its final path."""
    matches = ((_LEFT.fullmatch(path.name), path) for path in folder.iterdir())
    return [(path, folder / match[1]) for match, path in matches if match and match[2] == suffix]


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the complete checkpoints as (step, folder), oldest first."""
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None; undo an interrupted replacement."""
    _undo_replacements(folder)
    found = checkpoints(folder)
    if found:
        return found[-1][1]
    return None


def _undo_replacements(folder: Path) -> None:
    if folder.is_dir():
        for old, final in _left(folder, "old"):
            if not final.exists():
                old.rename(final)


def newest_intact(
    folder: Path, read_digests: ReadDigests = digest_pieces
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest checkpoint that `verify_checkpoint` accepts, and newer ones with reasons.

    None if there are no checkpoints; an interrupted replacement is undone first.

    Args:
        folder: that of the checkpoints.
        read_digests: reads the files of one.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    _undo_replacements(folder)
    errors: list[tuple[Path, str]] = []
    for _, checkpoint in reversed(checkpoints(folder)):
        try:
            verify_checkpoint(checkpoint, read_digests)
        except CheckpointError as error:
            errors.append((checkpoint, str(error).removesuffix(ADVICE)))
        else:
            return checkpoint, errors
    if errors:
        reasons = "; ".join(reason for _, reason in errors)
        raise CheckpointError(
            f"no intact checkpoint in {folder}: {reasons}; put back a copy of one, or start a new "
            "run in another trainer.run_path"
        )
    return None, []


def verify_checkpoint(checkpoint: Path, read_digests: ReadDigests = digest_pieces) -> None:
    """Check all files against the manifest, and the values of `state.json`.

    Args:
        checkpoint: its folder.
        read_digests: reads the files.

    Raises:
        CheckpointError: a file is missing or damaged; the message names it.
    """
    damage = find_damage(checkpoint, read_digests)
    if damage is not None:
        name, reason = damage
        raise damage_error(checkpoint / name, reason)
    read_state(checkpoint)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of `state.json`; CheckpointError if it is damaged or impossible."""
    path = checkpoint / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        check_state(state)
    except (OSError, ValueError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise damage_error(path, "missing" if missing else str(error)) from error
    assert isinstance(state, dict)
    return state


def damage_error(path: Path, reason: str) -> CheckpointError:
    """Return the error of a damaged file of a checkpoint, with the step and what to do."""
    checkpoint = next((p for p in path.parents if _step_of_name(p) is not None), path.parent)
    step = _step_of_name(checkpoint)
    if step is None:
        of_step = ""
    else:
        of_step = f"of step {step} "
    return CheckpointError(f"checkpoint {of_step}is damaged: {path}: {reason}{ADVICE}")


def _step_of_name(checkpoint: Path) -> int | None:
    match = _NAME.match(checkpoint.name)  # also of one that was set aside
    if match is None:
        return None
    return int(match[1])


def set_aside(checkpoint: Path, suffix: str) -> Path:
    """Rename a checkpoint, so that it is not taken for one any more; return its new path."""
    for number in itertools.count(1):
        name = f"{checkpoint.name}.{suffix}" + (f"-{number}" if number > 1 else "")
        aside = checkpoint.with_name(name)
        if not aside.exists():
            break
    checkpoint.rename(aside)
    flush(checkpoint.parent)
    return aside


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: a crash leaves the old file or the new one."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    # Before the rename: after a power failure the new name could be that of an empty file.
    flush(temporary)
    temporary.replace(path)


@contextmanager
def lock_run(run_path: Path, checkpoint_folder: Path) -> Iterator[None]:
    """Lock a run's folders; the locks are released when the process exits, however it exits.

    Folders that did not exist are removed where the block raises before it has written anything.

    Raises:
        RunInUseError: another process holds one of them; the message names its pid.
    """
    process = os.getpid()
    new_folders = _missing_folders(run_path, checkpoint_folder)
    # A lock of its own: the folder may be inside another run's.
    lock = checkpoint_folder / _CHECKPOINT_LOCK
    with (
        _lock(run_path / _RUN_LOCK, "run folder", "trainer.run_path"),
        _lock(lock, "checkpoint folder", "trainer.ckpt_path"),
    ):
        try:
            yield
        except BaseException:
            if os.getpid() == process:  # not in a forked child
                _remove_unused(new_folders)
            raise


def _missing_folders(*folders: Path) -> list[Path]:
    """Return the folders and their parents that do not exist, each before its parent."""
    missing = {path for folder in folders for path in (folder, *folder.parents)}
    missing = {path for path in missing if not path.exists()}
    return sorted(missing, key=lambda path: len(path.parts), reverse=True)


def _remove_unused(folders: Sequence[Path]) -> None:
    """Remove folders, each before its parent, unless one has more than locks and empty files."""
    files = []
    for folder in folders:
        for file in folder.iterdir() if folder.is_dir() else ():
            if file in folders:
                continue
            is_lock = file.name in (_RUN_LOCK, _CHECKPOINT_LOCK)
            if not is_lock and (file.is_dir() or file.stat().st_size > 0):
                return
            files.append(file)
    # Another process that waits for a lock finds the file gone, and is refused.
    for file in files:
        file.unlink()
    for folder in folders:
        with suppress(OSError):  # another run has begun there
            folder.rmdir()


@contextmanager
def _lock(path: Path, what: str, setting: str) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link in the folder must not have us write the pid into another file.
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise RunInUseError(f"{what} {path.parent} cannot be used: {error}") from error
    try:
        lock_file(lock)
    except BlockingIOError:
        owner = _owner(os.pread(lock, 32, 0))
        os.close(lock)
        raise RunInUseError(
            f"{what} {path.parent} is in use by {owner}: wait for it, stop it, or choose another "
            f"{setting}"
        ) from None
    except OSError as error:
        os.close(lock)
        raise RunInUseError(f"{what} {path.parent} cannot be locked: {error}") from error
    if not path.exists() or not os.path.samestat(os.fstat(lock), path.stat()):
        close_locked(lock)
        raise RunInUseError(
            f"{what} {path.parent} was just removed by another run, which did not start: try again"
        )
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # A forked child unwinds to here, too, and must leave its parent's pid in the file.
        if is_locked(lock):
            os.ftruncate(lock, 0)
            close_locked(lock)


def _owner(written: bytes) -> str:
    """Return the holder of a lock, from what is in its file."""
    pid = written.strip().decode("ascii", "replace")
    if not pid.isdigit():
        return "an unknown process"
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return f"a process on another machine, or one that process {pid} (which has ended) started"
    except (OSError, OverflowError):
        pass  # it belongs to another user
    return f"process {pid}"


def flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _says_disk_full(error: BaseException) -> bool:
    # By the message: safetensors raises no OSError.
    return "No space left" in str(error) or "os error 28" in str(error)


def _write_advice(folder: Path, step: int, error: BaseException) -> str:
    full = _says_disk_full(error) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    before = latest_checkpoint(folder)
    if before:
        kept = f"the checkpoint {before} is intact"
    else:
        kept = "there is no earlier checkpoint"
    cause = "the disk is full" if full else str(error)
    todo = "free space" if full else "make the folder writable"
    return f"checkpoint of step {step} not written to {folder}: {cause}; {kept}; {todo} and resume"
