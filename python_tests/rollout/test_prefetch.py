"""Items that are made one ahead: order, bound, readers that leave, errors."""

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from skyrl_fast.rollout.engine.weights.prefetch import Prefetch

SECONDS = 60.0  # for a loaded machine


class Item:
    """Counts how many of its kind exist."""

    def __init__(self, number: int, alive: list[int]) -> None:
        self.number = number
        self._alive = alive
        alive.append(alive[-1] + 1)
        weakref.finalize(self, lambda: alive.append(alive[-1] - 1))


def numbers(reader: Any) -> list[int]:
    found = []
    for item in reader:
        found.append(item.number)
        del item
    return found


@pytest.mark.spec("async.weight-overlap")
@pytest.mark.parametrize("num_readers", [1, 3])
def test_each_item_is_made_once_and_at_most_two_exist(num_readers: int) -> None:
    alive, made = [0], []

    def items() -> Iterator[Item]:
        for number in range(50):
            made.append(number)
            yield Item(number, alive)

    source = Prefetch(items, num_readers)
    with ThreadPoolExecutor(num_readers) as threads:
        found = list(threads.map(numbers, source.readers))
    source.close()
    assert found == [[*range(50)]] * num_readers
    assert made == [*range(50)]
    assert max(alive) <= 2 and alive[-1] == 0


def test_the_next_item_is_made_while_one_is_used_but_not_the_one_after() -> None:
    made = [threading.Event() for _ in range(4)]

    def items() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    source = Prefetch(items, 2)
    first, second = map(iter, source.readers)
    assert next(first) == 0 and next(second) == 0
    assert made[1].wait(SECONDS)
    assert next(first) == 1
    assert not made[2].wait(0.05)  # the second reader uses the first item
    assert next(second) == 1
    assert made[2].wait(SECONDS)
    source.close()


def test_a_reader_that_leaves_holds_up_no_other() -> None:
    source = Prefetch(lambda: iter(range(100)), 3)
    never, one, other = source.readers
    reading = iter(one)
    assert next(reading) == 0
    with ThreadPoolExecutor(1) as threads:
        rest = threads.submit(lambda: [*other])
        never.close()
        reading.close()
        assert rest.result(SECONDS) == [*range(100)]
    source.close()


def test_a_waiting_reader_that_is_closed_ends_with_an_error() -> None:
    source = Prefetch(lambda: iter(range(100)), 2)
    slow, fast = source.readers
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: [*fast])
        reading = iter(slow)
        assert next(reading) == 0
        fast.close()
        with pytest.raises(RuntimeError, match="the reader was closed"):
            waiting.result(SECONDS)
    source.close()


def test_an_error_is_raised_by_all_readers() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise KeyError("layer 1")

    source = Prefetch(items, 2)
    for reader in source.readers:
        found = []
        with pytest.raises(RuntimeError, match="KeyError: 'layer 1'"):
            found.extend(one for one in reader)
    assert isinstance(source.error, KeyError)
    source.close()


def test_the_thread_ends_with_its_readers() -> None:
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            ended.set()

    source = Prefetch(items)
    assert next(iter(source.readers[0])) == 0
    source.close()
    assert ended.wait(SECONDS)
