"""Checkpoints in an object store: complete or not there, whatever fails or is killed."""

import itertools
import json
import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from _checkpoints import write_checkpoint
from _object_stores import URL, FlakyStore, KillAt, KilledError, failing, plain
from _object_stores import store as store
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from test_rank_checkpoints import STATE

from skyrl_fast.config import Config, ConfigError, load_config
from skyrl_fast.train.checkpoint.local import (
    CheckpointError,
    RunInUseError,
    latest_checkpoint,
    verify_checkpoint,
)
from skyrl_fast.train.checkpoint.manifest import find_damage, list_files
from skyrl_fast.train.checkpoint.remote import CheckpointStore, ObjectStoreError, download
from skyrl_fast.train.checkpoint.starting_point import starting_point
from skyrl_fast.train.setup.given_objects import with_absolute_paths


class Run:
    """A run with a local folder, whose checkpoints are uploaded to the URL."""

    def __init__(self, path: Path, *, keep: int = -1) -> None:
        self.path = path
        self.store = CheckpointStore(URL + "/", keep=keep)

    def claim(self, *, resumes: bool = True) -> AbstractContextManager[None]:
        return self.store.claim("run", self.path, resumes=resumes)

    def write(self, step: int, text: str) -> None:
        """Write a checkpoint with this text in its two files, and upload it."""

        def files(folder: Path) -> None:
            (folder / "policy").mkdir()
            (folder / "policy/weights").write_text(text)
            (folder / "state.json").write_text(json.dumps({**STATE, "step": step, "text": text}))

        self.store.upload(write_checkpoint(self.path / "checkpoints", step, files))

    def newest(self) -> str | None:
        """Return the text of the newest checkpoint at the URL, which must be intact."""
        saved = self.store.list_saved()
        if not saved:
            return None
        local = download(saved[-1][1], self.path.parent / "copy")
        text = (local / "policy/weights").read_text()
        assert json.loads((local / "state.json").read_text())["text"] == text
        shutil.rmtree(local)
        return text


def run_at_url(folder: Path, *options: str) -> Config:
    paths = f"trainer.run_path={folder}", f"trainer.ckpt_path={URL}"
    needed = "data.train_data=[a.jsonl]", "trainer.policy.model.path=m"
    return load_config(None, [*needed, *paths, *options])


def objects(store: type[FlakyStore]) -> list[str]:
    return sorted(key.removeprefix("/bucket/run/") for key in store.store)


@pytest.mark.spec("run.checkpoint-url")
def test_manifest_is_written_last_and_deleted_first(
    tmp_path: Path, store: type[FlakyStore]
) -> None:
    run = Run(tmp_path / "run", keep=1)
    with run.claim(resumes=False):
        assert run.newest() is None
        run.write(1, "one")
        requests: list[str] = []

        def listen(name: str, path: str, request: Callable[[], Any]) -> Any:
            if name in ("put_file", "pipe_file", "rm"):
                requests.append(f"{name} {path.removeprefix('/bucket/run/')}")
            return request()

        store.around = staticmethod(listen)
        run.write(12, "twelve")
        assert requests == [
            "put_file step_000012/policy/weights",
            "put_file step_000012/state.json",
            "put_file step_000012/manifest.json",
            "rm step_000001/manifest.json",
            "rm step_000001",
        ]
        assert run.newest() == "twelve"
        assert run.store.list_saved() == [(12, f"{URL}/step_000012")]
    files = ("manifest.json", "policy/weights", "state.json")
    assert objects(store) == [f"step_000012/{file}" for file in files]


