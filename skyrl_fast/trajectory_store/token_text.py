"""A response as text, and where each of its tokens ends in that text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from skyrl_fast.trajectory_store.lines import storable

_MAX_LEARNT = 1 << 18  # tokens or pairs of them; then they are forgotten and learnt again
_UNFINISHED = "\ufffd"  # what a tokenizer writes for a part of a character


class _Learnt(dict[Any, str]):
    """Texts, each made when it is first asked for."""

    def __init__(self, make: Callable[[Any], str]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> str:
        if len(self) >= _MAX_LEARNT:
            self.clear()
        self[key] = text = self._make(key)
        return text


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
        self._alone = _Learnt(lambda token: self.decode([token]))
        self._after = _Learnt(self._behind)

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
        return _ends_if_equal(list(map(self._alone.__getitem__, ids)), text)

    def _pieces_after(self, ids: Sequence[int], text: str) -> list[int] | None:
        if not len(ids):
            return []
        pieces = [self._alone[ids[0]], *map(self._after.__getitem__, pairwise(ids))]
        return _ends_if_equal(pieces, text)

    def _behind(self, pair: tuple[int, int]) -> str:
        first, both = self._alone[pair[0]], self.decode(pair)
        return both[len(first) :] if both.startswith(first) else ""

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
    return list(accumulate(map(len, pieces)))
