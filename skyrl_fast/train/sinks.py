"""Where metrics go: JSON lines, TensorBoard, Weights & Biases; all take (step, flat dict)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Metrics = Mapping[str, float]


class Sink(Protocol):
    """Receives the metrics of a step; called in step order."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Metrics of one step."""

    def close(self) -> None:
        """Everything is on the disk after this."""


class JsonlSink:
    """One line per call: {"step": 3, "reward/...": 0.5, ...}; readable while the run goes on.

    Lines after `last_step` are dropped at the start: a resumed file equals an undisturbed one.
    """

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if last_step is not None and path.exists():
            kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= last_step]
            temporary = path.with_name(path.name + ".partial")
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:  # noqa: D102
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:  # noqa: D102
        self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard in `folder`; steps after `last_step` are purged."""

    def __init__(self, folder: Path, *, last_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "trainer.logger: tensorboard is not installed: pip install tensorboard, "
                "or leave it out of trainer.logger"
            ) from error
        purge = None if last_step is None else last_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, step: int, metrics: Metrics) -> None:  # noqa: D102
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:  # noqa: D102
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; its id stays in the run folder: a resumed run goes on in it."""

    def __init__(self, folder: Path, *, project: str, name: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                "trainer.logger: wandb is not installed: pip install wandb, "
                "or leave it out of trainer.logger"
            ) from error
        id_file = folder / "wandb_id.txt"
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
        self._run = wandb.init(
            project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=config
        )
        id_file.write_text(self._run.id, encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:  # noqa: D102
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:  # noqa: D102
        self._run.finish()


def open_sinks(
    names: Sequence[str],
    run_path: Path,
    *,
    project: str,
    run_name: str,
    config: dict[str, Any],
    last_step: int | None = None,
) -> list[Sink]:
    """The sinks named in trainer.logger.

    Args:
        names: of "jsonl", "tensorboard", "wandb".
        run_path: the run's folder; files go to metrics.jsonl and tensorboard/ in it.
        last_step: the step a resumed run goes on after, -1 where it has to begin anew (it was
            ended before its first checkpoint); None keeps all there is.

    Raises:
        ValueError: a package is missing; the message says how to install it.
    """
    sinks: list[Sink] = []
    for name in names:
        if name == "jsonl":
            sinks.append(JsonlSink(run_path / "metrics.jsonl", last_step=last_step))
        elif name == "tensorboard":
            sinks.append(TensorBoardSink(run_path / "tensorboard", last_step=last_step))
        elif name == "wandb":
            sinks.append(WandbSink(run_path, project=project, name=run_name, config=config))
        else:
            raise ValueError(f"trainer.logger: wanted jsonl, tensorboard or wandb, got {name!r}")
    return sinks


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl, in order."""
    return [json.loads(line) for line in _whole_lines(path)] if path.exists() else []


def _whole_lines(path: Path) -> list[str]:
    """Lines without the last one if a crash cut it."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            json.loads(line)
        except json.JSONDecodeError:
            break
        lines.append(line)
    return lines
