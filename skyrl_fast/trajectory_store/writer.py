"""Writing of a run's trajectories, part by part; each part is written atomically."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from skyrl_fast.errors import RunError
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.trajectory_store.lines import encode_line
from skyrl_fast.trajectory_store.parts import (
    INDEX,
    IndexEntry,
    entry_fields,
    index_entry,
    part_name,
    parts,
    read_index_file,
)
from skyrl_fast.trajectory_store.record import trajectory_record
from skyrl_fast.trajectory_store.token_text import TokenText
from skyrl_fast.trajectory_store.trained import TrainedRows, collect_steps_of_policies

log = logging.getLogger(__name__)

# Of the limit, what is left after a removal: each writes the index again, so not at each step.
KEPT_SHARE = 0.9


class StoreError(RunError):
    """Trajectories could not be written; the message says how to fix it."""


class TrajectoryWriter:
    """Writes the store of one run; created when the run starts or resumes.

    Parts after `last_step` are removed, so that the store of a resumed run equals that of an
    uninterrupted one. The tokenizer is copied: methods may be called from another thread.

    Args:
        folder: RUN/trajectories; created if absent.
        last_step: the step after which the run resumes; 0 for a new run.
        with_replay: whether kept ids and routes are stored, too.
        sums_rewards: whether outcomes are sums, as of `Trajectory.outcome`.
        max_bytes: size of all parts above which the oldest are removed, but never the last one;
            None: all are kept.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        *,
        last_step: int,
        with_replay: bool = False,
        sums_rewards: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._has_removed = False
        self._with_replay = with_replay
        self._sums_rewards = sums_rewards
        self._text = TokenText(deepcopy(tokenizer))
        folder.mkdir(parents=True, exist_ok=True)
        for part in parts(folder):
            if part.step > last_step:
                part.path.unlink()
        self._num_bytes = sum(part.path.stat().st_size for part in parts(folder))
        self._write_index()

    def write(
        self,
        step: int,
        phase: str,
        trajectories: Sequence[Trajectory],
        *,
        trained: Sequence[TrainedRows] = (),
    ) -> Path:
        """Write one part, replacing an earlier one; return its path.

        Args:
            step: number of the training batch, or the step after which the evaluation ran.
            trained: the batch, or that of each policy; none for an evaluation.

        Raises:
            StoreError: the disk is full or not writable. No incomplete part is left.
        """
        if trained:
            values_of_steps = collect_steps_of_policies(trajectories, trained)
        else:
            values_of_steps = [[] for _ in trajectories]
        records = (
            trajectory_record(
                trajectory,
                self._text,
                phase=phase,
                step=step,
                trained=values,
                trainer_version=step - 1 if trained else None,
                with_replay=self._with_replay,
                sums_rewards=self._sums_rewards,
            )
            for trajectory, values in zip(trajectories, values_of_steps, strict=True)
        )
        try:
            path = self.write_part(part_name(step, phase), records)
            self._remove_oldest()
            return path
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full:
                cause = "the disk is full; free space"
            else:
                cause = f"{error}; make it writable"
            raise StoreError(
                f"trajectories of step {step} not written to {self._folder}: {cause} and resume"
            ) from error

    def write_part(self, name: str, records: Iterable[dict[str, Any]]) -> Path:
        entries = []
        offset = 0
        path = self._folder / name
        partial = self._folder / f".{name}.partial"
        replaced_bytes = path.stat().st_size if path.exists() else 0
        try:
            with partial.open("wb") as file:
                for record in records:
                    line = encode_line(record).encode()
                    file.write(line)
                    entries.append(index_entry(record, name, offset, len(line)))
                    offset += len(line)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self._num_bytes += offset - replaced_bytes
        with (self._folder / INDEX).open("a", encoding="utf-8") as file:
            file.write("".join(_index_line(entry) for entry in entries))
        return path

    def _remove_oldest(self) -> None:
        """Remove the oldest parts of a store that is larger than it may be."""
        if self._max_bytes is None or self._num_bytes <= self._max_bytes:
            return
        kept_bytes = KEPT_SHARE * self._max_bytes
        for part in parts(self._folder)[:-1]:
            if self._num_bytes <= kept_bytes:
                break
            self._num_bytes -= part.path.stat().st_size
            part.path.unlink()
        self._write_index()
        if not self._has_removed:
            log.warning("%s: from now on the oldest steps are removed, as it is full", self._folder)
        self._has_removed = True

    def _write_index(self) -> None:
        """Write the index of the parts that are there."""
        lines: list[str] = []
        for entries in read_index_file(self._folder).values():
            lines += map(_index_line, entries)
        self._replace(INDEX, "".join(lines))

    def _replace(self, name: str, content: str) -> None:
        partial = self._folder / f".{name}.partial"
        partial.write_text(content, encoding="utf-8")
        partial.replace(self._folder / name)


def _index_line(entry: IndexEntry) -> str:
    return encode_line(entry_fields(entry))
