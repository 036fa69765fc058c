"""Checkpoints by s3fs, at a server on this machine that speaks S3's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import fsspec
from _training import RESUME, after, interrupted_in, settings, steady, train
from _training import folder as folder

from skyrl_fast.train.checkpoint import remote
from skyrl_fast.train.checkpoint.local import RunInUseError
from skyrl_fast.train.checkpoint.remote import CheckpointStore

pytestmark = pytest.mark.slow  # starts a server


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
    server.stop()


@pytest.mark.spec("run.checkpoint-url", "run.checkpoint-url-claim")
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


@pytest.mark.spec("run.checkpoint-url-claim")
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
