"""Runs whose checkpoints are at a URL: stopped, resumed there, refused."""

import asyncio
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from _object_stores import URL, FlakyStore, plain
from _object_stores import store as store
from _training import RESUME, Recorder, after, interrupted_in, settings, steady, train
from _training import folder as folder

import skyrl_fast
from skyrl_fast.config import ConfigError
from skyrl_fast.train import Callback
from skyrl_fast.train.checkpoint import remote
from skyrl_fast.train.checkpoint.local import CheckpointError, RunInUseError
from skyrl_fast.train.checkpoint.remote import CheckpointStore
from skyrl_fast.train.setup.errors import SetupError

AT_URL = f"trainer.ckpt_path={URL}"


@pytest.mark.parametrize("folder_of_resumed", ["run", "on another machine"])
def test_stopped_run_resumes_from_the_url_like_an_undisturbed_one(
    folder: Path, store: type[FlakyStore], folder_of_resumed: str
) -> None:
    expected = steady(train(settings(folder, "expected")).metrics)
    stopped = train(settings(folder, "run", AT_URL), interrupted_in(3))
    assert (stopped.step, stopped.signal) == (3, signal.SIGINT)
    assert stopped.checkpoint == folder / "run/checkpoints/step_000003"
    resumed = train(settings(folder, folder_of_resumed, AT_URL, RESUME))
    first = -1 if folder_of_resumed == "run" else 3
    assert steady(resumed.metrics) == after(expected, first)
    assert [step for step, _ in CheckpointStore(URL).list_saved()] == [2, 3, 4, 6]
    assert resumed.checkpoint == folder / folder_of_resumed / "checkpoints/step_000006"


def test_resume_from_the_url_of_a_checkpoint_sets_later_ones_aside(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = steady(train(settings(folder, "run", AT_URL)).metrics)
    chosen = "trainer.resume_mode=from_path", f"trainer.resume_path={URL}/step_000002"
    capsys.readouterr()
    resumed = train(settings(folder, "run", AT_URL, *chosen))
    assert steady(resumed.metrics) == expected
    shown = capsys.readouterr().err
    for step in (4, 6):
        name = f"{URL}/step_00000{step}"
        assert f"{name}/manifest.json was renamed to manifest.aside.json: the run" in shown
        assert (
            f"step_00000{step} was renamed to {folder}/run/checkpoints/step_00000{step}.l" in shown
        )
    assert [url for _, url in CheckpointStore(URL).list_saved()] == [
        *(f"{URL}/step_000002", f"{URL}/step_000004-2", f"{URL}/step_000006-2")
    ]
    assert not (folder / "run/resume_path").exists()
    local = train(settings(folder, "local", *chosen))  # from a URL to a local folder
    assert steady(local.metrics) == after(expected, 2)
    assert local.checkpoint == folder / "local/checkpoints/step_000006"
    with pytest.raises(CheckpointError, match=f"no complete checkpoint at {URL}/step_9"):
        train(settings(folder, "other", chosen[0], f"trainer.resume_path={URL}/step_9"))


def test_training_continues_during_an_upload(folder: Path, store: type[FlakyStore]) -> None:
    trained = threading.Event()
    uploads: list[bool] = []
    complete: list[tuple[int, Path]] = []

    def slow(name: str, path: str, request: Callable[[], Any]) -> Any:
        if name == "put_file" and "step_000002" in path:
            uploads.append(trained.wait(30))
        return request()

    async def during(step: int) -> None:
        if step == 3:  # the checkpoint of step 2 is waited for at the end of step 4
            trained.set()

    class Listening(Callback):
        def on_checkpoint(self, step: int, path: Path) -> None:
            complete.append((step, path))

    store.around = staticmethod(slow)
    skyrl_fast.train_agent(
        settings(folder, "run", AT_URL), make_rollouts=Recorder(during), callbacks=[Listening()]
    )
    assert uploads and all(uploads)
    assert complete == [(n, folder / f"run/checkpoints/step_00000{n}") for n in (2, 4, 6)]


@pytest.mark.spec("async.interrupt")
@pytest.mark.parametrize("fails", [False, True])
def test_run_that_is_stopped_during_an_upload_saves_its_last_step(
    folder: Path, store: type[FlakyStore], fails: bool
) -> None:
    stopped = threading.Event()

    def slow(name: str, path: str, request: Callable[[], Any]) -> Any:
        if name == "put_file" and "step_000002" in path:
            assert stopped.wait(30)
            if fails:
                raise PermissionError("403 Forbidden")
        return request()

    async def during(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            stopped.set()
            await asyncio.sleep(60)  # cancelled by the stop

    store.around = staticmethod(slow)
    config = settings(folder, "run", AT_URL)
    if fails:
        with pytest.raises(CheckpointError, match=r"step_000002 not uploaded .*403 Forbidden"):
            train(config, Recorder(during))
    else:
        assert train(config, Recorder(during)).step == 3
    saved = [step for step, _ in CheckpointStore(URL).list_saved()]
    assert saved == ([3] if fails else [2, 3])


def test_failed_upload_ends_the_run_which_can_be_resumed(
    folder: Path, store: type[FlakyStore]
) -> None:
    expected = steady(train(settings(folder, "expected")).metrics)

    def fails(name: str, path: str, request: Callable[[], Any]) -> Any:
        if name == "put_file" and "step_000002" not in path:
            raise PermissionError("403 Forbidden")
        return request()

    store.around = staticmethod(fails)
    wanted = rf"step_000004 not uploaded to {URL}: .*403 Forbidden; it is intact"
    with pytest.raises(CheckpointError, match=wanted):
        train(settings(folder, "run", AT_URL))
    store.around = staticmethod(plain)
    assert [step for step, _ in CheckpointStore(URL).list_saved()] == [2]
    assert steady(train(settings(folder, "run", AT_URL, RESUME)).metrics) == expected


@pytest.mark.spec("run.checkpoint-url-claim")
def test_url_of_another_run_is_refused(folder: Path) -> None:
    refused: list[str] = []

    def second(*options: str) -> None:
        with pytest.raises(RunInUseError) as error:
            train(settings(folder, "b", AT_URL, *options))
        refused.append(str(error.value))

    async def during(step: int) -> None:
        if step == 1:
            await asyncio.to_thread(second, RESUME)

    train(settings(folder, "a", AT_URL, "trainer.epochs=1"), Recorder(during))
    assert [text.partition(" by ")[0] for text in refused] == [f"checkpoint folder {URL} is in use"]
    second()
    assert refused[1].startswith(f"checkpoint folder {URL} holds an earlier run: --resume")
    assert not (folder / "b/metrics.jsonl").exists()


@pytest.mark.spec("run.absolute-paths")
def test_other_urls_are_refused(folder: Path) -> None:
    for name in ("trainer.run_path", "generator.inference_engine.weight_sync_path"):
        wanted = rf"{name}: expected a path of .*, got {URL}; .* trainer.ckpt_path"
        with pytest.raises(ConfigError, match=wanted):
            train(settings(folder, "a", f"{name}={URL}"))
    with pytest.raises(ConfigError, match=r"trainer.ckpt_path: nothing://a: Protocol not known"):
        train(settings(folder, "a", "trainer.ckpt_path=nothing://a"))
    wanted = (
        rf"trainer.policy.model.path: expected a folder or a name on the hub, got the URL {URL}"
    )
    with pytest.raises(SetupError, match=wanted):
        train(settings(folder, "a", f"trainer.policy.model.path={URL}"))


# --- checkpoints by s3fs, at a server on this machine that speaks S3's protocol ------------------


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("s3fs")
    from botocore.session import get_session

    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"endpoint_url": f"http://{host}:{port}", "key": "x", "secret": "y"}
    monkeypatch.setitem(fsspec.config.conf, "s3", keys)
    monkeypatch.setattr(remote, "WAITS", (0.0,))
    found = get_session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=keys["endpoint_url"],
        aws_access_key_id="x",
        aws_secret_access_key="y",
    )
    found.create_bucket(Bucket="bucket")
    yield found
    # Its content is the process's, and would be that of the next server.
    urllib.request.urlopen(f"{keys['endpoint_url']}/moto-api/reset", b"").close()
    server.stop()


