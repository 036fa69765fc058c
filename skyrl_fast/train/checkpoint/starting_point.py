"""Where a run starts: at its beginning, or at a checkpoint of an earlier one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skyrl_fast.config import Config
from skyrl_fast.system.temporary_folder import temporary_folder
from skyrl_fast.train.checkpoint.fetched import FetchedCheckpoint
from skyrl_fast.train.checkpoint.local import (
    STATE,
    RunInUseError,
    checkpoints,
    locked_run,
    newest_intact,
    read_state,
    set_aside,
    verify_checkpoint,
)
from skyrl_fast.train.checkpoint.manifest import MANIFEST
from skyrl_fast.train.checkpoint.object_folder import is_url
from skyrl_fast.train.checkpoint.remote import (
    TEMPORARY,
    RemoteCheckpoints,
    fetch,
    manifests,
    set_remote_aside,
)
from skyrl_fast.train.data.schedule import total_steps
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.output.progress import ProgressDisplay
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.trajectory_store.parts import parts as stored_parts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where a run starts.

    Args:
        checkpoint: to resume from, or None.
        state: content of its `state.json`.
        aside: checkpoints to be set aside, each with the suffix of its name and the reason.
        fetched: where the checkpoint comes from, if it is the local copy of one at a URL.
    """

    checkpoint: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    aside: Sequence[tuple[Path | str, str, str]] = ()
    fetched: FetchedCheckpoint | None = None

    @property
    def name(self) -> Path | str | None:
        """The checkpoint's folder or URL."""
        return self.checkpoint if self.fetched is None else self.fetched.url

    @property
    def step(self) -> int:
        """Steps trained before."""
        return int(self.state.get("step", 0))

    @property
    def last_reported(self) -> int:
        """The last step whose metrics were written before the checkpoint; -1: none."""
        if self.checkpoint is None:
            return -1
        return self.step - (self.state.get("unreported") is not None)


def starting_point(
    config: Config, folder: Path | RemoteCheckpoints, stack: ExitStack
) -> StartingPoint:
    """Return the verified checkpoint to resume from, if any, and those that are not to be read.

    Args:
        folder: of the run's checkpoints.
        stack: removes the local copy of a checkpoint at a URL, unless that has been done before.

    Raises:
        CheckpointError: the chosen checkpoint, or every one, is damaged.
        RunInUseError: a new run in a folder that holds an earlier one.
        SetupError: there is no checkpoint in `trainer.resume_path`.
    """
    settings = config.trainer
    run_path = Path(settings.run_path)
    if settings.resume_mode == "from_path":
        path = str(settings.resume_path)
        chosen, fetched = _fetched(path, stack) if is_url(path) else (Path(path), None)
        if fetched is None:
            if not (chosen / STATE).is_file():
                raise SetupError(f"trainer.resume_path: no checkpoint in {chosen}")
            verify_checkpoint(chosen)
        state = read_state(chosen)
        reason = f"it is later than trainer.resume_path={path}"
        later = [other for step, other in saved_checkpoints(folder) if step > state["step"]]
        aside = [(other, "later", reason) for other in later]
        return StartingPoint(chosen, state, aside, fetched)
    if settings.resume_mode == "latest":
        return _newest(folder, stack)
    logged = read_metrics(run_path / "metrics.jsonl")
    if saved_checkpoints(folder) or logged or stored_parts(run_path / "trajectories"):
        raise RunInUseError(
            f"run folder {run_path} holds an earlier run: --resume continues it; for a new run "
            "choose another trainer.run_path or delete the folder"
        )
    return StartingPoint()


def _fetched(url: str, stack: ExitStack) -> tuple[Path, FetchedCheckpoint]:
    """Return the local copy of the chosen checkpoint."""
    if not manifests(url):
        raise SetupError(f"trainer.resume_path: no complete checkpoint at {url}")
    local = fetch(url, stack.enter_context(temporary_folder(TEMPORARY)))
    return local, FetchedCheckpoint(url, local)


def _newest(folder: Path | RemoteCheckpoints, stack: ExitStack) -> StartingPoint:
    """Return the newest intact checkpoint, if there are any; damaged ones are to be set aside."""
    fetched = None
    damaged: Sequence[tuple[Path | str, str]]
    if isinstance(folder, Path):
        newest, damaged = newest_intact(folder)
    else:
        copies = stack.enter_context(temporary_folder(TEMPORARY))
        url, newest, damaged = folder.newest_intact(copies)
        if url is not None and newest is not None:
            fetched = FetchedCheckpoint(url, newest)
    state = {} if newest is None else read_state(newest)
    aside = [(path, "damaged", why) for path, why in damaged]
    return StartingPoint(newest, state, aside, fetched)


def set_checkpoints_aside(start: StartingPoint, display: ProgressDisplay) -> None:
    """Rename the checkpoints that the run must not read, and say so."""
    for checkpoint, suffix, reason in start.aside:
        if isinstance(checkpoint, Path):
            name, aside = checkpoint.name, str(set_aside(checkpoint, suffix))
        else:
            name, aside = f"{checkpoint}/{MANIFEST}", set_remote_aside(checkpoint, suffix)
        note = f"{name} was renamed to {aside}: {reason}"
        logger.warning("%s", note)
        display.say(note)


def warn_of_another_schedule(config: Config, start: StartingPoint, num_prompts: int) -> None:
    """Warn if a resumed run has another length than before, and the learning rate follows it."""
    scheduler = config.trainer.policy.optimizer_config.scheduler
    if start.checkpoint is None or scheduler not in ("linear", "cosine"):
        return
    saved = start.state.get("config", {}).get("trainer", {})
    lengths = {n: saved[n] for n in ("epochs", "max_training_steps") if n in saved}
    earlier = replace(config, trainer=replace(config.trainer, **lengths))
    before, now = total_steps(earlier, num_prompts), total_steps(config, num_prompts)
    if before != now:
        logger.warning(
            "resume: the run had %d steps and now has %d: the %s schedule of the learning rate is "
            "stretched over all of them, so the rate jumps here",
            *(before, now, scheduler),
        )


def checkpoint_folder(config: Config) -> Path | RemoteCheckpoints:
    """Return the folder of the run's checkpoints."""
    path = config.trainer.ckpt_path
    if path is not None and is_url(path):
        return RemoteCheckpoints(path)
    return Path(path or Path(config.trainer.run_path) / "checkpoints")


def saved_checkpoints(
    folder: Path | RemoteCheckpoints,
) -> Sequence[tuple[int, Path]] | Sequence[tuple[int, str]]:
    """Return the complete checkpoints as (step, folder or URL), oldest first."""
    return checkpoints(folder) if isinstance(folder, Path) else folder.saved()


@contextmanager
def locked_folders(config: Config, folder: Path | RemoteCheckpoints) -> Iterator[None]:
    """Lock the run's folder, and that of its checkpoints or claim it.

    Raises:
        RunInUseError: one of them belongs to another run.
    """
    run_path = Path(config.trainer.run_path)
    with locked_run(run_path, folder if isinstance(folder, Path) else None):
        if isinstance(folder, Path):
            yield
            return
        with folder.claimed(run_path, resumes=config.trainer.resume_mode != "none"):
            yield
