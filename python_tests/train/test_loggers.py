"""Loggers of other packages, where they are installed."""

import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_fast.train.output.loggers import GuardedLogger, RunInfo, check_loggers, open_loggers


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunInfo:
    monkeypatch.chdir(tmp_path)
    return RunInfo(tmp_path, "a-project", "a-run", {"trainer": {"seed": 3}})


def write(run: RunInfo, name: str, steps: range) -> None:
    (logger,) = open_loggers([name], run)
    for step in steps:
        logger.write(step, {"reward/avg@2": step / 4, "loss": float("nan")})
    logger.close()


def test_resumed_run_continues_its_mlflow_run(
    run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow's store without a database
    mlflow.set_tracking_uri(str(run.run_path / "mlruns"))
    write(run, "mlflow", range(1, 3))
    write(replace(run, last_step=2), "mlflow", range(3, 4))
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("a-project")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("a-run", "FINISHED")
    history = client.get_metric_history(found.info.run_id, "reward/avg_2")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_resumed_run_continues_its_trackio_run(
    run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(run.run_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    write(run, "trackio", range(1, 3))
    write(replace(run, last_step=2), "trackio", range(3, 4))
    (found,) = trackio.Api().runs("a-project")
    assert found.name == "a-run"
    logs = trackio.sqlite_storage.SQLiteStorage.get_logs("a-project", "a-run")
    assert [(row["step"], row["reward/avg@2"]) for row in logs] == [(1, 0.25), (2, 0.5), (3, 0.75)]


@pytest.mark.parametrize(
    ("name", "message"),
    [("jsonn", "expected module:Class or one of jsonl"), ("no.module:Logger", "cannot import")],
)
def test_unknown_loggers_are_named(run: RunInfo, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.logger: {message}"):
        open_loggers([name], run)


def test_earlier_loggers_are_closed_if_one_fails(run: RunInfo) -> None:
    (run.run_path / "own_logger.py").write_text(
        "closed = []\n"
        "class Good:\n"
        "    def __init__(self, run): self.name = run.run_name\n"
        "    def write(self, step, metrics): pass\n"
        "    def close(self): closed.append(self.name)\n"
        "def bad(run): raise OSError('no route to host')\n"
    )
    good, bad = (f"{run.run_path}/own_logger.py:{name}" for name in ("Good", "bad"))
    with pytest.raises(ValueError, match=r"bad did not start: OSError: no route to host"):
        open_loggers([good, bad], run)
    (logger,) = open_loggers([good], run)
    assert isinstance(logger, GuardedLogger)
    assert logger.guarded.write.__globals__["closed"] == ["a-run"]


def test_a_full_disk_leaves_out_tensorboard_with_one_warning(
    run: RunInfo,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = pytest.importorskip("tensorboard.summary.writer.record_writer").RecordWriter

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = threading.excepthook
    (logger,) = open_loggers(["tensorboard"], run)
    monkeypatch.setattr(records, "write", fail)
    for step in range(1, 20):
        logger.write(step, {"reward": 0.5})
    logger.close()
    assert threading.excepthook is before
    (warning,) = caplog.messages
    assert warning.startswith("trainer.logger: tensorboard: ")
    assert "No space left on device; the run goes on without it" in warning
    assert capsys.readouterr().err == ""


def test_errors_of_other_threads_are_printed(run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda error: printed.append(error.thread.name))
    (logger,) = open_loggers(["tensorboard"], run)
    other = threading.Thread(target=int, args=["x"], name="other")
    other.start()
    other.join()
    logger.close()
    assert printed == ["other"]


def test_a_module_of_the_current_folder_is_named_as_a_file(run: RunInfo) -> None:
    (run.run_path / "a_logger_here.py").write_text("L = dict\n")
    with pytest.raises(ValueError, match=r"current folder write a_logger_here\.py$"):
        check_loggers(["jsonl", "a_logger_here:L"])
    check_loggers(["jsonl", "a_logger_here.py:L"])
