"""Saved adapters under `tinker://` paths, in a folder of this machine.

    RUNS/<training run>/weights/<name>           an adapter and its optimizer
    RUNS/<training run>/sampler_weights/<name>   an adapter, to sample from

Each is written under a hidden name, flushed, and renamed: a reader, or a server that was killed,
never sees half of one. One that is overwritten is moved aside first, and put back at the next start
if the server was killed before the new one had its name. The adapter's files are PEFT's.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from skyrl_fast.config.model_folder import model_folder
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.errors import RunError
from skyrl_fast.tinker.wire import RefusedCallError
from skyrl_fast.train.checkpoint.local import flush, flush_tree, write_json
from skyrl_fast.train.checkpoint.manifest import MANIFEST, find_damage, make_manifest

SCHEME = "tinker://"
TRAINING = "weights"
SAMPLER = "sampler_weights"
KINDS = {TRAINING: "training", SAMPLER: "sampler"}  # by the SDK's name in a checkpoint's record
STATE = "tinker.json"
ASIDE = ".old"  # of one that is being overwritten
CONFIG = "adapter_config.json"  # PEFT's files
WEIGHTS = "adapter_model.safetensors"
EXAMPLE = f"{SCHEME}RUN/{TRAINING}/NAME or {SCHEME}RUN/{SAMPLER}/NAME"
_RUN = re.compile(r"[A-Za-z0-9_-]{1,80}(:train:\d{1,9})?")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class StoreFullError(RunError):
    """A checkpoint cannot be written: the disk is full or not writable."""


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """A `tinker://` path.

    Args:
        run: training run, which is a model's id.
        kind: `TRAINING` or `SAMPLER`.
    """

    run: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        """Return the path; RefusedCallError if it is none, or leads elsewhere.

        Example:
            >>> TinkerPath.parse("tinker://a:train:0/weights/first").name
            'first'
        """
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise RefusedCallError(f"path: expected {EXAMPLE}, got {text!r:.200}")
        return cls(check_run(parts[0]), parts[1], check_name(parts[2]))


def check_run(run: str) -> str:
    """Return the name of a training run; RefusedCallError if it could be none."""
    if not _RUN.fullmatch(run):
        raise RefusedCallError(f"path: expected the id of a training run, got {run!r:.100}")
    return run


def check_name(name: str) -> str:
    """Return the name of a checkpoint; RefusedCallError if it could be none."""
    if not _NAME.fullmatch(name):
        raise RefusedCallError(
            "path: expected a name of letters, digits, '.', '_' and '-' that does not begin with "
            f"'.', got {name!r:.100}"
        )
    return name


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """What is recorded of a saved adapter, next to its files.

    Args:
        base_model: the name that clients gave.
        time, expires_at: in ISO 8601; the latter "" if it never expires.
        train_attn, train_mlp: which modules have the adapter.
        has_optimizer: whether the optimizer's moments are saved with it.
    """

    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    time: str
    expires_at: str = ""
    has_optimizer: bool = False
    user_metadata: dict[str, str] = field(default_factory=dict)


class CheckpointStore:
    """The saved adapters in a folder.

    Args:
        clock: returns the present time, in UTC.
    """

    def __init__(self, folder: Path, clock: Callable[[], datetime] | None = None) -> None:
        self._folder = folder
        self._clock = clock or (lambda: datetime.now(UTC))
        self._recover()

    def _recover(self) -> None:
        """Put back what a server that was killed had moved aside to overwrite it."""
        for kind in KINDS:
            for old in self._folder.glob(f"*/{kind}/.*{ASIDE}"):
                final = old.with_name(old.name.removeprefix(".").removesuffix(ASIDE))
                if final.exists():
                    shutil.rmtree(old, ignore_errors=True)
                else:
                    old.rename(final)

    def folder(self, path: TinkerPath) -> Path:
        return self._folder / path.run / path.kind / path.name

    def now(self) -> str:
        return self._clock().isoformat()

    def expiry(self, ttl_seconds: int | None) -> str:
        """Return the time at which a checkpoint of this age expires, "" for None."""
        if ttl_seconds is None:
            return ""
        if ttl_seconds <= 0:
            raise RefusedCallError(f"ttl_seconds: expected a positive number, got {ttl_seconds}")
        return (self._clock() + timedelta(seconds=ttl_seconds)).isoformat()

    @contextmanager
    def writing(
        self, path: TinkerPath, saved: SavedAdapter, *, overwrite: bool = False
    ) -> Iterator[Path]:
        """Yield a folder whose files become the checkpoint when the block ends without error.

        Raises:
            RefusedCallError: there is one of this name, and it may not be overwritten.
            StoreFullError: the disk is full or not writable; what was there is intact.
        """
        final = self.folder(path)
        if self._is_there(path) and not overwrite:
            raise RefusedCallError(f"path: expected a new name, got {path}, which exists")
        hidden = final.with_name(f".{final.name}.partial")
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
            yield hidden
            write_json(hidden / STATE, asdict(saved))
            flush_tree(hidden)
            write_json(hidden / MANIFEST, make_manifest(hidden))
            flush(hidden)
            self._rename(hidden, final)
        except BaseException as error:
            shutil.rmtree(hidden, ignore_errors=True)
            # safetensors raises an error of its own for a full disk.
            if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
                raise StoreFullError(f"{path} was not saved: {error}") from error
            raise

    def _rename(self, hidden: Path, final: Path) -> None:
        if final.exists():
            old = final.with_name(f".{final.name}{ASIDE}")
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            hidden.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            hidden.rename(final)
        flush(final.parent)

    def find(self, path: TinkerPath) -> SavedAdapter:
        """Return the record of a saved adapter.

        Raises:
            RefusedCallError: there is none, it has expired, or its files are damaged.
        """
        if not self._is_there(path):
            raise RefusedCallError(f"path: there is no {path} (deleted, expired, or never saved)")
        damage = find_damage(self.folder(path))
        if damage is not None:
            name, reason = damage
            raise RefusedCallError(f"{path}: {name} is damaged: {reason}")
        return self._read(path)

    def _is_there(self, path: TinkerPath) -> bool:
        if not (self.folder(path) / STATE).is_file():
            return False
        expires_at = self._read(path).expires_at
        if expires_at and datetime.fromisoformat(expires_at) <= self._clock():
            self.delete(path)
            return False
        return True

    def _read(self, path: TinkerPath) -> SavedAdapter:
        values = json.loads((self.folder(path) / STATE).read_text(encoding="utf-8"))
        names = {one.name for one in fields(SavedAdapter)}
        return SavedAdapter(**{name: value for name, value in values.items() if name in names})

    def delete(self, path: TinkerPath) -> None:
        """Delete a saved adapter; one that does not exist is none already."""
        final = self.folder(path)
        if not final.is_dir():
            return
        # Out of sight first: a deletion that is interrupted must not leave half a checkpoint.
        hidden = final.with_name(f".{final.name}.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        final.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def list(self, run: str | None = None) -> list[tuple[TinkerPath, SavedAdapter]]:
        """Return the saved adapters of a training run, or of all, the oldest first."""
        runs = [run] if run is not None else [p.name for p in self._folder.glob("*") if p.is_dir()]
        found = []
        for name in runs:
            for kind in KINDS:
                for folder in sorted((self._folder / name / kind).glob("[!.]*")):
                    path = TinkerPath(name, kind, folder.name)
                    if self._is_there(path):
                        found.append((path, self._read(path)))
        return sorted(found, key=lambda one: one[1].time)

    def size(self, path: TinkerPath) -> int:
        """Return the bytes of a saved adapter's files."""
        return sum(file.stat().st_size for file in self.folder(path).rglob("*") if file.is_file())


