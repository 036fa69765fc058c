"""Token ids whose parts other prompts share: a trajectory of n turns keeps each token once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np

NUM_SHOWN = 100  # ids in a `repr`: asyncio and pytest print those of whole batches


class TokenIds(Sequence[int]):
    """A sequence of token ids in parts. Slices and sums are lists; an equal list is equal.

    Args:
        parts: 1-D int32 arrays, which nothing changes.
        length: number of all ids, if it is known.

    Example:
        >>> start = np.array([5, 6], np.int32)
        >>> TokenIds([start, np.array([7], np.int32)]) == [5, 6, 7]
        True
    """

    __slots__ = ("_length", "parts")

    def __init__(self, parts: Iterable[np.ndarray], length: int | None = None) -> None:
        self.parts = tuple(parts)
        if length is None:
            self._length = sum(map(len, self.parts))
        else:
            self._length = length

    def prefix(self, length: int) -> TokenIds:
        """Return the first ids, at most `length`, in the same parts."""
        parts = []
        for part in self.parts:
            if length <= 0:
                break
            parts.append(part[:length])
            length -= len(part)
        return TokenIds(parts)

    def array(self) -> np.ndarray:
        """Return all of them as a new array, (n,) int32."""
        if self.parts:
            return np.concatenate(self.parts)
        return np.zeros(0, np.int32)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        found: int | list[int] = self.array()[index].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self.array().tolist())

    def __add__(self, other: Iterable[int]) -> list[int]:
        return [*self, *other]

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(other) == len(self) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = self.prefix(NUM_SHOWN)[:]
        if len(self) > len(shown):
            more = f" and {len(self) - len(shown):,} more"
        else:
            more = ""
        return f"TokenIds({shown}{more})"


def grown_ids(token_ids: list[int], before_ids: list[int], before: TokenIds) -> TokenIds:
    """Return a prompt that shares the parts of the prompt before it, where it begins with that.

    Args:
        before_ids: prompt of the previous turn, possibly the same list, extended since.
        before: its `TokenIds` at that time.
    """
    shared = len(before)
    if token_ids is not before_ids and token_ids[:shared] != before_ids:
        return TokenIds([ids_array(token_ids)])
    return TokenIds([*before.parts, ids_array(token_ids[shared:])], len(token_ids))


def count_shared(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of leading ids that two arrays have in common."""
    both = min(len(one), len(other))
    different = one[:both] != other[:both]
    if both:
        first = int(different.argmax())
    else:
        first = 0
    if both and different[first]:
        return first
    return both


def ids_array(token_ids: Sequence[int]) -> np.ndarray:
    """Return ids as an array, (n,) int32; OverflowError if one needs more than 31 bits."""
    if isinstance(token_ids, TokenIds):
        return token_ids.array()
    return np.array(token_ids, np.int32)
