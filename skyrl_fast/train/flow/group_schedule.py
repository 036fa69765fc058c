"""State machine of the groups: which may start, and which are trained next.

It has no engine, event loop or clock: its caller reports what happened, and when.

    accepted -> running -> ready -> taken -> consumed      (any of the first four: -> dropped)

Groups are numbered in the order in which their prompts come, and leave in that order. With a batch
of B groups and a bound S, at most (S + 1) * B of them have not left yet. So, when a group starts,
fewer than (S + 1) * B are before it, which are trained in at most S full batches and its own: it is
trained at most S policy versions after its start. If groups left in the order in which they became
ready, a slow one could be overtaken indefinitely, and there would be no such bound.

Design: docs/design/018-asynchronous.md.
"""

from __future__ import annotations

from dataclasses import dataclass

ACCEPTED = "accepted"  # in the queue, not started
RUNNING = "running"
READY = "ready"  # all of its trajectories have finished
TAKEN = "taken"  # in the batch that is being assembled or trained
CONSUMED = "consumed"  # trained
DROPPED = "dropped"  # will not be trained


@dataclass(slots=True, eq=False)
class Group:
    """One prompt's place in the queue.

    Args:
        number: position in the order of the data, from 0.
        name: uid of its trajectories; unique among groups that have not left.
        prompt: index of the prompt in the dataset.
        place: (epoch, position) of the prompt in the data.
        version: policy version at its start; -1 before.
    """

    number: int
    name: str
    prompt: int
    place: tuple[int, int]
    state: str = ACCEPTED
    version: int = -1
    started: float = 0.0


class GroupSchedule:
    """The groups in flight, in the order of their start.

    Args:
        batch_size: groups trained for one new policy version.
        max_staleness: most policy versions between a group's start and its training.
        version: policy version at the beginning.

    Example:
        >>> schedule = GroupSchedule(batch_size=2, max_staleness=1)
        >>> schedule.room()
        4
        >>> first = schedule.accept("a", prompt=0, place=(0, 0))
        >>> schedule.start(first, now=0.0); schedule.finish(first)
        >>> schedule.next_ready(2) is None  # two are wanted
        True
    """

    def __init__(self, *, batch_size: int, max_staleness: int, version: int = 0) -> None:
        if batch_size < 1 or max_staleness < 0:
            raise ValueError(
                "GroupSchedule: expected batch_size >= 1 and max_staleness >= 0, got "
                f"{batch_size} and {max_staleness}"
            )
        self.version = version
        self.capacity = (max_staleness + 1) * batch_size
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._line: list[Group] = []
        self._leaving = 0  # trained, but the engine does not have the new version yet
        self._dropped: list[Group] = []  # since groups were last consumed
        self._next_number = 0

    @property
    def line(self) -> tuple[Group, ...]:
        """All groups in the queue, in the order of their start."""
        return tuple(self._line)

    def num(self, *states: str) -> int:
        return sum(group.state in states for group in self._line)

    def room(self, *, wanted: int = 0, limit: int | None = None) -> int:
        """Return how many more groups may be accepted now.

        Args:
            wanted: groups that the trainer waits for, beyond those it has taken. They may start
                even if there is no room, as no other event would make room. This happens only
                with `max_staleness` 0, where a batch is filled up at its own version.
            limit: groups of this version's batch and of all later ones.
        """
        if limit is None:
            most = self.capacity
        else:
            most = min(self.capacity, limit)
        untaken = len(self._line) - self.num(TAKEN)
        return max(0, most - len(self._line) - self._leaving, wanted - untaken)

    def accept(self, uid: str, *, prompt: int, place: tuple[int, int]) -> Group:
        """Append the next prompt of the data to the queue."""
        # Unique in the queue, as it tells the groups apart, and in a version, as both decide the
        # seeds: a prompt that is repeated would have the same samples again.
        used = {group.name for group in (*self._line, *self._dropped)}
        name = uid
        again = 0
        while name in used:
            again += 1
            name = f"{uid}~{again}"
        group = Group(self._next_number, name, prompt, place)
        self._next_number += 1
        self._line.append(group)
        return group

    def to_start(self) -> list[Group]:
        return [group for group in self._line if group.state == ACCEPTED]

    def start(self, group: Group, *, now: float) -> None:
        """Mark the group as running; its staleness counts from here."""
        self._move(group, RUNNING, ACCEPTED)
        group.version = self.version
        group.started = now

    def finish(self, group: Group) -> None:
        self._move(group, READY, RUNNING)

    def drop(self, group: Group) -> None:
        """Remove the group without training it; this makes room."""
        self._move(group, DROPPED, ACCEPTED, RUNNING, READY, TAKEN)
        self._line.remove(group)
        self._dropped.append(group)

    def next_ready(self, number: int) -> list[Group] | None:
        """Return the next `number` groups in the order of their start; None until all are ready."""
        following = [group for group in self._line if group.state != TAKEN][:number]
        if len(following) < number or any(group.state != READY for group in following):
            return None
        return following

    def take(self, groups: list[Group]) -> None:
        """Put the groups into the batch that is trained next.

        Raises:
            RuntimeError: an earlier group is skipped, or a group is older than the bound.
        """
        if groups != [group for group in self._line if group.state != TAKEN][: len(groups)]:
            raise RuntimeError("groups are taken out of the order of their start")
        for group in groups:
            if self.version - group.version > self._max_staleness:
                raise RuntimeError(
                    f"group {group.name} started at version {group.version} and is taken at "
                    f"{self.version}: more than {self._max_staleness} later"
                )
            self._move(group, TAKEN, READY)

    def consume(self) -> list[Group]:
        """Mark the taken groups as trained, and return them; `advance` frees their room."""
        consumed = [group for group in self._line if group.state == TAKEN]
        self._line = [group for group in self._line if group.state != TAKEN]
        for group in consumed:
            self._move(group, CONSUMED, TAKEN)
        # A group that started in their place now would have one more batch before it than its
        # version implies.
        self._leaving += len(consumed)
        self._dropped.clear()
        return consumed

    def advance(self, version: int) -> None:
        """Record that the engine has this version."""
        self.version = version
        self._leaving = 0

    def staleness(self, groups: list[Group]) -> list[int]:
        """Return how many versions ago each group started."""
        return [self.version - group.version for group in groups]

    def _move(self, group: Group, state: str, *allowed: str) -> None:
        if group.state not in allowed:
            raise RuntimeError(f"group {group.name}: {group.state} cannot become {state}")
        group.state = state