@pytest.mark.slow
def test_stopped_run_resumes_from_s3(folder: Path, client: Any) -> None:
    expected = steady(train(settings(folder, "expected")).metrics)
    at_url = ("trainer.ckpt_path=s3://bucket/run", "trainer.max_ckpts_to_keep=1")
    stopped = train(settings(folder, "run", *at_url), interrupted_in(3))
    assert stopped.step == 3
    found = client.list_objects_v2(Bucket="bucket")["Contents"]
    assert {each["Key"].split("/")[1] for each in found} == {"step_000003"}
    with pytest.raises(RunInUseError, match="s3://bucket/run holds an earlier run"):
        train(settings(folder, "other", *at_url))
    resumed = train(settings(folder, "other", *at_url, RESUME))
    assert steady(resumed.metrics) == after(expected, 3)
    assert CheckpointStore("s3://bucket/run").list_saved() == [(6, "s3://bucket/run/step_000006")]


@pytest.mark.slow
def test_objects_are_created_once_and_buckets_never(folder: Path, client: Any) -> None:
    once = CheckpointStore("s3://bucket/once")
    with once.claim("run", folder, resumes=False):
        with pytest.raises(FileExistsError):  # by the server, without a look before
            fsspec.filesystem("s3").pipe_file("bucket/once/run.json", b"3", mode="create")
        with (
            pytest.raises(RunInUseError, match="s3://bucket/once is in use by process"),
            once.claim("run", folder / "other", resumes=True),
        ):
            pass
    assert "Contents" not in client.list_objects_v2(Bucket="bucket")
    with pytest.raises(RunInUseError, match=r"s3://missing/run/run.json: FileNotFoundError"):
        train(settings(folder, "run", "trainer.ckpt_path=s3://missing/run"))
    assert [each["Name"] for each in client.list_buckets()["Buckets"]] == ["bucket"]
