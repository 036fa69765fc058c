"""Where a run starts: at its beginning, or at a checkpoint of an earlier one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skyrl_fast.config import Config
from skyrl_fast.train.data.schedule import total_steps
from skyrl_fast.train.output.checkpoint import (
    STATE,
    RunInUseError,
    checkpoints,
    newest_intact,
    read_state,
    set_aside,
    verify_checkpoint,
)
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
    """

    checkpoint: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    aside: Sequence[tuple[Path, str, str]] = ()

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


def starting_point(config: Config) -> StartingPoint:
    """Return the verified checkpoint to resume from, if any, and those that are not to be read.

    Raises:
        CheckpointError: the chosen checkpoint, or every one, is damaged.
        RunInUseError: a new run in a folder that holds an earlier one.
        SetupError: there is no checkpoint in `trainer.resume_path`.
    """
    settings = config.trainer
    run_path = Path(settings.run_path)
    folder = checkpoint_folder(config)
    if settings.resume_mode == "from_path":
        chosen = Path(str(settings.resume_path))
        if not (chosen / STATE).is_file():
            raise SetupError(f"trainer.resume_path: no checkpoint in {chosen}")
        verify_checkpoint(chosen)
        state = read_state(chosen)
        reason = f"it is later than trainer.resume_path={chosen}"
        later = [other for step, other in checkpoints(folder) if step > state["step"]]
        return StartingPoint(chosen, state, [(other, "later", reason) for other in later])
    if settings.resume_mode == "latest":
        newest, damaged = newest_intact(folder)
        state = {} if newest is None else read_state(newest)
        return StartingPoint(newest, state, [(path, "damaged", why) for path, why in damaged])
    logged = read_metrics(run_path / "metrics.jsonl")
    if checkpoints(folder) or logged or stored_parts(run_path / "trajectories"):
        raise RunInUseError(
            f"run folder {run_path} holds an earlier run: --resume continues it; for a new run "
            "choose another trainer.run_path or delete the folder"
        )
    return StartingPoint()


def set_checkpoints_aside(start: StartingPoint, display: ProgressDisplay) -> None:
    """Rename the checkpoints that the run must not read, and say so."""
    for checkpoint, suffix, reason in start.aside:
        aside = set_aside(checkpoint, suffix)
        note = f"{checkpoint.name} was renamed to {aside}: {reason}"
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


def checkpoint_folder(config: Config) -> Path:
    """Return the folder of the run's checkpoints."""
    return Path(config.trainer.ckpt_path or Path(config.trainer.run_path) / "checkpoints")
