"""Items that a thread makes one ahead of their readers, and that several readers share.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

AHEAD = 1  # items that exist next to the one that the slowest reader uses
THE_END: Any = object()  # in place of an item
END_SECONDS = 5.0  # for the thread to end: Python's exit can crash one that is in torch


class Prefetch(Generic[T]):
    """The items of an iterator, each made once, while the readers use the one before.

    The thread starts with the first reader. Each reader must read to the end or be closed: the next
    item is made when all of them have left the last but one.

    Args:
        items: returns the iterator; called in the thread.
    """

    def __init__(self, items: Callable[[], Iterator[T]], num_readers: int = 1) -> None:
        self._items = items
        self._thread: threading.Thread | None = None
        self._ended = False
        self.error: BaseException | None = None  # what the iterator raised
        self.changed = threading.Condition()  # notified of changes here or in a reader
        self.readers = [Reader(self) for _ in range(num_readers)]

    def close(self) -> None:
        """Close all readers, and wait for the end of the thread."""
        for reader in self.readers:
            reader.close()
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def next_item(self, reader: Reader[T]) -> T:
        with self.changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
                self._thread.start()
            self.changed.wait_for(lambda: reader.pending or self._ended or not reader.is_open)
            if not reader.is_open:
                raise RuntimeError("the reader was closed")
            if self.error is not None and not reader.pending:
                raise RuntimeError(f"{type(self.error).__name__}: {self.error}") from self.error
            if reader.pending:
                return reader.pending[0]
            return THE_END

    def _run(self) -> None:
        try:
            items = self._items()
            while self._wait_for_room():
                try:
                    item = next(items)
                except StopIteration:
                    break
                with self.changed:
                    for reader in self.readers:
                        if reader.is_open:
                            reader.pending.append(item)
                    self.changed.notify_all()
                del item  # the readers alone hold it: it is freed when the last one has left it
        except BaseException as error:  # it is raised where the items are read
            self.error = error
        with self.changed:
            self._ended = True
            self.changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until another item may be made; return whether a reader is left."""
        with self.changed:
            self.changed.wait_for(
                lambda: all(len(reader.pending) <= AHEAD for reader in self.readers)
            )
            return any(reader.is_open for reader in self.readers)


class Reader(Generic[T]):
    """One reader of a `Prefetch`; iterate once."""

    def __init__(self, source: Prefetch[T]) -> None:
        self._source = source
        self.pending: deque[T] = deque()  # the item in use, and what was made after it
        self.is_open = True

    def __iter__(self) -> Iterator[T]:
        """Yield each item, which is freed when all readers ask for the next."""
        try:
            while (item := self._source.next_item(self)) is not THE_END:
                yield item
                del item
                with self._source.changed:
                    if self.is_open:
                        self.pending.popleft()
                    self._source.changed.notify_all()
        finally:
            self.close()

    def close(self) -> None:
        """Let the others continue without this reader; a wait of it ends with RuntimeError."""
        with self._source.changed:
            self.is_open = False
            self.pending.clear()
            self._source.changed.notify_all()
