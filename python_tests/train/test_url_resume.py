"""Runs whose checkpoints are at a URL: stopped, resumed there, refused."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from _object_stores import URL, FlakyStore, plain
from _object_stores import store as store
from _training import RESUME, Recorder, after, interrupted_in, settings, steady, train
from _training import folder as folder

import skyrl_fast
from skyrl_fast.config import ConfigError
from skyrl_fast.train import Callback
from skyrl_fast.train.checkpoint.local import CheckpointError, RunInUseError
from skyrl_fast.train.checkpoint.remote import CheckpointStore
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.setup.errors import SetupError

AT_URL = f"trainer.ckpt_path={URL}"


@pytest.mark.spec("run.checkpoint-url")
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


@pytest.mark.spec("run.checkpoint-url")
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


@pytest.mark.spec("run.checkpoint-url")
def test_damaged_checkpoint_is_set_aside_and_the_older_one_resumed(
    folder: Path, store: type[FlakyStore], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = steady(train(settings(folder, "run", AT_URL)).metrics)
    store().pipe_file("/bucket/run/step_000006/policy/model.safetensors", b"")
    capsys.readouterr()
    resumed = train(settings(folder, "on another machine", AT_URL, RESUME))
    assert steady(resumed.metrics) == after(expected, 4)
    name = f"{URL}/step_000006/manifest.json"
    assert f"{name} was renamed to manifest.aside.json" in capsys.readouterr().err


@pytest.mark.spec("run.checkpoint-url")
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


@pytest.mark.spec("run.checkpoint-url", "async.interrupt")
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


@pytest.mark.spec("run.checkpoint-url")
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


@pytest.mark.slow  # starts two processes
@pytest.mark.spec("run.checkpoint-url", "update.ranks-checkpoint")
def test_ranks_upload_and_resume_in_another_number(folder: Path) -> None:
    """As `test_run_with_a_changed_number_of_ranks_equals_that_of_one`, with a URL."""
    shared = "trainer.placement.policy_num_gpus_per_node=2"
    at_url = f"trainer.ckpt_path=file://{folder}/store/run"
    train(settings(folder, "alone"))
    train(settings(folder, "run", at_url, "trainer.max_training_steps=2"))
    train(settings(folder, "run", at_url, RESUME, shared, "trainer.max_training_steps=4"))
    names = {path.name for path in (folder / "store/run/step_000004").rglob("*.safetensors")}
    assert "shard-00002-of-00002.safetensors" in names
    assert "model-00002-of-00002.safetensors" in names
    train(settings(folder, "run", at_url, RESUME))
    one, two = (steady(folder / name / "metrics.jsonl") for name in ("alone", "run"))
    assert len(one) == len(two) == 7
    for wanted, found in zip(one, two, strict=True):
        for name in {"reward/avg_raw_reward", "policy/grad_norm", "policy/loss"} & wanted.keys():
            assert found[name] == pytest.approx(wanted[name], rel=1e-2, abs=1e-4), name
    assert len(read_metrics(folder / "run/metrics.jsonl")) == 7
