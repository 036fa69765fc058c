"""The HTTP server: `POST /retrieve` and `GET /health`. Requests are untrusted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from skyrl_fast.extras.search.corpus import Corpus
from skyrl_fast.extras.search.index import Index

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_SECONDS = 30.0  # for a request's body to arrive
UNPROCESSABLE = 422


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request; a larger one is refused with a 4xx answer.

    Args:
        body_bytes: of one request.
        queries: of one request.
        query_characters: of one query.
        topk: passages per query.
    """

    body_bytes: int = 1 << 20
    queries: int = 256
    query_characters: int = 8192
    topk: int = 100


class RetrieveRequest(BaseModel):
    """One `query` or a list of `queries`, the passages per query, and whether to return scores."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: str | None = None
    queries: list[str] | None = None
    topk: int | None = None
    return_scores: bool = False


def make_app(corpus: Corpus, index: Index, *, topk: int = 3, limits: Limits | None = None) -> Any:
    """Return the application that uvicorn serves.

    Args:
        corpus: the passages.
        index: searches them.
        topk: default number of passages per query.
        limits: of a request.

    Returns:
        An ASGI application. `POST /retrieve` answers `{"result": [one list per query]}`, whose
        entries are `{"document": {"id", "contents"}, "score"}` with `return_scores`, else only the
        documents. `GET /health` answers when the index is ready.
    """
    limits = limits or Limits()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "index": index.name, "documents": len(corpus)}

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> dict[str, Any]:
        queries, wanted = _checked(request, topk, limits)
        return {
            "result": [
                [
                    {"document": corpus[number], "score": score}
                    if request.return_scores
                    else corpus[number]
                    for number, score in hits
                ]
                for hits in index.search(queries, wanted)
            ]
        }

    @app.exception_handler(RequestValidationError)
    def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        # The error and its place; never the input itself, which may be long.
        what = [{"where": list(map(_place, e["loc"])), "what": e["msg"]} for e in error.errors()]
        return JSONResponse({"detail": what[:5]}, status_code=UNPROCESSABLE)

    return BodyLimit(app, limits.body_bytes)


def _place(part: int | str) -> str:
    """Return part of a place in a request; unknown keys, which the sender chose, are hidden."""
    known = isinstance(part, int) or part == "body" or part in RetrieveRequest.model_fields
    return str(part) if known else "an unknown key"


def _checked(request: RetrieveRequest, topk: int, limits: Limits) -> tuple[list[str], int]:
    def refuse(what: str) -> HTTPException:
        return HTTPException(UNPROCESSABLE, detail=what)

    if (request.query is None) == (request.queries is None):
        raise refuse("wanted either query or queries")
    queries = [request.query] if request.query is not None else list(request.queries or ())
    if not 1 <= len(queries) <= limits.queries:
        raise refuse(f"queries: wanted 1 to {limits.queries}, got {len(queries)}")
    longest = max(map(len, queries))
    if longest > limits.query_characters:
        raise refuse(f"query: wanted at most {limits.query_characters} characters, got {longest}")
    if not all(_is_text(query) for query in queries):
        raise refuse("query: wanted text, got a lone surrogate")
    wanted = topk if request.topk is None else request.topk
    if not 1 <= wanted <= limits.topk:
        raise refuse(f"topk: wanted 1 to {limits.topk}, got {wanted}")
    return queries, wanted


def _is_text(query: str) -> bool:
    try:
        query.encode()
    except UnicodeEncodeError:  # JSON can contain lone surrogates, UTF-8 cannot
        return False
    return True


class BodyLimit:
    """Pass only requests whose body is small and arrives in time; otherwise answer 413 or 408."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self._max_bytes:
            await self._refuse(413, scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive)
        except TimeoutError:
            await self._refuse(408, scope, receive, send)
            return
        if body is None:
            await self._refuse(413, scope, receive, send)
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> MutableMapping[str, Any]:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the complete body, or None if it is too long."""
        parts, size = [], 0
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _refuse(self, status: int, scope: Scope, receive: Receive, send: Send) -> None:
        what = {408: "the body did not arrive in time", 413: "the body is too long"}[status]
        # The rest of the body is not read, so this connection cannot serve another request.
        answer = JSONResponse({"detail": what}, status, headers={"connection": "close"})
        await answer(scope, receive, send)
