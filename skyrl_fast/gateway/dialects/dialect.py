"""What the server needs of a dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import Field

from skyrl_fast.gateway.messages import Answer, ApiError, Call
from skyrl_fast.gateway.request_body import Fields, RequestBodies


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A request: the call, and what only its dialect needs for the answer."""

    call: Call
    fields: Any


class Format(Fields):
    """The wanted form of an answer."""

    type: str = "text"
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class Dialect(Protocol):
    """One API."""

    def parsed(self, body: bytes, bodies: RequestBodies, memory: dict[str, Any]) -> ParsedCall:
        """Return the call that a request asks for.

        Args:
            body: JSON of the request.
            bodies: of the session: reads it.
            memory: of the session: what later requests may refer to.

        Raises:
            ApiError: it is invalid, or asks for something that the gateway does not have.
        """

    def response(self, answer: Answer, request: ParsedCall, tokens: Any) -> dict[str, Any]:
        """Return the JSON of an answer.

        Args:
            answer: of the call.
            request: the call.
            tokens: of the model, to decode single tokens.
        """

    def events(self, answer: Answer, request: ParsedCall, tokens: Any) -> Iterator[str]:
        """Yield the answer as server-sent events."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the JSON of an error."""


def structured_form(name: str, form: Format | None) -> dict[str, Any] | None:
    """Return vLLM's structured outputs of a wanted form; None: any text.

    Args:
        name: of the parameter, for errors.
        form: that the request asks for.

    Raises:
        ApiError: it is neither text nor JSON.
    """
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"json_object": True}
    if form.type != "json_schema":
        wanted = "text, json_object or json_schema"
        raise ApiError(400, f"{name}: wanted {wanted}, got {form.type}", code="unsupported")
    if form.schema_ is None:
        raise ApiError(400, f"{name}: wanted a JSON schema, got none", code="invalid_value")
    return {"json": form.schema_}


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """Return one server-sent event with JSON data."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


def text_parts(text: str) -> list[str]:
    """Return a text in the parts in which a stream sends it: words, with the space before them."""
    parts: list[str] = []
    for word in text.split(" "):
        parts.append(word if not parts else " " + word)
    return [part for part in parts if part]


def not_honoured(fields: Fields, names: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sampling parameters of a request that differ from values without effect.

    Args:
        fields: of the request.
        names: parameter -> value that changes nothing.
    """
    given = {**fields.model_dump(include=set(names)), **(fields.model_extra or {})}
    return tuple(n for n, plain in names.items() if given.get(n) not in (None, plain, [], {}))
