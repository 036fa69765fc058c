"""A response as text, and where each of its tokens ends in that text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from skyrl_fast.trajectory_store.lines import storable

_MAX_PAIRS = 1 << 18  # remembered pairs of tokens; then they are forgotten and learnt again
_UNFINISHED = "\ufffd"  # what a tokenizer writes for a part of a character


class TokenText:
    """Splits decoded text among its tokens, whatever the tokenizer does between them.

    Most tokenizers write a token the same way wherever it stands, or write a space before it that
    depends on its neighbour; both are learnt once per token or pair. Where a character spreads
    over several tokens the response is decoded prefix by prefix: the character is the last one's.

    Args:
        tokenizer: with `decode(ids)`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}
        self._after: dict[tuple[int, int], str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the tokens' text as it is stored, special tokens included."""
        return storable(self._tokenizer.decode(list(ids))) if len(ids) else ""

    def ends(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text and, for each token, how many characters end with it.

        Example:
            >>> TokenText(tokenizer).ends([5, 7])  # "go", " on"
            ('go on', [2, 5])
        """
        text = self.decode(ids)
        for pieces in (self._pieces_alone, self._pieces_after):
            lengths = pieces(ids, text)
            if lengths is not None:
                return text, lengths
        return text, self._by_prefixes(ids, text)

    def _pieces_alone(self, ids: Sequence[int], text: str) -> list[int] | None:
        return _ends_if_equal([self._of(token) for token in ids], text)

    def _pieces_after(self, ids: Sequence[int], text: str) -> list[int] | None:
        if not len(ids):
            return []
        pieces = [self._of(ids[0])]
        pieces += [self._behind(one, two) for one, two in pairwise(ids)]
        return _ends_if_equal(pieces, text)

    def _of(self, token: int) -> str:
        if token not in self._alone:
            self._alone[token] = self.decode([token])
        return self._alone[token]

    def _behind(self, before: int, token: int) -> str:
        key = (before, token)
        if key not in self._after:
            if len(self._after) >= _MAX_PAIRS:
                self._after.clear()
            first, both = self._of(before), self.decode([before, token])
            self._after[key] = both[len(first) :] if both.startswith(first) else ""
        return self._after[key]

    def _by_prefixes(self, ids: Sequence[int], text: str) -> list[int]:
        """Decode from the last finished token on: each token twice, never the whole prefix."""
        ends: list[int] = []
        position = start = read = 0
        for count in range(1, len(ids) + 1):
            before, now = self.decode(ids[start:read]), self.decode(ids[start:count])
            if len(now) > len(before) and not now.endswith(_UNFINISHED):
                position += len(now) - len(before)
                start, read = read, count
            ends.append(min(position, len(text)))
        if ends:
            ends[-1] = len(text)
        return ends


def _ends_if_equal(pieces: list[str], text: str) -> list[int] | None:
    if "".join(pieces) != text:
        return None
    ends, position = [], 0
    for piece in pieces:
        position += len(piece)
        ends.append(position)
    return ends
