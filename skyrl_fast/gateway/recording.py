"""Recorded sessions on the disk: a trajectory store, and the messages of the calls.

    RUN/trajectories/eval_step_000001.jsonl   sessions that ended together, see trajectory_store
    RUN/messages.jsonl                        what the calls of each session said

They are stored as evaluations, because nothing has trained them.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.system.file_lock import close_locked, lock_file
from skyrl_fast.trajectory_store.lines import encode_line, json_value
from skyrl_fast.trajectory_store.parts import parts
from skyrl_fast.trajectory_store.reader import FOLDER, read_index
from skyrl_fast.trajectory_store.recorded import MESSAGES
from skyrl_fast.trajectory_store.writer import TrajectoryWriter

GATHER_SECONDS = 0.2  # in which other sessions may end, to be written to the same part


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSession:
    """One session: its trajectory, and the records of its `Transcript`."""

    trajectory: Trajectory
    transcript: list[dict[str, Any]]


class Recording:
    """Add sessions to a folder as they end; those that end at about the same time share a part.

    Raises:
        ValueError: another process writes to the folder, or it holds a training run.
    """

    def __init__(self, run: Path, tokenizer: Any) -> None:
        folder = run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(run, os.O_RDONLY)
        try:
            lock_file(self._lock)
        except BlockingIOError:
            os.close(self._lock)
            raise ValueError(f"--record: {run}: another process writes to this folder") from None
        found = parts(folder)
        if any(not part.evaluation for part in found):
            self.close()
            raise ValueError(f"--record: {run}: holds a training run; choose another folder")
        self._last = max((part.step for part in found), default=0)
        self.repetitions: Counter[str] = Counter()
        for entry in read_index(run):
            self.repetitions[entry.uid] = max(self.repetitions[entry.uid], entry.repetition_id + 1)
        self._messages = run / MESSAGES
        self._writer = TrajectoryWriter(folder, tokenizer, last_step=self._last, with_replay=True)
        self._waiting: list[RecordedSession] = []
        self._writing = asyncio.Lock()

    async def add(self, session: RecordedSession) -> None:
        """Return when the session is on the disk; StoreError or OSError if it cannot be written."""
        self._waiting.append(session)
        async with self._writing:
            if session in self._waiting:  # else another one's write has taken it
                await asyncio.sleep(GATHER_SECONDS)
                await self._write_waiting()

    async def flush(self) -> None:
        async with self._writing:
            if self._waiting:
                await self._write_waiting()

    async def _write_waiting(self) -> None:
        sessions = list(self._waiting)
        await asyncio.to_thread(self._write, sessions)
        del self._waiting[: len(sessions)]  # after an error they wait for the next write

    def _write(self, sessions: Sequence[RecordedSession]) -> None:
        grouped = sorted(sessions, key=lambda s: (s.trajectory.uid, s.trajectory.repetition_id))
        lines = [encode_line(_record(session)) for session in grouped]
        trajectories = [session.trajectory for session in grouped]
        with self._messages.open("a", encoding="utf-8") as file:
            size = file.tell()
            try:
                file.write("".join(lines))
                file.flush()
                self._writer.write(self._last + 1, "eval", trajectories)
            except BaseException:
                os.truncate(self._messages, size)
                raise
        self._last += 1

    def close(self) -> None:
        close_locked(self._lock)


def _record(session: RecordedSession) -> dict[str, Any]:
    trajectory = session.trajectory
    return {
        "uid": trajectory.uid,
        "repetition_id": trajectory.repetition_id,
        "reward": json_value(trajectory.outcome()),
        "calls": json_value(session.transcript),
    }
