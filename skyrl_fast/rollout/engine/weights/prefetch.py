"""Items that a thread makes one ahead of their readers, and that several readers share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

AHEAD = 1  # items that exist next to the one that the slowest reader uses
END_SECONDS = 5.0  # for the thread to end: Python's exit can crash one that is in torch


class Prefetch(Generic[T]):
    """The items of an iterator, each made once, while the readers use the one before.

    The thread starts with the first reader. Each reader must read to the end or be closed: the next
    item is made when all of them have left the last but one.

    Args:
        items: returns the iterator; called in the thread.
        num_readers: number of readers.
    """

    def __init__(self, items: Callable[[], Iterator[T]], num_readers: int = 1) -> None:
        self._items = items
        self._changed = threading.Condition()
        self._made: dict[int, T] = {}  # by number; those that a reader may still need
        self._num_made = 0
        self._positions = dict.fromkeys(range(num_readers), 0)  # of the readers that are open
        self._ended = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.readers = [Reader(self, number) for number in range(num_readers)]

    @property
    def error(self) -> BaseException | None:
        """What the iterator raised."""
        return self._error

    def close(self) -> None:
        """Close all readers, and wait for the end of the thread."""
        for reader in self.readers:
            reader.close()
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            items = self._items()
            while self._has_room():
                try:
                    item = next(items)
                except StopIteration:
                    break
                with self._changed:
                    self._made[self._num_made] = item
                    self._num_made += 1
                    self._changed.notify_all()
                del item
        except BaseException as error:  # it is raised where the items are read
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until another item may be made; return whether a reader is left."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._num_made <= min(self._positions.values(), default=0) + AHEAD
                    or not self._positions
                )
            )
            return bool(self._positions)

    def _next(self, reader: int) -> T:
        """Return the reader's item; raise StopIteration at the end."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
                self._thread.start()
            position = self._positions.get(reader, 0)
            self._changed.wait_for(
                lambda: self._num_made > position or self._ended or reader not in self._positions
            )
            if reader not in self._positions:
                raise RuntimeError("the reader was closed")
            if self._num_made > position:
                return self._made[position]
            if self._error is not None:
                raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error
            raise StopIteration

    def _leave(self, reader: int, *, close: bool) -> None:
        """Move a reader to its next item, or close it; free what no reader needs."""
        with self._changed:
            if reader not in self._positions:
                return
            self._positions[reader] += 1
            if close:
                del self._positions[reader]
            first = min(self._positions.values(), default=self._num_made)
            for number in [number for number in self._made if number < first]:
                del self._made[number]
            self._changed.notify_all()


class Reader(Generic[T]):
    """One reader of a `Prefetch`; iterate once."""

    def __init__(self, source: Prefetch[T], number: int) -> None:
        self._source = source
        self._number = number

    def __iter__(self) -> Iterator[T]:
        """Yield each item, which is freed when all readers ask for the next."""
        try:
            while True:
                try:
                    item = self._source._next(self._number)
                except StopIteration:
                    return
                yield item
                del item
                self._source._leave(self._number, close=False)
        finally:
            self.close()

    def close(self) -> None:
        """Let the others continue without this reader; a wait of it ends with RuntimeError."""
        self._source._leave(self._number, close=True)
