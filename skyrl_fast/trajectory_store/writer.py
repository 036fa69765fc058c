"""Writing of a run's trajectories, part by part; each part is written atomically."""

from __future__ import annotations

import errno
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
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        *,
        last_step: int,
        with_replay: bool = False,
        sums_rewards: bool = False,
    ) -> None:
        self._folder = folder
        self._with_replay = with_replay
        self._sums_rewards = sums_rewards
        self._text = TokenText(deepcopy(tokenizer))
        folder.mkdir(parents=True, exist_ok=True)
        for part in parts(folder):
            if part.step > last_step:
                part.path.unlink()
        kept = read_index_file(folder)
        lines: list[str] = []
        for entries in kept.values():
            lines += map(_index_line, entries)
        self._replace(INDEX, "".join(lines))

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
            return self.write_part(part_name(step, phase), records)
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
        partial = self._folder / f".{name}.partial"
        try:
            with partial.open("wb") as file:
                for record in records:
                    line = encode_line(record).encode()
                    file.write(line)
                    entries.append(index_entry(record, name, offset, len(line)))
                    offset += len(line)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._folder / name)
        finally:
            partial.unlink(missing_ok=True)
        with (self._folder / INDEX).open("a", encoding="utf-8") as file:
            file.write("".join(_index_line(entry) for entry in entries))
        return self._folder / name

    def _replace(self, name: str, content: str) -> None:
        partial = self._folder / f".{name}.partial"
        partial.write_text(content, encoding="utf-8")
        partial.replace(self._folder / name)


def _index_line(entry: IndexEntry) -> str:
    return encode_line(entry_fields(entry))
