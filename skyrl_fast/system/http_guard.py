"""A guard in front of an HTTP server: which requests may reach it, and from whom.

ASGI middleware. A server on loopback can be reached by every user of the machine, and by every web
page in a browser there. Pages send `Origin`, and without a preflight request they can send neither
JSON's Content-Type nor a key.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_SECONDS = 30.0  # for a request's body to arrive
MAX_LENGTH_DIGITS = 18  # digits of Content-Length
POLICY_VIOLATION = 1008  # code of a closed websocket


class RefusedError(Exception):
    """A request is refused with this status; the reason never quotes the request."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Route:
    """Requests that may pass: one method and path.

    Args:
        queries: the query strings that may pass.
        check: returns the body to pass on, given the body that was sent; raises RefusedError. None:
            the request has no body.
    """

    method: str
    path: str
    queries: tuple[bytes, ...] = (b"",)
    check: Callable[[bytes], bytes] | None = None


def keep_body(body: bytes) -> bytes:
    """Return the body: the check of a route whose application checks it."""
    return body


class HttpGuard:
    """Passes the requests of the given routes, and answers others with a 4xx status.

    | request | status |
    |---|---|
    | with `Origin`: from a web page | 403 |
    | without `Authorization: Bearer KEY`, where there is a key | 401 |
    | another path, method or query string | 404, 405, 400 |
    | a body that is too long, announced or not | 413 |
    | a body without `Content-Type: application/json` | 415 |
    | a body that does not arrive in time | 408 |
    | a body that the route's check refuses | its status |

    Websockets are refused.

    Args:
        key: that every request must have; None: no key.
        max_body_bytes: of a request's body.
        body_seconds: for a request's body to arrive.
    """

    def __init__(
        self,
        app: App,
        routes: Sequence[Route],
        *,
        key: str | None,
        max_body_bytes: int,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._app = app
        self._routes = {(route.path, route.method): route for route in routes}
        self._paths = {route.path for route in routes}
        if key is None:
            self._authorization = None
        else:
            self._authorization = f"Bearer {key}".encode()
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._handle(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            route = self._route(scope)
            body = await self._body(scope, receive)
            if body is None:
                return  # the client is gone
            if route.check is not None:
                body = route.check(body)
            elif body:
                raise RefusedError(400, "expected no body")
        except RefusedError as error:
            await refuse(error, send)
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> MutableMapping[str, Any]:
            if messages:
                return messages.pop()
            return await receive()

        headers = []
        for pair in scope["headers"]:
            if pair[0] not in _FRAMING:
                headers.append(pair)
        headers.append((b"content-length", str(len(body)).encode()))
        await self._app({**scope, "headers": headers}, replay, send)

    def _route(self, scope: Scope) -> Route:
        if _values(scope, b"origin"):
            raise RefusedError(403, "requests of web pages are refused")
        if self._authorization is not None:
            given = _values(scope, b"authorization")
            if len(given) != 1 or not hmac.compare_digest(given[0], self._authorization):
                raise RefusedError(401, "expected Authorization: Bearer with the server's key")
        route = self._routes.get((scope["path"], scope["method"]))
        if route is None:
            if scope["path"] in self._paths:
                raise RefusedError(405, "no such method here")
            raise RefusedError(404, "no such path")
        if scope["query_string"] not in route.queries:
            raise RefusedError(400, "unexpected query string")
        return route

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the complete body; None if the client disconnected."""
        lengths = _values(scope, b"content-length")
        length = lengths[0] if lengths else b"0"
        if len(lengths) > 1 or not length.isdigit() or len(length) > MAX_LENGTH_DIGITS:
            raise RefusedError(413, "the body is too long")
        if int(length) > self._max_body_bytes:
            raise RefusedError(413, "the body is too long")
        if int(length) or _values(scope, b"transfer-encoding"):
            kinds = _values(scope, b"content-type")
            if len(kinds) != 1 or not _is_json(kinds[0]):
                raise RefusedError(415, "expected Content-Type: application/json")
        try:
            async with asyncio.timeout(self._body_seconds):
                return await self._read(receive)
        except TimeoutError as error:
            raise RefusedError(408, "the body did not arrive in time") from error

    async def _read(self, receive: Receive) -> bytes | None:
        parts = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise RefusedError(413, "the body is too long")
            if not message.get("more_body", False):
                return b"".join(parts)


_FRAMING = (b"content-length", b"transfer-encoding")  # the application gets the complete body


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


async def refuse(error: RefusedError, send: Send) -> None:
    body = json.dumps({"detail": str(error)}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        # The rest of the body is not read, so this connection cannot serve another request.
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
