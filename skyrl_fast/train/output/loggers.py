"""Metric loggers: the `Logger` protocol, and its implementations.

`config.LOGGERS` is the table of their names; `trainer.logger` also takes `module:Class`.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from skyrl_fast.config import LOGGERS
from skyrl_fast.system.importing import load_object
from skyrl_fast.trajectory_store.parts import NON_FINITE, read_lines

log = logging.getLogger(__name__)

Metrics = Mapping[str, float]
_NON_FINITE_VALUES = {text: float(text) for text in ("nan", "inf", "-inf")}


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a logger is constructed with.

    Args:
        run_path: folder of the run.
        project: trainer.project_name.
        run_name: trainer.run_name.
        config: all settings, as nested dicts of plain values.
        last_step: in a resumed run, the last step reported before its checkpoint; later steps are
            reported again. -1: none.
    """

    run_path: Path
    project: str
    run_name: str
    config: dict[str, Any]
    last_step: int = -1


class Logger(Protocol):
    """Receives the metrics of each step, in order. Constructed as `Class(run_info)`."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Report the metrics of one step; step 0 is the evaluation before training."""

    def close(self) -> None:
        """Flush and close; all metrics are stored after this."""


class GuardedLogger:
    """Leaves a logger out, with one warning, once it has raised: the run goes on without it."""

    def __init__(self, name: str, guarded: Logger) -> None:
        self.name = name
        self.guarded = guarded
        self._has_failed = False

    def write(self, step: int, metrics: Metrics) -> None:
        self._call("write", step, metrics)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        if self._has_failed and method != "close":
            return
        try:
            getattr(self.guarded, method)(*arguments)
        except Exception as error:
            if not self._has_failed:
                log.warning(
                    "trainer.logger: %s: %s raised %s; the run goes on without it",
                    self.name,
                    method,
                    _one_line(error),
                )
            self._has_failed = True


def check_loggers(names: Sequence[str]) -> None:
    """Import the loggers of `trainer.logger`; a ValueError says which cannot be."""
    for name in names:
        _load(name)


def open_loggers(names: Sequence[str], run: RunInfo) -> list[Logger]:
    """Return the loggers of `trainer.logger`: names in `LOGGERS`, or `module:Class`.

    One that raises later is left out, except "jsonl": other files of the run are on its disk.

    Raises:
        ValueError: a package is missing, or a logger cannot start; the message says which.
    """
    opened: list[Logger] = []
    try:
        for name in names:
            logger = _open(name, run)
            is_guarded = not isinstance(logger, JsonlLogger)
            opened.append(GuardedLogger(name, logger) if is_guarded else logger)
    except BaseException:
        # A tracker's server must not be left with a run that seems to go on.
        for logger in opened:
            logger.close()
        raise
    return opened


def _load(name: str) -> Any:
    if name not in LOGGERS and ":" not in name:
        raise ValueError(
            f"trainer.logger: expected module:Class or one of {', '.join(LOGGERS)}, got {name!r}"
        )
    try:
        return load_object(LOGGERS.get(name, name))
    except ValueError as error:
        raise ValueError(f"trainer.logger: {error}") from error


def _open(name: str, run: RunInfo) -> Logger:
    make = _load(name)
    try:
        logger: Logger = make(run)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"trainer.logger: {name} did not start: {_one_line(error)}") from error
    return logger


def _one_line(error: Exception) -> str:
    reason = " ".join(str(error).split())
    return f"{type(error).__name__}: {reason}"


