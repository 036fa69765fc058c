"""Saved adapters on a disk that fills up, and paths that lead elsewhere."""

import os
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest

from skyrl_fast.tinker.checkpoints import (
    ASIDE,
    SAMPLER,
    TRAINING,
    CheckpointStore,
    SavedAdapter,
    StoreFullError,
    TinkerPath,
    checkpoint_record,
)
from skyrl_fast.tinker.wire import RefusedCallError

START = datetime(2026, 1, 1, tzinfo=UTC)


def saved(store: CheckpointStore, **values: object) -> SavedAdapter:
    return SavedAdapter("base", 8, True, True, store.now(), **values)  # type: ignore[arg-type]


def write(store: CheckpointStore, path: TinkerPath, text: str = "x", **values: object) -> None:
    overwrite = bool(values.pop("overwrite", False))
    with store.writing(path, saved(store, **values), overwrite=overwrite) as folder:
        (folder / "weights").write_text(text)


@pytest.mark.parametrize("text", ["tinker://a:train:0/weights/n.1", "tinker://a/sampler_weights/b"])
def test_paths_are_what_they_print(text: str) -> None:
    assert str(TinkerPath.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a/weights/b",
        "tinker://a/weights",
        "tinker://a/weights/b/c",
        "tinker://a/optimizer/b",
        "tinker://../weights/b",
        "tinker://a/weights/..",
        "tinker://a/weights/.hidden",
        "tinker://a:train:x/weights/b",
        "tinker://a/weights/" + "b" * 300,
        "tinker://a/weights/b\n",
    ],
)
def test_other_paths_are_refused(text: str) -> None:
    with pytest.raises(RefusedCallError, match="path: expected"):
        TinkerPath.parse(text)


@pytest.mark.spec("tinker.paths")
def test_a_checkpoint_is_there_complete_or_not_at_all(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = TinkerPath("run", TRAINING, "first")
    full = pytest.raises(StoreFullError, match=r"first was not saved: .*No space left")
    with full, store.writing(path, saved(store)) as folder:
        (folder / "weights").write_text("half")
        raise OSError(28, "No space left on device")
    with pytest.raises(RefusedCallError, match="there is no"):
        store.find(path)
    assert not any(store.folder(path).parent.iterdir())
    write(store, path)
    assert store.find(path).rank == 8
    with pytest.raises(RefusedCallError, match="which exists"):
        write(store, path, "other")
    with pytest.raises(StoreFullError), store.writing(path, saved(store), overwrite=True):
        raise OSError(28, "No space left on device")
    assert (store.folder(path) / "weights").read_text() == "x"
    write(store, path, "other", overwrite=True)
    assert (store.folder(path) / "weights").read_text() == "other"


@pytest.mark.spec("tinker.paths")
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_server_that_dies_while_it_overwrites_leaves_the_old_or_the_new(
    renames: int, tmp_path: Path
) -> None:
    """It moves the old one aside, then gives the new one its name: it dies around each."""
    path = TinkerPath("run", TRAINING, "first")
    write(CheckpointStore(tmp_path), path, "old")
    rename = Path.rename

    def overwrite() -> None:
        calls = iter(range(renames))

        def dying(self: Path, target: Path) -> Path:
            if next(calls, None) is None:
                os._exit(9)
            return rename(self, target)

        Path.rename = dying  # type: ignore[assignment, method-assign]
        write(CheckpointStore(tmp_path), path, "new", overwrite=True)

    process = get_context("fork").Process(target=overwrite)
    process.start()
    process.join()
    assert process.exitcode == (0 if renames == 2 else 9)
    store = CheckpointStore(tmp_path)
    assert store.find(path).rank == 8
    text = (store.folder(path) / "weights").read_text()
    assert text == ("new" if renames == 2 else "old")
    names = [folder.name for folder in store.folder(path).parent.iterdir()]
    assert not any(name.endswith(ASIDE) for name in names)
    write(store, path, "newer", overwrite=True)
    assert (store.folder(path) / "weights").read_text() == "newer"


def test_damage_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = TinkerPath("run", SAMPLER, "first")
    write(store, path)
    (store.folder(path) / "weights").write_text("y")
    with pytest.raises(RefusedCallError, match="weights is damaged"):
        store.find(path)


def test_half_a_checkpoint_is_not_listed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, TinkerPath("run", TRAINING, "first"))
    hidden = tmp_path / "run" / TRAINING / ".second.partial"  # of a process that was killed
    hidden.mkdir()
    assert [str(path) for path, _ in store.list("run")] == ["tinker://run/weights/first"]
    write(store, TinkerPath("run", TRAINING, "second"))
    assert len(store.list()) == 2


def test_checkpoints_expire_and_are_deleted(tmp_path: Path) -> None:
    now = START
    store = CheckpointStore(tmp_path, lambda: now)
    path = TinkerPath("run", SAMPLER, "short")
    write(store, path, expires_at=store.expiry(3600))
    record = checkpoint_record(store, path, store.find(path))
    assert record["expires_at"] == (START + timedelta(hours=1)).isoformat()
    assert record["checkpoint_type"] == "sampler"
    now = START + timedelta(hours=2)
    assert store.list("run") == []
    assert not store.folder(path).exists()
    with pytest.raises(RefusedCallError, match="ttl_seconds"):
        store.expiry(0)
