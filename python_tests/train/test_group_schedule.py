"""Order, staleness bound and names of groups in flight: a state machine tested by hypothesis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.train.flow.group_schedule import (
    ACCEPTED,
    CONSUMED,
    DROPPED,
    READY,
    RUNNING,
    TAKEN,
    Group,
    GroupSchedule,
)


def started(schedule: GroupSchedule, *uids: str) -> list[Group]:
    groups = [schedule.accept(uid, prompt=i, place=(0, i)) for i, uid in enumerate(uids)]
    for group in groups:
        schedule.start(group, now=float(group.number))
    return groups


@pytest.mark.spec("async.staleness-bound", "async.group-bound")
def test_two_steps_by_hand() -> None:
    schedule = GroupSchedule(batch_size=2, max_staleness=1)
    assert schedule.room() == 4
    a, b, c, d = started(schedule, "a", "b", "c", "d")
    assert schedule.room() == 0
    for group in (d, b, c):
        schedule.finish(group)
    assert schedule.next_ready(2) is None  # a is first, and not ready
    schedule.finish(a)
    batch = schedule.next_ready(2)
    assert batch == [a, b]
    schedule.take(batch)
    assert schedule.staleness(batch) == [0, 0]
    assert schedule.consume() == [a, b]
    assert schedule.room() == 0  # the engine does not have the new version yet
    schedule.advance(1)
    assert schedule.room() == 2
    assert schedule.next_ready(2) == [c, d]
    assert schedule.staleness([c, d]) == [1, 1]
    assert [g.state for g in (a, b, c, d)] == [CONSUMED, CONSUMED, READY, READY]


def test_groups_the_trainer_waits_for_may_exceed_the_limit() -> None:
    schedule = GroupSchedule(batch_size=2, max_staleness=0)
    a, b = started(schedule, "a", "b")
    schedule.finish(a)
    schedule.finish(b)
    schedule.take([a, b])
    schedule.drop(b)
    assert schedule.room() == 1
    assert schedule.room(wanted=2) == 2


def test_number_of_groups_is_limited_by_the_end_of_the_run() -> None:
    schedule = GroupSchedule(batch_size=2, max_staleness=3)
    assert schedule.room(limit=6) == 6
    started(schedule, "a", "b", "c")
    assert schedule.room(limit=6) == 3


@pytest.mark.spec("filter.complete-groups", "async.repeated-prompt")
def test_repeated_prompt_is_another_group() -> None:
    schedule = GroupSchedule(batch_size=3, max_staleness=1)
    groups = started(schedule, "a", "b", "a")
    assert [group.name for group in groups] == ["a", "b", "a~1"]
    schedule.drop(groups[0])  # samples of this version already have this name
    assert schedule.accept("a", prompt=0, place=(1, 0)).name == "a~2"
    for group in groups[1:]:
        schedule.finish(group)
    schedule.take(groups[1:])
    schedule.consume()
    schedule.advance(1)
    assert schedule.accept("a", prompt=0, place=(1, 1)).name == "a"


@pytest.mark.parametrize(
    ("state", "call"),
    [(ACCEPTED, "finish"), (READY, "start"), (READY, "finish"), (DROPPED, "drop")],
)
def test_invalid_transitions_are_refused(state: str, call: str) -> None:
    schedule = GroupSchedule(batch_size=1, max_staleness=0)
    group = schedule.accept("a", prompt=0, place=(0, 0))
    group.state = state
    arguments = {"now": 0.0} if call == "start" else {}
    with pytest.raises(RuntimeError, match=f"group a: {state} cannot become"):
        getattr(schedule, call)(group, **arguments)


@pytest.mark.spec("async.data-order")
def test_groups_are_taken_in_order_only() -> None:
    schedule = GroupSchedule(batch_size=1, max_staleness=1)
    a, b = started(schedule, "a", "b")
    schedule.finish(a)
    schedule.finish(b)
    with pytest.raises(RuntimeError, match="out of the order"):
        schedule.take([b])


def test_group_older_than_the_bound_is_refused() -> None:
    schedule = GroupSchedule(batch_size=1, max_staleness=0)
    (a,) = started(schedule, "a")
    schedule.finish(a)
    schedule.advance(1)
    with pytest.raises(RuntimeError, match="started at version 0 and is taken at 1"):
        schedule.take([a])


@pytest.mark.spec("async.repeated-prompt")
@given(st.data(), st.integers(1, 4), st.integers(0, 3))
def test_order_bound_and_names_are_invariant(
    data: st.DataObject, batch_size: int, max_staleness: int
) -> None:
    """Groups finish in any order, some are dropped, the trainer takes those that are allowed."""
    schedule = GroupSchedule(batch_size=batch_size, max_staleness=max_staleness)
    consumed: list[Group] = []
    dropped: list[Group] = []  # since groups were last consumed
    given_out = 0
    kept = 0
    training = False
    for _ in range(60):
        wanted = batch_size - kept if not training else 0
        for _ in range(schedule.room(wanted=wanted)):
            group = schedule.accept(str(given_out % 5), prompt=given_out % 5, place=(0, given_out))
            given_out += 1
            schedule.start(group, now=0.0)
        line = schedule.line
        names = [group.name for group in (*line, *dropped)]
        assert len(set(names)) == len(names)
        assert [g.number for g in line] == sorted(g.number for g in line)
        assert len(line) <= (max_staleness + 1) * batch_size
        running = [group for group in line if group.state == RUNNING]
        happened = data.draw(st.sampled_from(["finish", "lose", "take", "drop", "train", "sync"]))
        if happened == "finish" and running:
            schedule.finish(data.draw(st.sampled_from(running)))
        elif happened == "lose" and running:
            dropped.append(data.draw(st.sampled_from(running)))
            schedule.drop(dropped[-1])
        elif happened == "take" and not training and wanted:
            ready = schedule.next_ready(data.draw(st.integers(1, wanted)))
            if ready is not None:
                schedule.take(ready)
                assert all(0 <= age <= max_staleness for age in schedule.staleness(ready))
                kept += len(ready)
        elif happened == "drop" and not training:
            taken = [group for group in line if group.state == TAKEN]
            if taken:
                dropped.append(taken[-1])
                schedule.drop(taken[-1])
                kept -= 1
        elif happened == "train" and kept == batch_size and not training:
            consumed += schedule.consume()
            dropped.clear()
            training = True
        elif happened == "sync" and training:
            schedule.advance(schedule.version + 1)
            training, kept = False, 0
    numbers = [group.number for group in consumed]
    assert numbers == sorted(set(numbers))
    assert len(consumed) % batch_size == 0
