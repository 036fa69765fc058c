"""The phase of every running trajectory, and which of them are slow or stuck.

The clock is passed in, and nothing here waits: the caller decides when to check.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# Phases of a trajectory.
WAITING = "waiting for its turn"  # more of them run than generator.max_concurrent_trajectories
MAKING = "making its environment"
GENERATING = "generating"
ACTING = "in its environment"
CLOSING = "closing its environment"


@dataclass(slots=True)
class Activity:
    """Entry of one running trajectory on the board.

    Args:
        since: clock at the start of this phase.
        began: clock when it stopped waiting, or None.
        reported: whether it was reported as slow in this phase.
    """

    uid: str
    repetition_id: int
    attempt: int = 0
    turn: int = 0
    phase: str = WAITING
    since: float = 0.0
    began: float | None = None
    reported: bool = field(default=False, repr=False)

    def describe(self, now: float) -> str:
        """Return a description for the log.

        Example:
            >>> Activity("7", 2, turn=1, phase=ACTING, since=10.0).describe(now=71.0)
            '7/2: turn 2, in its environment for 61 s'
        """
        if self.attempt:
            again = f", attempt {self.attempt + 1}"
        else:
            again = ""
        return (
            f"{self.uid}/{self.repetition_id}: turn {self.turn + 1}{again}, {self.phase} for "
            f"{now - self.since:.0f} s"
        )


class ActivityBoard:
    """The entries of all running trajectories, by group."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._groups: dict[str, dict[int, Activity]] = {}
        self._generating = 0  # trajectories
        self._generating_since = 0.0
        self._generated_seconds = 0.0
        self._on_phase: Callable[[Activity, float], None] | None = None

    def watch(self, on_phase: Callable[[Activity, float], None] | None) -> None:
        """Call a function with each entry whose phase ends, and the clock; None: stop."""
        self._on_phase = on_phase

    def generating_seconds(self) -> float:
        """Return for how long, since the start, at least one trajectory was generating."""
        if self._generating:
            running = self.clock() - self._generating_since
        else:
            running = 0.0
        return self._generated_seconds + running

    def enter(self, uid: str, repetition_id: int) -> Activity:
        """Add a trajectory in the phase WAITING; it replaces the entry of an earlier run."""
        former = self._groups.get(uid, {}).get(repetition_id)
        if former is not None:
            self.leave(former)
        entry = Activity(uid, repetition_id, since=self.clock())
        self._groups.setdefault(uid, {})[repetition_id] = entry
        return entry

    def leave(self, entry: Activity) -> None:
        """Remove the entry of a finished trajectory, unless a newer run has replaced it."""
        group = self._groups.get(entry.uid, {})
        if group.get(entry.repetition_id) is entry:
            self._end_phase(entry, self.clock())
            del group[entry.repetition_id]
            if not group:
                del self._groups[entry.uid]

    def set_phase(self, entry: Activity, phase: str, *, attempt: int, turn: int) -> None:
        now = self.clock()
        # An abandoned trajectory may still run, but is not on the board any more.
        if self._groups.get(entry.uid, {}).get(entry.repetition_id) is entry:
            self._end_phase(entry, now)
            if phase == GENERATING:
                if not self._generating:
                    self._generating_since = now
                self._generating += 1
        if entry.began is None:
            entry.began = now
        entry.phase = phase
        entry.attempt = attempt
        entry.turn = turn
        entry.since = now
        entry.reported = False

    def _end_phase(self, entry: Activity, now: float) -> None:
        if entry.phase == GENERATING:
            self._generating -= 1
            if not self._generating:
                self._generated_seconds += now - self._generating_since
        if self._on_phase is not None:
            self._on_phase(entry, now)

    def of(self, uid: str) -> list[Activity]:
        return list(self._groups.get(uid, {}).values())

    def running(self) -> list[Activity]:
        return [entry for group in self._groups.values() for entry in group.values()]

    def oldest(self, uids: list[str], number: int = 3) -> list[Activity]:
        """Return the `number` entries of these groups that have been in their phase longest."""
        entries = [entry for uid in uids for entry in self.of(uid)]
        return sorted(entries, key=lambda entry: entry.since)[:number]

    def report_slow(self, seconds: float) -> list[Activity]:
        """Return trajectories that are so long in one phase, the longest first, once per phase."""
        now = self.clock()
        slow = [
            entry
            for group in self._groups.values()
            for entry in group.values()
            if entry.phase != WAITING and not entry.reported and now - entry.since >= seconds
        ]
        for entry in slow:
            entry.reported = True
        return sorted(slow, key=lambda entry: entry.since)

    def find_stuck(self, uid: str, seconds: float) -> list[Activity]:
        """Return trajectories of this group that ended waiting so long ago."""
        now = self.clock()
        result: list[Activity] = []
        for e in self.of(uid):
            if e.began is not None and now - e.began >= seconds:
                result.append(e)
        return result
