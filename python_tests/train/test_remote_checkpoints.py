"""Checkpoints in an object store: complete or not there, whatever fails or is killed."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

pytest.importorskip("transformers")

from _object_stores import URL, FlakyStore, KillAt, KilledError, plain
from _object_stores import store as store
from test_rank_checkpoints import STATE

from skyrl_fast.system.temporary_folder import locked_folder
from skyrl_fast.train.checkpoint import run_claim
from skyrl_fast.train.checkpoint.fetched import FetchedCheckpoint
from skyrl_fast.train.checkpoint.local import CheckpointError, RunInUseError
from skyrl_fast.train.checkpoint.object_folder import ObjectFolder, check_url
from skyrl_fast.train.checkpoint.remote import (
    TEMPORARY,
    RemoteCheckpoints,
    fetch,
    manifests,
    set_remote_aside,
)


@contextmanager
def claimed(run: Path, *, resumes: bool = True) -> Iterator[RemoteCheckpoints]:
    run.mkdir(exist_ok=True)
    checkpoints = RemoteCheckpoints(URL + "/")
    with checkpoints.claimed(run, resumes=resumes):
        yield checkpoints


def write(checkpoints: RemoteCheckpoints, step: int, text: str, *, keep: int = -1) -> str:
    """Write a checkpoint with this text in its two files."""
    with checkpoints.begin(step) as (local, target):
        (local / "policy").mkdir()
        (local / "policy/weights").write_text(text)
        (local / "state.json").write_text(json.dumps({**STATE, "step": step, "text": text}))
    return checkpoints.complete(step, local, target, keep=keep)


def newest(folder: Path, checkpoints: RemoteCheckpoints | None = None) -> tuple[str, str] | None:
    """Return URL and text of the newest checkpoint, which must be intact."""
    url, local, damaged = (checkpoints or RemoteCheckpoints(URL)).newest_intact(folder / "copies")
    assert damaged == []
    if url is None or local is None:
        return None
    text = (local / "policy/weights").read_text()
    assert json.loads((local / "state.json").read_text())["text"] == text
    return url, text


def objects(store: type[FlakyStore]) -> list[str]:
    return sorted(key.removeprefix("/bucket/run/") for key in store.store)


@pytest.mark.spec("run.checkpoint-url")
def test_manifest_is_written_last_and_deleted_first(
    tmp_path: Path, store: type[FlakyStore]
) -> None:
    with claimed(tmp_path / "run", resumes=False) as checkpoints:
        assert newest(tmp_path) is None
        write(checkpoints, 1, "one")
        requests: list[str] = []

        def listen(name: str, path: str, request: Callable[[], Any]) -> Any:
            if name in ("put_file", "pipe_file", "rm"):
                requests.append(f"{name} {path.removeprefix('/bucket/run/')}")
            return request()

        store.around = staticmethod(listen)
        assert write(checkpoints, 12, "twelve", keep=1) == f"{URL}/step_000012"
        assert requests == [
            "put_file step_000012/policy/weights",
            "put_file step_000012/state.json",
            "pipe_file step_000012/manifest.json",
            "rm step_000001/manifest.json",
            "rm step_000001",
        ]
        assert newest(tmp_path) == (f"{URL}/step_000012", "twelve")
        assert checkpoints.saved() == [(12, f"{URL}/step_000012")]
    files = ("manifest.json", "policy/weights", "state.json")
    assert objects(store) == ["run.json", *(f"step_000012/{file}" for file in files)]


@pytest.mark.spec("run.checkpoint-url-kills")
@pytest.mark.parametrize("when", ["before", "half", "after"])
@pytest.mark.parametrize("step", [1, 2])
def test_kill_at_any_request_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, store: type[FlakyStore], step: int, when: str
) -> None:
    """Step 2 replaces step 1, of which one is kept; or step 1 is written again."""
    run, seen = tmp_path / "run", []
    for number in range(1000):
        store.store.clear()
        store.around = staticmethod(plain)
        with claimed(run) as checkpoints:
            write(checkpoints, 1, "old")
        kill = KillAt(number, when)
        store.around = staticmethod(kill)
        try:
            with claimed(run) as checkpoints:
                write(checkpoints, step, "new", keep=1)
        except KilledError:
            pass
        store.around = staticmethod(plain)
        found = newest(tmp_path)
        assert found is not None
        seen.append(found[1])
        with claimed(run) as checkpoints:  # the next start removes what was left
            kept = {url.rpartition("/")[2] for _, url in checkpoints.saved()}
            names = {key.partition("/")[0] for key in objects(store)}
            assert names == {"run.json", *kept}
            assert newest(tmp_path) == found
            write(checkpoints, 3, "next", keep=1)
            assert newest(tmp_path) == (f"{URL}/step_000003", "next")
        if not kill.killed:
            break
    assert 10 < number < 100
    changes = [one for one, other in itertools.pairwise(seen) if one != other]
    assert changes == ["old"]  # the manifest's request is the moment; never back again


@pytest.mark.spec("run.checkpoint-url")
def test_failed_requests_are_repeated(tmp_path: Path, store: type[FlakyStore]) -> None:
    failed: set[tuple[str, str]] = set()

    def once(name: str, path: str, request: Callable[[], Any]) -> Any:
        if (name, path) not in failed:
            failed.add((name, path))
            raise ConnectionError("reset by peer")
        return request()

    store.around = staticmethod(once)
    with claimed(tmp_path / "run") as checkpoints:
        write(checkpoints, 1, "one")
        assert newest(tmp_path) == (f"{URL}/step_000001", "one")
    names = {name for name, _ in failed}
    assert names == {"cat_file", "get", "info", "ls", "pipe_file", "put_file"}


@pytest.mark.spec("run.checkpoint-url")
def test_upload_that_arrives_cut_is_repeated(tmp_path: Path, store: type[FlakyStore]) -> None:
    cut: list[str] = []

    def first(name: str, path: str, request: Callable[[], Any]) -> Any:
        done = request()
        if name == "put_file" and path.endswith("weights") and not cut:
            cut.append(path)
            store.store[path] = type(store.store[path])(store(), path, b"o")
        return done

    store.around = staticmethod(first)
    with claimed(tmp_path / "run") as checkpoints:
        write(checkpoints, 1, "one")
    assert cut
    assert newest(tmp_path) == (f"{URL}/step_000001", "one")


@pytest.mark.spec("run.checkpoint-url")
@pytest.mark.parametrize("request_name", ["put_file", "pipe_file"])
@pytest.mark.parametrize("error", [PermissionError("no"), OSError(28, "full"), ValueError("odd")])
def test_failed_upload_names_the_url_and_earlier_checkpoints_are_intact(
    tmp_path: Path, store: type[FlakyStore], request_name: str, error: Exception
) -> None:
    with claimed(tmp_path / "run") as checkpoints:
        write(checkpoints, 1, "one", keep=1)

        def fails(name: str, path: str, request: Callable[[], Any]) -> Any:
            if name == request_name:
                raise error
            return request()

        store.around = staticmethod(fails)
        wanted = rf"step 2 not written to {URL}: {URL}/step_000002/.*{type(error).__name__}.*intact"
        with pytest.raises(CheckpointError, match=wanted):
            write(checkpoints, 2, "two", keep=1)
        store.around = staticmethod(plain)
        assert newest(tmp_path) == (f"{URL}/step_000001", "one")
        assert write(checkpoints, 2, "two", keep=1) == f"{URL}/step_000002-2"
        assert newest(tmp_path) == (f"{URL}/step_000002-2", "two")
    assert {key.partition("/")[0] for key in objects(store)} == {"run.json", "step_000002-2"}


@pytest.mark.spec("run.checkpoint-url")
def test_old_checkpoint_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, store: type[FlakyStore], caplog: pytest.LogCaptureFixture
) -> None:
    with claimed(tmp_path / "run") as checkpoints:
        write(checkpoints, 1, "one", keep=1)

        def fails(name: str, path: str, request: Callable[[], Any]) -> Any:
            if name == "rm":
                raise PermissionError("no deletions")
            return request()

        store.around = staticmethod(fails)
        write(checkpoints, 2, "two", keep=1)
        assert "old checkpoints remain" in caplog.text and "no deletions" in caplog.text
        store.around = staticmethod(plain)
        assert len(checkpoints.saved()) == 2
        write(checkpoints, 3, "three", keep=1)
        assert checkpoints.saved() == [(3, f"{URL}/step_000003")]


def change(store: type[FlakyStore], name: str, content: bytes | None) -> None:
    key = f"/bucket/run/{name}"
    old = store.store.pop(key)
    if content is not None:
        store.store[key] = type(old)(store(), key, content)


@pytest.mark.spec("run.checkpoint-url", "async.checkpoint-digests")
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("policy/weights", b"tw", "policy/weights: wanted 3 bytes, got 2"),
        ("policy/weights", b"tow", "policy/weights: its content is not what was written"),
        ("policy/weights", None, "policy/weights: missing"),
        ("state.json", b"", "state.json: wanted"),
        ("manifest.json", b"{", "manifest.json: not a manifest"),
        ("manifest.json", b'{"files": {"../x": 1}}', "lists files outside its folder"),
        ("manifest.json", b'{"files": {"/etc/x": 1}}', "lists files outside its folder"),
    ],
)
def test_damaged_object_is_named_and_the_older_checkpoint_found(
    tmp_path: Path, store: type[FlakyStore], name: str, content: bytes | None, reason: str
) -> None:
    with claimed(tmp_path / "run") as checkpoints:
        write(checkpoints, 1, "one")
        two = write(checkpoints, 2, "two")
    change(store, f"step_000002/{name}", content)
    url, local, damaged = RemoteCheckpoints(URL).newest_intact(tmp_path / "copies")
    assert url == f"{URL}/step_000001" and local is not None
    assert [found for found, _ in damaged] == [two]
    assert reason in damaged[0][1]
    assert str(tmp_path) not in damaged[0][1]
    if "outside" not in reason:
        assert f"step 2 is damaged: {two}/{name}" in damaged[0][1]
    change(store, "step_000001/policy/weights", b"")
    with pytest.raises(CheckpointError, match=f"no intact checkpoint in {URL}: .*; check"):
        RemoteCheckpoints(URL).newest_intact(tmp_path / "copies")


@pytest.mark.spec("run.checkpoint-url")
def test_network_failure_while_reading_is_not_damage(
    tmp_path: Path, store: type[FlakyStore]
) -> None:
    with claimed(tmp_path / "run") as checkpoints:
        write(checkpoints, 1, "one")

    def fails(name: str, path: str, request: Callable[[], Any]) -> Any:
        if name == "get":
            raise ConnectionError("reset by peer")
        return request()

    store.around = staticmethod(fails)
    with pytest.raises(CheckpointError, match=f"{URL}/step_000001: ConnectionError: reset"):
        RemoteCheckpoints(URL).newest_intact(tmp_path / "copies")


@pytest.mark.spec("run.checkpoint-url")
def test_checkpoint_that_was_set_aside_is_kept_and_can_be_chosen(
    tmp_path: Path, store: type[FlakyStore]
) -> None:
    with claimed(tmp_path / "run") as checkpoints:
        write(checkpoints, 1, "one")
        two = write(checkpoints, 2, "two")
        aside = f"{two}/manifest.later.json"
        assert set_remote_aside(two, "later") == aside
        assert newest(tmp_path) == (f"{URL}/step_000001", "one")
        assert manifests(two) == ["manifest.later.json"]
        assert (fetch(two, tmp_path / "chosen") / "policy/weights").read_text() == "two"
    with claimed(tmp_path / "run") as checkpoints:
        assert write(checkpoints, 2, "new", keep=1) == f"{two}-2"
        assert newest(tmp_path) == (f"{two}-2", "new")
        assert (fetch(two, tmp_path / "chosen") / "policy/weights").read_text() == "two"
    assert {key.partition("/")[0] for key in objects(store)} == {
        "run.json",
        "step_000002",
        "step_000002-2",
    }


@pytest.mark.spec("run.own-files")
def test_other_objects_are_kept(tmp_path: Path, store: type[FlakyStore]) -> None:
    for name in ("step_1/x", "step_000001.later/x", "notes.txt", "other/step_000001/x"):
        store().pipe_file(f"/bucket/run/{name}", b"")
    before = objects(store)
    with claimed(tmp_path / "run") as checkpoints:
        write(checkpoints, 1, "one", keep=1)
        write(checkpoints, 2, "two", keep=1)
    assert set(before) < set(objects(store))


@pytest.mark.spec("run.checkpoint-url-claim")
def test_url_of_a_running_or_earlier_run_is_refused(tmp_path: Path) -> None:
    in_use = rf"{URL} is in use by process \d+ on .* ends in \d+ s"
    with claimed(tmp_path / "a", resumes=False) as checkpoints:
        write(checkpoints, 1, "one")
        for resumes in (False, True):
            with (
                pytest.raises(RunInUseError, match=in_use),
                claimed(tmp_path / "b", resumes=resumes),
            ):
                pass
        assert write(checkpoints, 2, "two")
    for run in "ab":
        with (
            pytest.raises(RunInUseError, match=f"{URL} holds an earlier run: --resume continues"),
            claimed(tmp_path / run, resumes=False),
        ):
            pass
    with claimed(tmp_path / "b") as checkpoints:  # on another machine, after the first has ended
        assert [step for step, _ in checkpoints.saved()] == [1, 2]


@pytest.mark.spec("run.checkpoint-url-claim")
def test_claim_of_a_killed_run_ends(
    tmp_path: Path, store: type[FlakyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    with claimed(tmp_path / "a") as checkpoints:
        write(checkpoints, 1, "one")
        record = store().cat_file("/bucket/run/run.json")
    store().pipe_file("/bucket/run/run.json", record)  # as if it were killed
    with pytest.raises(RunInUseError, match="in use"), claimed(tmp_path / "b"):
        pass
    with claimed(tmp_path / "a"):  # the same run folder: nothing to wait for
        pass
    store().pipe_file("/bucket/run/run.json", record)
    monkeypatch.setattr(run_claim, "LEASE_SECONDS", 0.0)
    with claimed(tmp_path / "b") as checkpoints:
        write(checkpoints, 2, "two")


@pytest.mark.spec("run.checkpoint-url-claim")
@pytest.mark.parametrize("content", [b"", b"[]", b'{"run": "a"}'])
def test_record_that_is_damaged_claims_nothing(
    tmp_path: Path, store: type[FlakyStore], content: bytes
) -> None:
    store().pipe_file("/bucket/run/run.json", content)
    with claimed(tmp_path / "a") as checkpoints:
        write(checkpoints, 1, "one")


@pytest.mark.spec("run.checkpoint-url-claim")
def test_run_that_was_replaced_completes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with claimed(tmp_path / "a") as first:
        write(first, 1, "one")
        monkeypatch.setattr(run_claim, "LEASE_SECONDS", -1.0)  # as if it had hung for long
        with claimed(tmp_path / "b") as second:
            with pytest.raises(CheckpointError, match=rf"{URL} has been taken over by process"):
                write(first, 2, "two")
            assert [step for step, _ in second.saved()] == [1]
            write(second, 2, "of b")
            assert newest(tmp_path) == (f"{URL}/step_000002", "of b")


@pytest.mark.spec("run.checkpoint-url-claim")
def test_of_two_runs_at_the_same_moment_one_gets_the_folder(
    tmp_path: Path, store: type[FlakyStore]
) -> None:
    start, refused, held = threading.Barrier(4), [], threading.Event()

    def run(number: int) -> None:
        start.wait(60)
        try:
            with claimed(tmp_path / str(number)):
                assert held.wait(60)
        except RunInUseError as error:
            refused.append(str(error))
            if len(refused) == 3:
                held.set()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(refused) == 3 and held.is_set()


@pytest.mark.spec("run.checkpoint-url-claim")
def test_file_system_without_conditional_creation(
    tmp_path: Path, store: type[FlakyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipe_file(self: FlakyStore, path: str, value: bytes) -> None:
        MemoryFileSystem.pipe_file(self, path, value)

    monkeypatch.setattr(store, "pipe_file", pipe_file)
    with claimed(tmp_path / "a") as checkpoints:
        write(checkpoints, 1, "one")
        with pytest.raises(RunInUseError, match="in use"), claimed(tmp_path / "b"):
            pass


@pytest.mark.spec("run.checkpoint-url-claim")
def test_record_is_renewed(
    tmp_path: Path, store: type[FlakyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_claim, "RENEW_SECONDS", 0.01)

    def written() -> float:
        return float(json.loads(store().cat_file("/bucket/run/run.json"))["time"])

    with claimed(tmp_path / "a"):
        first, deadline = written(), time.monotonic() + 60
        while written() == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert written() == 0.0


@pytest.mark.spec("run.checkpoint-url-claim")
def test_folder_that_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path, store: type[FlakyStore]
) -> None:
    def fails(name: str, path: str, request: Callable[[], Any]) -> Any:
        if name == "pipe_file":
            raise PermissionError("403 Forbidden")
        return request()

    store.around = staticmethod(fails)
    wanted = f"cannot be used: {URL}/run.json: PermissionError: 403 Forbidden"
    with pytest.raises(RunInUseError, match=wanted), claimed(tmp_path / "a"):
        pass


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nothing://a", "Protocol not known: nothing"),
        ("filecache::memory://a", "wanted one scheme"),
        ("missing-package://a", "Install the package of the test"),
    ],
)
@pytest.mark.spec("run.checkpoint-url")
def test_url_without_a_file_system_is_an_error(url: str, reason: str) -> None:
    register_implementation(
        "missing-package",
        "a_package_that_is_missing.Store",
        clobber=True,
        errtxt="Install the package of the test",
    )
    with pytest.raises(ValueError, match=reason):
        check_url(url)


@pytest.mark.spec("run.checkpoint-url")
def test_folders_are_created_where_the_file_system_has_them(tmp_path: Path) -> None:
    folder = ObjectFolder(f"file://{tmp_path}/a/b [1]*")
    file = tmp_path / "x"
    file.write_bytes(b"123")
    assert folder.names() == [] and folder.read("x") is None
    assert folder.create("c/d", b"1") and not folder.create("c/d", b"2")
    (folder / "c").upload(tmp_path, [file])
    assert folder.read("c/d") == b"1" and (folder / "c").names() == ["d", "x"]
    (folder / "c").download(tmp_path / "copy", ["x", "nothing"])
    assert (tmp_path / "copy/x").read_bytes() == b"123"
    folder.remove("c")
    folder.remove("c")
    assert folder.names() == []


@pytest.mark.spec("run.checkpoint-url")
def test_one_rank_of_a_node_fetches_a_checkpoint(tmp_path: Path) -> None:
    with claimed(tmp_path / "run") as checkpoints:
        url = write(checkpoints, 1, "one")
    copy = FetchedCheckpoint(url, tmp_path / f"tmp/{TEMPORARY}x/step_000001")
    threads = [threading.Thread(target=copy._on_this_node) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (copy.folder / "policy/weights").read_text() == "one"
    with pytest.raises(FileExistsError):
        locked_folder(tmp_path / "tmp", TEMPORARY, name=f"{TEMPORARY}x")
    shutil.rmtree(copy.folder.parent)