def checkpoint_record(store: CheckpointStore, path: TinkerPath, saved: SavedAdapter) -> Any:
    """Return what the SDK shows of a checkpoint."""
    return {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": KINDS[path.kind],
        "time": saved.time,
        "tinker_path": str(path),
        "size_bytes": store.size(path),
        "public": False,
        "user_metadata": saved.user_metadata or None,
        "expires_at": saved.expires_at or None,
    }


def is_saved_adapter(folder: Path) -> bool:
    """Return whether this is the folder of a saved adapter."""
    return (folder / STATE).is_file()


def export_saved(folder: Path, out: Path, *, merged: bool = False) -> Path:
    """Copy PEFT's files of a saved adapter to a new folder; return where they are from.

    Args:
        merged: write its base model with the adapter merged in instead.

    Raises:
        ValueError: the new folder exists, the files are damaged, or there is no base model.
    """
    if out.exists():
        raise ValueError(f"{out}: expected a new folder, which exists")
    if damage := find_damage(folder):
        name, reason = damage
        raise ValueError(f"{folder}: {name} is damaged: {reason}")
    hidden = out.with_name(f".{out.name}.partial")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    if merged:
        _write_model(folder, hidden)
    else:
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(folder / name, hidden / name)
    hidden.rename(out)
    return folder


def _write_model(folder: Path, out: Path) -> None:
    from skyrl_fast.train.checkpoint.model_export import take_modes_of, write_merged

    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    lora = LoraConfig(rank=config["r"], alpha=config["lora_alpha"], use_rslora=config["use_rslora"])
    base = config["base_model_name_or_path"]
    write_merged(lora, base, folder, model_folder(base), out)
    take_modes_of(out / "config.json")
