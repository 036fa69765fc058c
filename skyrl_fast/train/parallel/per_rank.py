"""An argument of a call that is another one on each rank: rank 0 sends every rank its own alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class PerRank(Generic[T]):
    """An argument of a `run_on_all_ranks` function, of which each rank gets its part.

    Args:
        part: returns the part of a rank. Ranks that share sequences get the same one, and are
            counted as one. Called on rank 0, when the part is sent, so that no two are in memory
            for longer than that.
    """

    def __init__(self, part: Callable[[int], T]) -> None:
        self.part = part

    @property
    def here(self) -> T:
        """The part of the rank that reads this."""
        return self.part(0)

    def map(self, change: Callable[[T], U]) -> PerRank[U]:
        """Return the parts that a function makes of these."""
        return PerRank(lambda number: change(self.part(number)))

    def receive(self, part: T) -> None:
        """On another rank: use the part that rank 0 has sent."""
        self.part = lambda _: part
