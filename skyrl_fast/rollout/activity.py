"""What every trajectory is doing, since when, and which of them are stuck.

The clock is passed in, and nothing here waits: who asks decides when.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# What a trajectory may be doing.
WAITING = "waiting for its turn"  # more of them run than generator.max_concurrent_trajectories
MAKING = "making its environment"
GENERATING = "generating"
ACTING = "in its environment"
CLOSING = "closing its environment"


@dataclass(slots=True)
class Activity:
    """One trajectory at work.

    Args:
        uid, repetition_id: which.
        attempt: from 0.
        turn: from 0.
        phase: one of the five above.
        since: clock when this phase began.
        began: clock when it stopped waiting, or None.
        named: it was called slow in this phase.
    """

    uid: str
    repetition_id: int
    attempt: int = 0
    turn: int = 0
    phase: str = WAITING
    since: float = 0.0
    began: float | None = None
    named: bool = field(default=False, repr=False)

    def text(self, now: float) -> str:
        """In words.

        Example:
            >>> Activity("7", 2, turn=1, phase=ACTING, since=10.0).text(now=71.0)
            '7/2: turn 2, in its environment for 61 s'
        """
        again = f", attempt {self.attempt + 1}" if self.attempt else ""
        return (
            f"{self.uid}/{self.repetition_id}: turn {self.turn + 1}{again}, {self.phase} for "
            f"{now - self.since:.0f} s"
        )


class ActivityBoard:
    """Trajectories enter, say what they do, and leave."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._groups: dict[str, dict[int, Activity]] = {}

    def enter(self, uid: str, repetition_id: int) -> Activity:
        """A trajectory waits for its turn; an earlier run of it is forgotten."""
        row = Activity(uid, repetition_id, since=self.clock())
        self._groups.setdefault(uid, {})[repetition_id] = row
        return row

    def leave(self, row: Activity) -> None:
        """It is over."""
        group = self._groups.get(row.uid, {})
        if group.get(row.repetition_id) is row:
            del group[row.repetition_id]
            if not group:
                del self._groups[row.uid]

    def does(self, row: Activity, phase: str, *, attempt: int, turn: int) -> None:
        """It begins something else."""
        now = self.clock()
        if row.began is None:
            row.began = now
        row.phase, row.attempt, row.turn, row.since, row.named = phase, attempt, turn, now, False

    def of(self, uid: str) -> list[Activity]:
        """All of a group."""
        return list(self._groups.get(uid, {}).values())

    def oldest(self, uids: list[str], number: int = 3) -> list[Activity]:
        """Those of these groups that have done the same for longest."""
        rows = [row for uid in uids for row in self.of(uid)]
        return sorted(rows, key=lambda row: row.since)[:number]

    def counts(self) -> dict[str, int]:
        """How many trajectories are in each phase."""
        result = dict.fromkeys((WAITING, MAKING, GENERATING, ACTING, CLOSING), 0)
        for group in self._groups.values():
            for row in group.values():
                result[row.phase] += 1
        return result


class Watchdog:
    """Finds what is slow, once per phase, and what is stuck.

    Args:
        board: what goes on.
        slow_seconds: so long in one phase is worth a word in the log.
        stuck_seconds: so long after it stopped waiting a trajectory will not come back: its own
            deadline has passed, and all the time in which its environment could be closed.
    """

    def __init__(self, board: ActivityBoard, *, slow_seconds: float, stuck_seconds: float) -> None:
        self._board = board
        self._slow_seconds = slow_seconds
        self._stuck_seconds = stuck_seconds

    def slow(self, uid: str) -> list[Activity]:
        """Trajectories of this group that have newly become slow."""
        now = self._board.clock()
        found = [
            row
            for row in self._board.of(uid)
            if row.phase != WAITING and not row.named and now - row.since >= self._slow_seconds
        ]
        for row in found:
            row.named = True
        return found

    def stuck(self, uid: str) -> list[Activity]:
        """Trajectories of this group that are past every deadline."""
        now = self._board.clock()
        return [
            row
            for row in self._board.of(uid)
            if row.began is not None and now - row.began >= self._stuck_seconds
        ]