@pytest.mark.spec("run.checkpoint-url-kills")
@pytest.mark.parametrize("when", ["before", "half", "after"])
@pytest.mark.parametrize("step", [1, 2])
def test_kill_at_any_request_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, store: type[FlakyStore], step: int, when: str
) -> None:
    """Step 2 replaces step 1, of which one is kept; or step 1 is written again."""
    run, seen = Run(tmp_path / "run", keep=1), []
    for number in range(1000):
        store.store.clear()
        store.around = staticmethod(plain)
        with run.claim():
            run.write(1, "old")
        kill = KillAt(number, when)
        store.around = staticmethod(kill)
        with suppress(KilledError), run.claim():
            run.write(step, "new")
        store.around = staticmethod(plain)
        found = run.newest()
        assert found is not None
        seen.append(found)
        with run.claim():  # the next start removes what was left
            kept = {url.rpartition("/")[2] for _, url in run.store.list_saved()}
            assert {key.partition("/")[0] for key in objects(store)} == {"run.json", *kept}
            assert run.newest() == found
            run.write(3, "next")
            assert run.newest() == "next"
        if not kill.killed:
            break
    assert 10 < number < 100
    changes = [one for one, other in itertools.pairwise(seen) if one != other]
    assert changes == ["old"]  # the manifest's request is the moment; never back again


def test_failed_requests_are_repeated(tmp_path: Path, store: type[FlakyStore]) -> None:
    failed: set[tuple[str, str]] = set()

    def once(name: str, path: str, request: Callable[[], Any]) -> Any:
        if (name, path) not in failed:
            failed.add((name, path))
            raise ConnectionError("reset by peer")
        return request()

    store.around = staticmethod(once)
    run = Run(tmp_path / "run")
    with run.claim():
        run.write(1, "one")
        assert run.newest() == "one"
    names = {name for name, _ in failed}
    assert names == {"cat_file", "get_file", "info", "ls", "pipe_file", "put_file", "rm"}


def test_upload_that_arrives_cut_is_repeated(tmp_path: Path, store: type[FlakyStore]) -> None:
    cut: list[str] = []

    def first(name: str, path: str, request: Callable[[], Any]) -> Any:
        done = request()
        if name == "put_file" and path.endswith("weights") and not cut:
            cut.append(path)
            store.store[path] = type(store.store[path])(store(), path, b"o")
        return done

    store.around = staticmethod(first)
    run = Run(tmp_path / "run")
    with run.claim():
        run.write(1, "one")
    assert cut
    assert run.newest() == "one"


@pytest.mark.parametrize(
    ("file", "error"),
    [("weights", PermissionError("no")), ("manifest.json", OSError(28, "full"))],
)
def test_failed_upload_names_the_url_and_all_other_checkpoints_are_intact(
    tmp_path: Path, store: type[FlakyStore], file: str, error: Exception
) -> None:
    run = Run(tmp_path / "run", keep=1)
    with run.claim():
        run.write(1, "one")
        wanted = rf"step_000002 not uploaded .*{URL}/step_000002/.*{type(error).__name__}.*intact"
        with failing("put_file", error, ending=file), pytest.raises(CheckpointError, match=wanted):
            run.write(2, "two")
        local = latest_checkpoint(run.path / "checkpoints")
        assert local is not None and local.name == "step_000002"
        verify_checkpoint(local)
        assert run.newest() == "one"
        run.write(2, "two again")
        assert run.newest() == "two again"
    (name,) = {key.partition("/")[0] for key in objects(store)}
    assert name == ("step_000002" if file == "weights" else "step_000002-2")


def test_old_checkpoint_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path / "run", keep=1)
    with run.claim():
        run.write(1, "one")
        with failing("rm", PermissionError("no deletions")):
            run.write(2, "two")
        assert "old checkpoints remain" in caplog.text and "no deletions" in caplog.text
        assert len(run.store.list_saved()) == 2
        run.write(3, "three")
        assert run.store.list_saved() == [(3, f"{URL}/step_000003")]


def change(store: type[FlakyStore], name: str, content: bytes | None) -> None:
    key = f"/bucket/run/{name}"
    old = store.store.pop(key)
    if content is not None:
        store.store[key] = type(old)(store(), key, content)


