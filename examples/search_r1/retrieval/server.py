"""The HTTP server: `POST /retrieve` and `GET /health`. Requests are untrusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from examples.search_r1.retrieval.corpus import Corpus
from examples.search_r1.retrieval.index import Index
from skyrl_fast.system.http_guard import HttpGuard, Route, keep_body

ROUTES = (Route("GET", "/health"), Route("POST", "/retrieve", check=keep_body))
UNPROCESSABLE = 422


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request; a larger one is refused with a 4xx answer."""

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
    """Return the ASGI application that uvicorn serves.

    `POST /retrieve` answers `{"result": [one list per query]}`, whose entries are
    `{"document": {"id", "contents"}, "score"}` with `return_scores`, else only the documents.
    `GET /health` answers when the index is ready.
    """
    limits = limits or Limits()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "index": index.name, "documents": len(corpus)}

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> dict[str, Any]:
        queries, wanted = _check_request(request, topk, limits)
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

    return HttpGuard(app, ROUTES, key=None, max_body_bytes=limits.body_bytes)


def _place(part: int | str) -> str:
    """Return part of a place in a request; unknown keys, which the sender chose, are hidden."""
    known = isinstance(part, int) or part == "body" or part in RetrieveRequest.model_fields
    return str(part) if known else "an unknown key"


def _check_request(request: RetrieveRequest, topk: int, limits: Limits) -> tuple[list[str], int]:
    def refuse(what: str) -> HTTPException:
        return HTTPException(UNPROCESSABLE, detail=what)

    if (request.query is None) == (request.queries is None):
        raise refuse("expected either query or queries")
    queries = [request.query] if request.query is not None else list(request.queries or ())
    if not 1 <= len(queries) <= limits.queries:
        raise refuse(f"queries: expected 1 to {limits.queries}, got {len(queries)}")
    longest = max(map(len, queries))
    if longest > limits.query_characters:
        raise refuse(f"query: expected at most {limits.query_characters} characters, got {longest}")
    if not all(_is_text(query) for query in queries):
        raise refuse("query: expected text, got a lone surrogate")
    wanted = topk if request.topk is None else request.topk
    if not 1 <= wanted <= limits.topk:
        raise refuse(f"topk: expected 1 to {limits.topk}, got {wanted}")
    return queries, wanted


def _is_text(query: str) -> bool:
    try:
        query.encode()
    except UnicodeEncodeError:  # JSON can contain lone surrogates, UTF-8 cannot
        return False
    return True
