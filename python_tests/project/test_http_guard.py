"""The guard in front of the HTTP servers, with an application that records what passes."""

import asyncio
from typing import Any

import pytest
from _asgi import Recorder

from skyrl_fast.system.http_guard import HttpGuard, RefusedError, Route, keep_body

pytestmark = pytest.mark.spec("http.guard")

KEY = "0123456789abcdef"
JSON = ("content-type", "application/json")
BEARER = ("authorization", f"Bearer {KEY}")


def no_threes(body: bytes) -> bytes:
    if b"3" in body:
        raise RefusedError(403, "no threes")
    return body.replace(b"1", b"11")


ROUTES = [
    Route("GET", "/health"),
    Route("POST", "/work", check=no_threes),
    Route("POST", "/any", check=keep_body),
    Route("POST", "/stop", queries=(b"mode=now",)),
]


def ask(
    app: Any,
    method: str,
    path: str,
    *headers: tuple[str, str],
    parts: tuple[Any, ...] = (b"",),
    query: bytes = b"",
) -> int | None:
    """Return the status of the answer; None: there was none.

    Args:
        parts: of the body; None: the client disconnects.
    """
    waiting = list(parts)
    sent: list[Any] = []

    async def receive() -> Any:
        if not waiting:
            await asyncio.Event().wait()
        part = waiting.pop(0)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"] if sent else None


@pytest.fixture
def app() -> Recorder:
    return Recorder()


@pytest.fixture
def guard(app: Recorder) -> HttpGuard:
    return HttpGuard(app, ROUTES, key=KEY, max_body_bytes=20)


def length(body: bytes) -> tuple[str, str]:
    return ("content-length", str(len(body)))


def test_what_was_checked_is_passed_on(guard: HttpGuard, app: Recorder) -> None:
    assert ask(guard, "GET", "/health", BEARER) == 200
    headers = (BEARER, JSON, length(b'{"a": 1}'))
    assert ask(guard, "POST", "/work", *headers, parts=(b'{"a":', b" 1}")) == 200
    utf8 = ("content-type", "application/json; charset=utf-8")
    assert ask(guard, "POST", "/any", BEARER, utf8, length(b"{}"), parts=(b"{}",)) == 200
    assert ask(guard, "POST", "/stop", BEARER, query=b"mode=now") == 200
    assert app.passed == [
        ("GET", "/health", b""),
        ("POST", "/work", b'{"a": 11}'),
        ("POST", "/any", b"{}"),
        ("POST", "/stop", b""),
    ]
    assert app.headers[1][b"content-length"] == b"9"


@pytest.mark.parametrize(
    ("status", "method", "path", "headers", "parts"),
    [
        (403, "POST", "/any", (BEARER, JSON, ("origin", "http://evil.example")), (b"{}",)),
        (403, "POST", "/any", (BEARER, JSON, ("origin", "null")), (b"{}",)),
        (403, "GET", "/health", (BEARER, ("origin", "")), (b"",)),
        (403, "OPTIONS", "/any", (("origin", "http://evil.example"),), (b"",)),
        (401, "GET", "/health", (), (b"",)),
        (401, "GET", "/health", (("authorization", "Bearer 0123456789abcdeg"),), (b"",)),
        (401, "GET", "/health", (("authorization", f"Bearer {KEY}0"),), (b"",)),
        (401, "GET", "/health", (("authorization", f"Bearer {KEY[:-1]}"),), (b"",)),
        (401, "GET", "/health", (("authorization", KEY),), (b"",)),
        (401, "GET", "/health", (("authorization", "Bearer \xff"),), (b"",)),
        (401, "GET", "/health", (("authorization", ""),), (b"",)),
        (401, "GET", "/health", (BEARER, ("authorization", "Bearer x")), (b"",)),
        (404, "GET", "/metrics", (BEARER,), (b"",)),
        (404, "GET", "/health/", (BEARER,), (b"",)),
        (404, "POST", "//any", (BEARER, JSON, length(b"{}")), (b"{}",)),
        (405, "GET", "/any", (BEARER,), (b"",)),
        (405, "HEAD", "/health", (BEARER,), (b"",)),
        (415, "POST", "/any", (BEARER, length(b"{}")), (b"{}",)),
        (415, "POST", "/any", (BEARER, length(b"{}"), ("content-type", "text/plain")), (b"{}",)),
        (415, "POST", "/any", (BEARER, ("transfer-encoding", "chunked")), (b"{}",)),
        (415, "POST", "/any", (BEARER, length(b"{}"), JSON, JSON), (b"{}",)),
        (413, "POST", "/any", (BEARER, JSON, length(b" " * 21)), (b"{}",)),
        (413, "POST", "/any", (BEARER, JSON, ("content-length", "-5")), (b"{}",)),
        (413, "POST", "/any", (BEARER, JSON, ("content-length", "9" * 5000)), (b"{}",)),
        (413, "POST", "/any", (BEARER, JSON, length(b"{}"), length(b"{")), (b"{}",)),
        (413, "POST", "/any", (BEARER, JSON, length(b"{}")), (b" " * 11, b" " * 11)),
        (400, "POST", "/stop", (BEARER, JSON, length(b"{}")), (b"{}",)),
        (400, "POST", "/stop", (BEARER,), (b"",)),
        (403, "POST", "/work", (BEARER, JSON, length(b"3")), (b"3",)),
        (None, "POST", "/any", (BEARER, JSON, length(b"{}")), (b"{", None)),
    ],
)
def test_other_requests_are_refused(
    status: int,
    method: str,
    path: str,
    headers: tuple[tuple[str, str], ...],
    parts: tuple[Any, ...],
    guard: HttpGuard,
    app: Recorder,
) -> None:
    query = b"mode=later" if path == "/stop" and parts == (b"",) else b"mode=now"
    assert (
        ask(guard, method, path, *headers, parts=parts, query=query * (path == "/stop")) == status
    )
    assert app.passed == []


def test_query_strings_are_exact(guard: HttpGuard, app: Recorder) -> None:
    for query in (b"", b"mode=now&x=1", b"mode=later", b"mode=now&mode=later"):
        assert ask(guard, "POST", "/stop", BEARER, query=query) == 400
    assert ask(guard, "GET", "/health", BEARER, query=b"a=1") == 400
    assert app.passed == []


def test_body_that_never_ends_times_out(app: Recorder) -> None:
    guard = HttpGuard(app, ROUTES, key=KEY, max_body_bytes=20, body_seconds=0.01)
    assert ask(guard, "POST", "/any", BEARER, JSON, length(b"{}"), parts=()) == 408
    assert app.passed == []


def test_a_server_without_a_key_refuses_web_pages(app: Recorder) -> None:
    guard = HttpGuard(app, ROUTES, key=None, max_body_bytes=20)
    page = ("origin", "http://evil.example")
    text = ("content-type", "text/plain")
    body = (b"{}",)
    assert ask(guard, "POST", "/any", JSON, length(b"{}"), page, parts=body) == 403
    assert ask(guard, "POST", "/any", text, length(b"{}"), parts=body) == 415
    assert app.passed == []
    assert ask(guard, "POST", "/any", JSON, length(b"{}"), parts=body) == 200


def test_websockets_are_refused(guard: HttpGuard, app: Recorder) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert app.passed == []