@pytest.mark.spec("async.checkpoint-digests")
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("policy/weights", b"tw", "policy/weights: expected 3 bytes, got 2"),
        ("policy/weights", b"tow", "policy/weights: its content is not what was written"),
        ("policy/weights", None, "policy/weights: missing"),
        ("state.json", b"", "state.json: expected"),
        ("manifest.json", b"{", "manifest.json: not a manifest"),
    ],
)
def test_damaged_object_is_named_and_the_older_checkpoint_found(
    tmp_path: Path,
    store: type[FlakyStore],
    caplog: pytest.LogCaptureFixture,
    name: str,
    content: bytes | None,
    reason: str,
) -> None:
    run = Run(tmp_path / "run")
    with run.claim():
        run.write(1, "one")
        run.write(2, "two")
    change(store, f"step_000002/{name}", content)
    config = run_at_url(tmp_path / "elsewhere", "trainer.resume_mode=latest")
    with ExitStack() as stack:
        start = starting_point(config, run.store, stack)
    assert start.checkpoint == tmp_path / "elsewhere/checkpoints/step_000001"
    assert start.state["text"] == "one"
    assert f"damaged: {URL}/step_000002/{name}" in caplog.text and reason in caplog.text
    assert str(tmp_path) not in caplog.text
    change(store, "step_000001/policy/weights", b"")
    shutil.rmtree(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"no intact checkpoint in {URL}: .*; check"):
        starting_point(config, run.store, ExitStack())


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x"])
def test_manifest_names_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    content = {"files": {name: {"bytes": 1, "digest": ""}}, "algorithm": "xxh3_128", "digest": ""}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    assert list_files((tmp_path / "manifest.json").read_bytes()) == []
    assert find_damage(tmp_path) == ("manifest.json", "lists files outside its folder")


@pytest.mark.parametrize("newest", ["local", "url"])
def test_newest_of_local_checkpoints_and_those_at_the_url_is_resumed(
    tmp_path: Path, newest: str
) -> None:
    run = Run(tmp_path / "run")
    with run.claim():
        run.write(1, "one")
        run.write(2, "two")
    if newest == "local":  # its upload has failed
        run.store.set_later_aside(1)
    else:  # the local one is damaged
        (run.path / "checkpoints/step_000002/policy/weights").write_text("tow")
    config = run_at_url(run.path, "trainer.resume_mode=latest")
    start = starting_point(config, run.store, ExitStack())
    assert start.checkpoint == run.path / "checkpoints/step_000002"
    assert start.state["text"] == "two" and start.aside == []
    verify_checkpoint(start.checkpoint)


