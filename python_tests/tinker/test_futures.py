"""Order, repetition and lifetime of calls."""

import asyncio
import itertools

import pytest

from skyrl_fast.tinker.futures import (
    ABANDONED_SECONDS,
    KEPT_SECONDS,
    SAMPLING,
    TRAINING,
    AcceptedCalls,
    CallAnswer,
    Futures,
    GoneError,
    OrderedCalls,
)
from skyrl_fast.tinker.wire import RefusedCallError


class Log:
    """Calls that write their number when they run."""

    def __init__(self) -> None:
        self.ran: list[int] = []

    def call(self, number: int) -> CallAnswer:
        async def run() -> CallAnswer:
            await asyncio.sleep(0)
            self.ran.append(number)
            return CallAnswer.of_json({"number": number})

        return run  # type: ignore[return-value]


@pytest.mark.spec("tinker.order", "tinker.once")
@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3, 4))))
async def test_calls_run_in_order_whatever_order_they_arrive_in(order: tuple[int, ...]) -> None:
    futures = Futures("epoch", lambda: 0.0)
    calls = OrderedCalls(futures)
    log = Log()
    accepted = {n: calls.submit(n, bytes([n]), log.call(n)) for n in order}
    repeated = {n: calls.submit(n, bytes([n]), log.call(n)) for n in order}
    for number, future in accepted.items():
        assert repeated[number] is future
        answer = await futures.fetch(future.request_id, 10)
        assert answer == CallAnswer.of_json({"number": number})
    assert log.ran == [1, 2, 3, 4]
    # Its answer was lost on the way.
    assert calls.submit(2, bytes([2]), log.call(2)) is accepted[2]
    assert log.ran == [1, 2, 3, 4]


async def test_a_gap_is_waited_for() -> None:
    futures = Futures("epoch", lambda: 0.0)
    calls = OrderedCalls(futures)
    log = Log()
    second = calls.submit(2, b"2", log.call(2))
    assert await futures.fetch(second.request_id, 0.01) is None
    assert log.ran == []
    calls.submit(1, b"1", log.call(1))
    assert await futures.fetch(second.request_id, 10) is not None
    assert log.ran == [1, 2]


@pytest.mark.spec("tinker.once")
async def test_a_number_of_another_call_is_refused() -> None:
    calls = OrderedCalls(Futures("epoch", lambda: 0.0))
    log = Log()
    calls.submit(1, b"one", log.call(1))
    with pytest.raises(RefusedCallError, match="1 was another call"):
        calls.submit(1, b"other", log.call(1))


async def test_a_failed_call_does_not_stop_the_next() -> None:
    async def fail() -> CallAnswer:
        raise RefusedCallError("wrong in words")

    futures = Futures("epoch", lambda: 0.0)
    calls = OrderedCalls(futures)
    first = calls.submit(1, b"1", fail)
    second = calls.submit(2, b"2", Log().call(2))
    answer = await futures.fetch(first.request_id, 10)
    assert answer == CallAnswer.of_json({"error": "wrong in words", "category": "user"})
    assert await futures.fetch(second.request_id, 10) == CallAnswer.of_json({"number": 2})


async def test_closed_calls_fail_and_do_not_run() -> None:
    futures = Futures("epoch", lambda: 0.0)
    calls = OrderedCalls(futures)
    log = Log()
    waiting = calls.submit(2, b"2", log.call(2))
    await calls.close("the model was unloaded")
    answer = await futures.fetch(waiting.request_id, 10)
    assert answer is not None and b"unloaded" in answer.content
    assert log.ran == []


@pytest.mark.spec("tinker.answers")
async def test_answers_are_dropped_after_their_time() -> None:
    now = 0.0
    futures = Futures("epoch", lambda: now)
    fetched = futures.new(SAMPLING)
    abandoned = futures.new(SAMPLING)
    open_ones = [futures.new(SAMPLING) for _ in range(2000)]
    for future in (fetched, abandoned):
        futures.finish(future, CallAnswer.of_json({}))
    await futures.fetch(fetched.request_id, 1)
    now = KEPT_SECONDS - 1
    futures.drop_old()
    assert await futures.fetch(fetched.request_id, 1) is not None
    now = 2 * KEPT_SECONDS + 1
    futures.drop_old()
    with pytest.raises(GoneError):
        await futures.fetch(fetched.request_id, 1)
    assert len(futures) == len(open_ones) + 1
    now = ABANDONED_SECONDS + 1
    futures.drop_old()
    assert len(futures) == len(open_ones)


@pytest.mark.spec("tinker.answers")
async def test_calls_of_dropped_answers_are_forgotten() -> None:
    """A model that is trained for days does not hold all its answers."""
    now = 0.0
    futures = Futures("epoch", lambda: now)
    calls = OrderedCalls(futures)
    accepted = AcceptedCalls()
    log = Log()
    for number in range(1, 301):
        trained = calls.submit(number, b"same", log.call(number))
        assert await futures.fetch(trained.request_id, 10) is not None
        accepted.add(number, trained)
        now += KEPT_SECONDS / 10
        futures.drop_old()
        assert len(accepted) <= 12 and len(futures) <= 12
    assert accepted.find(300, b"same") is trained
    assert accepted.find(1, b"same") is None
    with pytest.raises(RefusedCallError, match="seq_id: expected 301 or more, got 1"):
        calls.submit(1, b"same", log.call(1))
    assert log.ran == list(range(1, 301))


@pytest.mark.spec("tinker.restart")
async def test_calls_before_a_restart_fail_in_words() -> None:
    before = Futures("first", lambda: 0.0)
    after = Futures("second", lambda: 0.0)
    trained = before.new(TRAINING)
    answer = await after.fetch(trained.request_id, 1)
    assert answer is not None and b"started again" in answer.content
    with pytest.raises(GoneError):  # which the client samples again
        await after.fetch(before.new(SAMPLING).request_id, 1)
