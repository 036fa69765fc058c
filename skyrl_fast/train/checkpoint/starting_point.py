"""Where a run starts: at its beginning, or at a checkpoint of an earlier one."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skyrl_fast.config import Config
from skyrl_fast.train.checkpoint.local import (
    ADVICE,
    STATE,
    CheckpointError,
    RunInUseError,
    checkpoints,
    lock_run,
    newest_intact,
    read_state,
    set_aside,
    verify_checkpoint,
)
from skyrl_fast.train.checkpoint.manifest import MANIFEST, ReadDigests, digest_pieces
from skyrl_fast.train.checkpoint.remote import ASIDE, CheckpointStore, ObjectStoreError, download
from skyrl_fast.train.data.schedule import total_steps
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.output.progress import ProgressDisplay
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.train.setup.given_objects import is_url
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
        # A stop between a step and its report leaves the report in the state.
        return self.step - (self.state.get("unreported") is not None)


def starting_point(
    config: Config,
    store: CheckpointStore | None,
    stack: ExitStack,
    read_digests: ReadDigests = digest_pieces,
) -> StartingPoint:
    """Return the verified checkpoint to resume from, if any, and those that are not to be read.

    Args:
        stack: removes the copy of a checkpoint that was chosen by its URL.
        read_digests: reads the files of checkpoints; those that are downloaded are read here.

    Raises:
        CheckpointError: the chosen checkpoint, or every one, is damaged.
        RunInUseError: a new run in a folder that holds an earlier one.
        SetupError: there is no checkpoint in `trainer.resume_path`.
    """
    settings = config.trainer
    folder = checkpoint_folder(config)
    run_path = Path(settings.run_path)
    if settings.resume_mode == "from_path":
        path = str(settings.resume_path)
        chosen = Path(path)
        if is_url(path):
            # Apart from the run's own checkpoints, which a chosen one does not join.
            copies = run_path / "resume_path"
            stack.callback(shutil.rmtree, copies, ignore_errors=True)
            chosen = download(path.rstrip("/"), copies / "checkpoint")
        if not (chosen / STATE).is_file():
            raise SetupError(f"trainer.resume_path: no checkpoint in {chosen}")
        if not is_url(path):  # else verified by the download
            verify_checkpoint(chosen, read_digests)
        state = read_state(chosen)
        reason = f"it is later than trainer.resume_path={path}"
        # A later resume would take them, as the newest, for checkpoints of this run.
        later = [other for step, other in checkpoints(folder) if step > state["step"]]
        return StartingPoint(chosen, state, [(other, "later", reason) for other in later])
    if settings.resume_mode == "latest":
        newest, damaged = _newest(folder, store, read_digests)
        if newest is None:
            state = {}
        else:
            state = read_state(newest)
        return StartingPoint(newest, state, [(path, "damaged", why) for path, why in damaged])
    # A new run in an old folder would mix two runs' files.
    logged = read_metrics(run_path / "metrics.jsonl")
    if checkpoints(folder) or logged or stored_parts(run_path / "trajectories"):
        raise RunInUseError(
            f"run folder {run_path} holds an earlier run: --resume continues it, in Python "
            "trainer.resume_mode=latest; for a new run choose another trainer.run_path or delete "
            "the folder"
        )
    if store is not None and store.list_saved():
        raise RunInUseError(
            f"checkpoint folder {store.url} holds an earlier run: --resume continues it; for a new "
            "run choose another trainer.ckpt_path"
        )
    return StartingPoint()


def _newest(
    folder: Path, store: CheckpointStore | None, read_digests: ReadDigests
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest intact checkpoint, downloaded if it is at a URL, and damaged local ones."""
    if store is None:
        return newest_intact(folder, read_digests)
    try:
        newest, damaged = newest_intact(folder, read_digests)
    except CheckpointError as error:  # all are damaged
        newest = None
        damaged = [(path, str(error)) for _, path in checkpoints(folder)]
    if newest is None:
        last = -1
    else:
        last = read_state(newest)["step"]
    errors = []
    for step, url in reversed(store.list_saved()):
        # The local one is at least as new, and needs no download.
        if step <= last:
            break
        try:
            newest = download(url, folder / f"step_{step:06d}")
            break
        except ObjectStoreError:
            raise  # not damaged
        except CheckpointError as error:
            errors.append(str(error).removesuffix(ADVICE))
            logger.warning("%s", errors[-1])
    if newest is None and (errors or damaged):
        reasons = "; ".join([*errors, *(reason for _, reason in damaged)])
        raise CheckpointError(
            f"no intact checkpoint in {store.url}: {reasons}; put back a copy of one, or start a "
            "new run in another trainer.run_path and trainer.ckpt_path"
        )
    return newest, [(path, reason) for path, reason in damaged if path != newest]


def set_checkpoints_aside(
    start: StartingPoint, store: CheckpointStore | None, display: ProgressDisplay
) -> None:
    """Rename the checkpoints that the run must not read, and say so."""
    notes = []
    for checkpoint, suffix, reason in start.aside:
        notes.append(f"{checkpoint.name} was renamed to {set_aside(checkpoint, suffix)}: {reason}")
    if store is not None:
        notes += [
            f"{url}/{MANIFEST} was renamed to {ASIDE}: the run resumes from step {start.step}"
            for url in store.set_later_aside(start.step)
        ]
    for note in notes:
        logger.warning("%s", note)
        display.say(note)


def warn_of_another_schedule(config: Config, start: StartingPoint, num_prompts: int) -> None:
    """Warn if a resumed run has another length than before, and the learning rate follows it."""
    settings = config.trainer
    schedules = {"policy": settings.policy.optimizer_config.scheduler}
    if settings.critic.model.path is not None:
        schedules["critic"] = settings.critic.optimizer_config.scheduler
    decaying = {name: s for name, s in schedules.items() if s in ("linear", "cosine")}
    if start.checkpoint is None or not decaying:
        return
    saved = start.state.get("config", {}).get("trainer", {})
    lengths = {n: saved[n] for n in ("epochs", "max_training_steps") if n in saved}
    earlier = replace(config, trainer=replace(config.trainer, **lengths))
    before = total_steps(earlier, num_prompts)
    now = total_steps(config, num_prompts)
    if before != now:
        logger.warning(
            "resume: the run had %d steps and now has %d: the %s schedule of the learning rate is "
            "stretched over all of them, so the rate jumps here",
            before,
            now,
            " and ".join(s if n == "policy" else f"{s} ({n})" for n, s in decaying.items()),
        )


def checkpoint_folder(config: Config) -> Path:
    """Return the local folder of the run's checkpoints."""
    path = config.trainer.ckpt_path
    local = path is not None and not is_url(path)
    return Path(path if local else Path(config.trainer.run_path) / "checkpoints")  # type: ignore[arg-type]


@contextmanager
def lock_folders(config: Config) -> Iterator[CheckpointStore | None]:
    """Lock the run's folders; claim and yield the store of its checkpoints if they have a URL.

    Raises:
        RunInUseError: one of them belongs to another run.
    """
    settings = config.trainer
    run_path = Path(settings.run_path)
    url = settings.ckpt_path
    with lock_run(run_path, checkpoint_folder(config)):
        if url is None or not is_url(url):
            yield None
            return
        store = CheckpointStore(url, keep=settings.max_ckpts_to_keep)
        resumes = settings.resume_mode != "none"
        with store.claim(settings.run_name, run_path, resumes=resumes):
            yield store