def test_network_failure_while_reading_is_not_damage(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with run.claim():
        run.write(1, "one")
    config = run_at_url(tmp_path / "elsewhere", "trainer.resume_mode=latest")
    wanted = rf"{URL}/step_000001/.*: ConnectionError: reset"
    with (
        failing("get_file", ConnectionError("reset by peer")),
        pytest.raises(ObjectStoreError, match=wanted),
    ):
        starting_point(config, run.store, ExitStack())


def test_checkpoint_that_was_set_aside_is_kept_and_not_read(
    tmp_path: Path, store: type[FlakyStore]
) -> None:
    run = Run(tmp_path / "run", keep=1)
    with run.claim():
        run.write(1, "one")
        run.store = CheckpointStore(URL)
        run.write(2, "two")
        assert run.store.set_later_aside(1) == [f"{URL}/step_000002"]
        assert run.newest() == "one"
        with pytest.raises(CheckpointError, match="no complete checkpoint at flaky"):
            download(f"{URL}/step_000002", tmp_path / "chosen")
    run = Run(tmp_path / "run", keep=1)
    with run.claim():
        run.write(2, "new")
        assert run.newest() == "new"
    names = {key.partition("/")[0] for key in objects(store)}
    assert names == {"step_000002", "step_000002-2"}


def test_other_objects_are_kept(tmp_path: Path, store: type[FlakyStore]) -> None:
    for name in ("step_1/x", "step_000001.later/x", "notes.txt", "other/step_000001/x"):
        store().pipe_file(f"/bucket/run/{name}", b"")
    before = objects(store)
    run = Run(tmp_path / "run", keep=1)
    with run.claim():
        run.write(1, "one")
        run.write(2, "two")
    assert set(before) < set(objects(store))


@pytest.mark.spec("run.checkpoint-url-claim")
def test_url_of_a_running_run_is_refused(tmp_path: Path, store: type[FlakyStore]) -> None:
    in_use = rf"{URL} is in use by process \d+ on .*, run folder {tmp_path}/a: .* delete "
    with Run(tmp_path / "a").claim(resumes=False):
        for resumes in (False, True):
            with (
                pytest.raises(RunInUseError, match=in_use),
                Run(tmp_path / "b").claim(resumes=resumes),
            ):
                pass
    with Run(tmp_path / "b").claim():  # after the first has ended
        assert objects(store) == ["run.json"]
    assert objects(store) == []


@pytest.mark.parametrize("cut", [False, True])
def test_claim_of_a_killed_run_ends_when_it_is_resumed(
    tmp_path: Path, store: type[FlakyStore], cut: bool
) -> None:
    with Run(tmp_path / "a").claim():
        record = json.loads(store().cat_file("/bucket/run/run.json"))
    record["process"] = "process 1 on another machine"
    store().pipe_file("/bucket/run/run.json", b"" if cut else json.dumps(record).encode())
    for name, resumes in (("a", False), ("b", True)):
        with pytest.raises(RunInUseError), Run(tmp_path / name).claim(resumes=resumes):
            pass
    if cut:  # it names no run: to be deleted by hand
        store().rm("/bucket/run/run.json")
    with Run(tmp_path / "a").claim():
        pass
    assert objects(store) == []


def test_of_two_runs_at_the_same_moment_one_gets_the_folder(
    tmp_path: Path, store: type[FlakyStore]
) -> None:
    start, refused, held = threading.Barrier(4), [], threading.Event()

    def run(number: int) -> None:
        start.wait(60)
        try:
            with Run(tmp_path / str(number)).claim():
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


def test_file_system_without_conditional_creation(
    tmp_path: Path, store: type[FlakyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipe_file(self: FlakyStore, path: str, value: bytes) -> None:
        MemoryFileSystem.pipe_file(self, path, value)

    monkeypatch.setattr(store, "pipe_file", pipe_file)
    with (
        Run(tmp_path / "a").claim(),
        pytest.raises(RunInUseError, match="in use"),
        Run(tmp_path / "b").claim(),
    ):
        pass


def test_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    wanted = f"cannot be used: {URL}/run.json: PermissionError: 403 Forbidden"
    with (
        failing("pipe_file", PermissionError("403 Forbidden")),
        pytest.raises(RunInUseError, match=wanted),
        Run(tmp_path / "a").claim(),
    ):
        pass


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nothing://a", "Protocol not known: nothing"),
        ("filecache::memory://a", "expected one scheme"),
        ("missing-package://a", "Install the package of the test"),
        ("~nouser/a", "expected a known user's home folder"),
    ],
)
def test_url_without_a_file_system_is_an_error(tmp_path: Path, url: str, reason: str) -> None:
    register_implementation(
        "missing-package",
        "a_package_that_is_missing.Store",
        clobber=True,
        errtxt="Install the package of the test",
    )
    with pytest.raises(ConfigError, match=rf"trainer.ckpt_path: .*{reason}"):
        with_absolute_paths(run_at_url(tmp_path, f"trainer.ckpt_path={url}"))


def test_folders_are_created_where_the_file_system_has_them(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", keep=1)
    run.store = CheckpointStore(f"file://{tmp_path}/a/b [1]*", keep=1)
    assert run.store.list_saved() == []
    with run.claim():
        with (
            pytest.raises(RunInUseError, match="in use"),
            run.store.claim("run", tmp_path / "b", resumes=True),
        ):
            pass
        run.write(1, "one")
        run.write(2, "two")
        assert run.newest() == "two"
    assert [path.name for path in (tmp_path / "a/b [1]*").iterdir()] == ["step_000002"]
