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


class FormatOptions(Fields):
    """Options of an answer: its form."""

    format: Format | None = None


class ContentPart(Fields):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Forms(Fields):
    """The form of an answer by vLLM's names, the older ones included."""

    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class Dialect(Protocol):
    """One API."""

    def parse(self, body: bytes, bodies: RequestBodies, memory: dict[str, Any]) -> ParsedCall:
        """Return the call that a request asks for; later ones may refer to the session's `memory`.

        Raises:
            ApiError: it is invalid, or asks for something that the gateway does not have.
        """

    def response(self, answer: Answer, request: ParsedCall, tokens: Any) -> dict[str, Any]:
        """Return the JSON of an answer; `tokens`: those of the model, to decode single tokens."""

    def events(self, answer: Answer, request: ParsedCall, tokens: Any) -> Iterator[str]:
        """Yield the answer as server-sent events."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the JSON of an error."""


def read_form(name: str, form: Format | None) -> dict[str, Any] | None:
    """Return vLLM's structured outputs of a form, None for text; ApiError unless text or JSON."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"json_object": True}
    if form.type != "json_schema":
        wanted = "text, json_object or json_schema"
        raise ApiError(400, f"{name}: expected {wanted}, got {form.type}", code="unsupported")
    if form.schema_ is None:
        raise ApiError(400, f"{name}: expected a JSON schema, got none", code="invalid_value")
    return {"json": form.schema_}


FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # vLLM's


def one_form(fields: Forms, form: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Return vLLM's structured outputs that a request asks for, by `form` or by one of its names.

    Raises:
        ApiError: it uses two names, or asks for a form that vLLM does not have.
    """
    if form is not None:
        forms = [form]
    else:
        forms = []
    if fields.structured_outputs:
        known = {}
        for k, v in fields.structured_outputs.items():
            if v not in (None, False):
                known[k] = v
        if len(known) != 1 or not known.keys() <= set(FORMS):
            expected = f"structured_outputs: expected one of {', '.join(FORMS)}"
            raise ApiError(400, f"{expected}; got {', '.join(known)}", code="invalid_value")
        forms.append(known)
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(fields, f"guided_{kind}")
        if value is not None:
            forms.append({kind: value})
    if len(forms) > 1:
        raise ApiError(400, "the form of the answer is given more than once", code="invalid_value")
    return forms[0] if forms else None


def join_texts(content: Any, between: str = "\n") -> str:
    """Return a content, text or list of parts or None, as text; ApiError if a part is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            raise ApiError(400, f"content: expected text, got a part of type {part.type!r}")
    return between.join(part.text for part in content)


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    if name is None:
        head = ""
    else:
        head = f"event: {name}\n"
    return f"{head}data: {json_text(data)}\n\n"


def json_text(value: Any) -> str:
    """Return JSON that UTF-8 can encode: lone surrogates, which clients may send, are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text
