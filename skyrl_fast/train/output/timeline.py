"""Timelines of chosen steps: what the trainer and each trajectory did, and when.

Written in the trace event format of Chrome, which https://ui.perfetto.dev displays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyrl_fast.rollout.activity import ACTING, GENERATING, WAITING, Activity, ActivityBoard

TRAINER, ROLLOUTS = 1, 2  # processes of the trace
SHOWN_COUNTS = {GENERATING: "generating", ACTING: "in environments"}


class Timeline:
    """Records steps, and writes a file for each.

    Args:
        folder: receives `step-00012.json`.
        board: board of the trajectories; its clock is the trainer's.
    """

    def __init__(self, folder: Path, steps: Sequence[int], board: ActivityBoard) -> None:
        self._folder = folder
        self._steps = frozenset(steps)
        self._board = board
        self._events: list[dict[str, Any]] | None = None  # None: no step is recorded
        self._tracks: dict[tuple[str, int], int] = {}
        self._changes: list[tuple[float, str, int]] = []  # changes of the numbers of trajectories
        self._started = 0.0

    @contextmanager
    def of_step(self, number: int) -> Iterator[None]:
        """Record what happens in the context, if this step is to be recorded; then write it."""
        if number not in self._steps:
            yield
            return
        self._events = []
        self._tracks = {}
        self._changes = []
        self._started = self._board.clock()
        self._board.watch(self._trajectory_phase)
        try:
            yield
        finally:
            self._board.watch(None)
            # Phases that have not ended yet are drawn up to the end of the step.
            for entry in self._board.running():
                self._trajectory_phase(entry, self._board.clock())
            self._write(number)
            self._events = None

    def phase(self, name: str, started: float, ended: float) -> None:
        if self._events is not None:
            self._add(name, TRAINER, 0, started, ended)

    def _trajectory_phase(self, entry: Activity, ended: float) -> None:
        if entry.phase == WAITING:
            return
        key = entry.uid, entry.repetition_id
        track = self._tracks.setdefault(key, len(self._tracks))
        arguments = {"turn": entry.turn + 1, "attempt": entry.attempt + 1}
        self._add(entry.phase, ROLLOUTS, track, entry.since, ended, arguments)
        if entry.phase in SHOWN_COUNTS:
            begin = max(entry.since, self._started)
            self._changes += [(begin, entry.phase, 1), (ended, entry.phase, -1)]

    def _add(
        self,
        name: str,
        process: int,
        track: int,
        started: float,
        ended: float,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        assert self._events is not None
        begin = max(started, self._started)  # earlier: a trajectory of an asynchronous run
        event = {"name": name, "ph": "X", "pid": process, "tid": track, "ts": self._us(begin)}
        self._events.append(
            event | {"dur": round(1e6 * (ended - begin), 1)} | {"args": arguments or {}}
        )

    def _us(self, clock: float) -> float:
        return round(1e6 * (clock - self._started), 1)

    def _write(self, number: int) -> None:
        assert self._events is not None
        events = [*self._names(), *self._events, *self._counts()]
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{number:05d}.json"
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _names(self) -> Iterator[dict[str, Any]]:
        def name(what: str, process: int, track: int, text: str) -> dict[str, Any]:
            return {"name": what, "ph": "M", "pid": process, "tid": track, "args": {"name": text}}

        yield name("process_name", TRAINER, 0, "trainer")
        yield name("process_name", ROLLOUTS, 0, "trajectories")
        yield name("thread_name", TRAINER, 0, "phases")
        for (uid, repetition), track in self._tracks.items():
            yield name("thread_name", ROLLOUTS, track, f"{uid}/{repetition}")

    def _counts(self) -> Iterator[dict[str, Any]]:
        """Yield the number of trajectories in generation and in environments, as counters."""
        numbers = dict.fromkeys(SHOWN_COUNTS, 0)
        for clock, phase, change in sorted(self._changes):
            numbers[phase] += change
            yield {
                "name": SHOWN_COUNTS[phase],
                "ph": "C",
                "pid": ROLLOUTS,
                "ts": self._us(clock),
                "args": {"trajectories": numbers[phase]},
            }