class JsonlLogger:
    """One line per call in metrics.jsonl: {"step": 3, "reward/...": 0.5, ...}.

    A value that is not finite is null, and the line's "non_finite" says which: {"loss": "nan"}.
    Lines after `last_step` are dropped at the start: the file of a resumed run equals that of an
    uninterrupted one. It can be read during the run.
    """

    def __init__(self, run: RunInfo) -> None:
        path = run.run_path / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # The steps after the checkpoint are trained, and reported, again.
            kept = []
            for line, row in _rows(path):
                if row["step"] <= run.last_step:
                    kept.append(line)
            temporary = path.with_name(path.name + ".partial")
            temporary.write_bytes(b"".join(kept))
            os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:
        row: dict[str, Any] = {"step": step, **metrics}
        missing = {}
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                missing[name] = str(value)
        if missing:
            row |= dict.fromkeys(missing) | {NON_FINITE: missing}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger:
    """Scalars for TensorBoard in tensorboard/; steps after `last_step` are purged."""

    def __init__(self, run: RunInfo) -> None:
        writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(run.run_path / "tensorboard"), purge_step=run.last_step + 1)
        self._print_error = threading.excepthook
        threading.excepthook = self._see_thread_error

    def write(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._print_error

    def _see_thread_error(self, error: threading.ExceptHookArgs) -> None:
        # The next call raises that of TensorBoard's thread, which need not be printed as well.
        if not type(error.thread).__module__.startswith("tensorboard."):
            self._print_error(error)


class WandbLogger:
    """A Weights & Biases run; a resumed run continues it, by the id in wandb_id.txt."""

    def __init__(self, run: RunInfo) -> None:
        id_file = run.run_path / "wandb_id.txt"
        self._run = _import("wandb").init(
            project=run.project,
            name=run.run_name,
            id=_kept_id(id_file),
            resume="allow",
            dir=str(run.run_path),
            config=run.config,
        )
        id_file.write_text(self._run.id, encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """An MLflow run; a resumed run continues it, by the id in mlflow_id.txt.

    Metrics go to the configured tracking server (MLFLOW_TRACKING_URI), by default MLflow's local
    store. MLflow forbids "@" and similar characters in names: they become "_".
    """

    def __init__(self, run: RunInfo) -> None:
        mlflow = _import("mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient()
        id_file = run.run_path / "mlflow_id.txt"
        kept = _kept_id(id_file)
        if kept is None:
            found = self._client.get_experiment_by_name(run.project)
            if found:
                experiment = found.experiment_id
            else:
                experiment = self._client.create_experiment(run.project)
            kept = self._client.create_run(experiment, run_name=run.run_name).info.run_id
            id_file.write_text(kept, encoding="utf-8")
            self._client.log_dict(kept, run.config, "config.json")
        self._run_id = kept

    def write(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id,
            [
                self._metric(_MLFLOW_FORBIDDEN.sub("_", name), float(value), now, step)
                for name, value in metrics.items()
            ],
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


_MLFLOW_FORBIDDEN = re.compile(r"[^\w\-. /]")


class TrackioLogger:
    """A Trackio run; a resumed run continues it, by its name."""

    def __init__(self, run: RunInfo) -> None:
        self._run = _import("trackio").init(
            project=run.project, name=run.run_name, config=run.config, resume="allow"
        )

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _import(module: str, package: str | None = None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module
        raise ValueError(
            f"trainer.logger: {package} is not installed: pip install {package}, "
            "or remove it from trainer.logger"
        ) from error


def _kept_id(file: Path) -> str | None:
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all valid lines of a metrics.jsonl, in order; others are skipped with a warning."""
    if path.exists():
        return [_with_non_finite(row) for _, row in _rows(path)]
    return []


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    content = path.read_bytes()
    for offset, size, row in read_lines(path):
        step = row.get("step")
        if not isinstance(step, int):
            log.warning("%s: line at byte %d skipped: it has no step", path, offset)
        elif offset + size <= len(content):  # not written meanwhile
            yield content[offset : offset + size], row


def _with_non_finite(row: dict[str, Any]) -> dict[str, Any]:
    missing = row.pop(NON_FINITE, None)
    if isinstance(missing, dict):
        row |= {name: _NON_FINITE_VALUES.get(str(kind)) for name, kind in missing.items()}
    return row
