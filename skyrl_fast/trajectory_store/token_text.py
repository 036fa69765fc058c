"""The text of a response, and the position where each of its tokens ends in that text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from skyrl_fast.trajectory_store.lines import escape_surrogates

_MAX_CACHED = 1 << 18  # tokens or pairs of tokens; then the cache is cleared
_INCOMPLETE = "\ufffd"  # what a tokenizer decodes part of a character to


class _TextCache(dict[Any, str]):
    def __init__(self, compute: Callable[[Any], str]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, key: Any) -> str:
        if len(self) >= _MAX_CACHED:
            self.clear()
        self[key] = text = self._compute(key)
        return text


class TokenText:
    """Splits decoded text among its tokens, for any tokenizer with `decode(ids)`.

    Most tokenizers decode a token to the same text everywhere, or add a space that depends on the
    previous token; both are cached, per token or pair. If a character spans several tokens, the
    response is decoded incrementally, and the character belongs to the last of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._alone = _TextCache(lambda token: self.decode([token]))
        self._after = _TextCache(self._text_after)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the tokens' text as it is stored, including special tokens."""
        if not len(ids):
            return ""
        text = self._tokenizer.decode(list(ids))
        return escape_surrogates(text)

    def decode_with_ends(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text and, for each token, the number of characters up to its end.

        Example:
            >>> TokenText(tokenizer).decode_with_ends([5, 7])  # "look", " at"
            ('look at', [4, 7])
        """
        text = self.decode(ids)
        for split in (self._split_by_token, self._split_by_pair):
            ends = split(ids, text)
            if ends is not None:
                return text, ends
        return text, self._split_incrementally(ids, text)

    def _split_by_token(self, ids: Sequence[int], text: str) -> list[int] | None:
        return _ends_if_equal(list(map(self._alone.__getitem__, ids)), text)

    def _split_by_pair(self, ids: Sequence[int], text: str) -> list[int] | None:
        if not len(ids):
            return []
        pieces = [self._alone[ids[0]], *map(self._after.__getitem__, pairwise(ids))]
        return _ends_if_equal(pieces, text)

    def _text_after(self, pair: tuple[int, int]) -> str:
        first = self._alone[pair[0]]
        both = self.decode(pair)
        if both.startswith(first):
            return both[len(first) :]
        return ""

    def _split_incrementally(self, ids: Sequence[int], text: str) -> list[int]:
        """Decode from the last complete character on: each token twice, never the entire prefix."""
        ends: list[int] = []
        position = start = read = 0
        for count in range(1, len(ids) + 1):
            before = self.decode(ids[start:read])
            now = self.decode(ids[start:count])
            added = len(now) - len(before)
            if added > 0 and not now.endswith(_INCOMPLETE):
                position += added
                start = read
                read = count
            ends.append(min(position, len(text)))
        if ends:
            ends[-1] = len(text)
        return ends


def _ends_if_equal(pieces: list[str], text: str) -> list[int] | None:
    if "".join(pieces) != text:
        return None
    return list(accumulate(map(len, pieces)))
