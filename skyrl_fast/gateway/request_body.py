"""JSON of requests: what a body has in common with an earlier one is not parsed again.

Clients send their conversation with each call. A body that begins like an earlier one, up to the
end of the last item of its conversation, has the same items up to there: only what follows is
parsed and checked.

Design: docs/design/021-gateway.md.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from skyrl_fast.gateway.messages import ApiError

MAX_BEGINNINGS = 8  # beginnings of as many interleaved conversations
# Parsing holds Python's lock, so that nothing else runs meanwhile: a third of a second for as many.
MAX_OBJECTS = 100_000  # messages, parts and tools with what they contain
MAX_KEYS = 300_000
MAX_VALUES = 2_000_000  # list items, fields and lists: token ids of several of the longest contexts
WHITE_SPACE = b" \t\r\n"  # white space of JSON


class Fields(BaseModel):
    """A part of a request; fields that it does not name are allowed, and ignored."""

    model_config = ConfigDict(extra="allow")


F = TypeVar("F", bound=Fields)


def check_fields(model: type[F], body: Any) -> F:
    """Return a request's fields; an ApiError names one that is missing or of the wrong type."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{place}: {first['msg']}", code="invalid_value") from None


def parse_json(body: bytes) -> Any:
    """Return a JSON text's value; ApiError if it is none, or has more than is parsed at once."""
    _check_size(body)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None


def _check_size(body: bytes) -> None:
    excess = _excess(np.frombuffer(body, np.uint8))  # with what texts contain
    if excess and json.detect_encoding(body).startswith("utf-8"):
        excess = _excess(without_texts(body))
    if excess:
        raise ApiError(413, f"the body has more than {excess}")


def _excess(characters: np.ndarray) -> str:
    """Return which of the limits is exceeded if no character is part of a text; "" if none is."""
    commas, colons, lists, objects = (np.count_nonzero(characters == ord(c)) for c in ",:[{")
    if objects > MAX_OBJECTS:
        return f"{MAX_OBJECTS:,} objects"
    if colons > MAX_KEYS:
        return f"{MAX_KEYS:,} keys"
    # Each value but the first of a list or an object follows a comma.
    if commas + lists + objects > MAX_VALUES:
        return f"{MAX_VALUES:,} values"
    return ""


def without_texts(body: bytes) -> np.ndarray:
    """Return the characters of a JSON text that are outside its strings."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # only delimiters are quotes now
    characters = np.frombuffer(plain, np.uint8)
    inside = np.bitwise_xor.accumulate(characters == ord('"'))
    return characters[~inside]


@dataclass(frozen=True, slots=True, eq=False)
class _Beginning:
    """A body up to the end of its conversation's last item; `head` is what precedes the first."""

    text: memoryview
    head: bytes
    items: list[Any]


class RequestBodies:
    """Reads the requests of one session.

    Args:
        parse: returns the value of a JSON text.
    """

    def __init__(self, parse: Callable[[bytes], Any] = parse_json) -> None:
        self._parse = parse
        self._beginnings: dict[type[Fields], deque[_Beginning]] = {}

    def fields(self, body: bytes, model: type[F], conversation: str) -> F:
        """Return a request's checked fields; `conversation` names the one that grows with calls.

        Raises:
            ApiError: the body is no JSON, or a field is missing or of the wrong type.
        """
        kept = self._beginnings.setdefault(model, deque(maxlen=MAX_BEGINNINGS))
        begins = [known for known in kept if body.startswith(known.text)]
        known = max(begins, key=lambda known: len(known.text), default=None)
        if known is None:
            rest = None
        else:
            rest = _rest(body, known)
        if rest is None:
            place = None
        else:
            place = _items_place(rest, conversation)
        if known is None or rest is None or place is None or place[0] != len(known.head):
            known = None
            rest = body
            value = self._parse(body)
            place = _items_place(body, conversation)
        else:
            value = self._parse(rest)
            value[conversation] = known.items + value[conversation]
        fields = check_fields(model, value)
        if place is not None:
            if known is not None:
                kept.remove(known)  # the new one is longer, or the same
            start, end = place
            text = memoryview(body)[: end - len(rest) + len(body)]
            kept.append(_Beginning(text, rest[:start], getattr(fields, conversation)))
        return fields


def _rest(body: bytes, known: _Beginning) -> bytes | None:
    """Return the body without the known items; None: it is no JSON, or these are not all items."""
    after = body[len(known.text) :].lstrip(WHITE_SPACE)
    if after[:1] == b",":
        after = after[1:].lstrip(WHITE_SPACE)
        if after[:1] == b"{":
            return known.head + after
        return None
    if after[:1] == b"]":
        return known.head + after
    return None


def _items_place(body: bytes, name: str) -> tuple[int, int] | None:
    """Return where the items of a field begin, and where the last one ends."""
    # None: the field is no list of objects, which alone cannot continue after their end.
    try:
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        items = msgspec.json.decode(values[name], type=list[msgspec.Raw])
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError):
        return None
    start = end = _address(values[name]) - _address(body) + 1  # after the bracket
    if items:
        end = _address(items[-1]) - _address(body) + memoryview(items[-1]).nbytes
        if body[end - 1 : end] != b"}":
            return None
    if body[start - 1 : start] == b"[":
        return (start, end)
    return None


def _address(buffer: Any) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
