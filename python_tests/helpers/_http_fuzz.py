"""Random HTTP requests: correct ones, and those with something changed in body, header or bytes."""

import json
import random
import select
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from _http_server import connect

ANSWER_SECONDS = 30.0  # of a loaded machine
WAIT_SECONDS = 0.02  # for an answer to a request that may be incomplete
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, 2**31, 2**63, -(2**63), 10**30, 1e308, "", "a", "\0"),
    *("\ud800", "é" * 50, "__class__", "/etc/passwd", "../..", "a" * 2000, [], {}, [[]], [None]),
    *({"a": {"b": {"c": []}}}, [0] * 300, ["a"] * 300),
)
ODD_HEADERS = (
    *(b"origin: http://evil.example", b"origin: null", b"content-type: text/plain"),
    *(b"content-type: application/json", b"authorization: Bearer x", b"authorization: Basic eA=="),
    *(b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"content-length: 0"),
    *(b"content-length: -1", b"content-length: 99999999999999999999", b"content-length: 1e3"),
    *(b"expect: 100-continue", b"upgrade: websocket\r\nconnection: upgrade", b"host: \xff"),
    *(b"x: " + b"a" * 70_000, b"x: a\r\n b", b": a", b"x", b"te: trailers", b"range: bytes=0-"),
    *(b"accept-encoding: \x00", b"content-encoding: gzip", b"cookie: " + b"a=b;" * 100),
)
METHODS = (*("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PRI"), "get", "\0", "")
ODD_PATHS = (
    *("/", "//", "/../etc/passwd", "/%00", "/%ff", "/health?", "/health#a", "*", "http://a/health"),
    *("/" + "a" * 5000, "/docs", "/openapi.json", "/metrics", "/collective_rpc/", "/é", "/%2e%2e/"),
    *("/v1/completions?a=b", "/pause?mode=keep", "/reset_prefix_cache?x=%", "/retrieve;a"),
)


@dataclass(frozen=True, slots=True)
class Template:
    """A correct request, without the headers that all have."""

    method: str
    path: str
    body: Any = None


class RequestFuzz:
    """Random requests, made from correct ones.

    Args:
        templates: correct requests.
        headers: of all of them.
        random_numbers: makes the choices.
    """

    def __init__(
        self, templates: Sequence[Template], headers: Sequence[bytes], random_numbers: random.Random
    ) -> None:
        self._templates = templates
        self._headers = headers
        self._random = random_numbers

    def request(self) -> bytes:
        """Return the bytes of the next request."""
        choose = self._random
        template = choose.choice(self._templates)
        method, path = template.method, template.path
        headers = [b"host: a", b"connection: close", *self._headers]
        body = b""
        if template.body is not None:
            value = template.body
            for _ in range(choose.choice((0, 0, 1, 2))):
                value = self._changed_value(value)
            body = json.dumps(value).encode()
            if choose.random() < 0.1:
                body = self._changed_bytes(body)
            if choose.random() < 0.03:
                body = choose.choice((b"[" * 5000, b'{"a":' * 5000, b"9" * 6000, b"", b"\xff\xfe"))
            headers += [b"content-type: application/json", f"content-length: {len(body)}".encode()]
        if choose.random() < 0.1:
            method = choose.choice(METHODS)
        if choose.random() < 0.1:
            path = choose.choice(ODD_PATHS)
        if choose.random() < 0.2 and headers:
            headers.pop(choose.randrange(len(headers)))
        if choose.random() < 0.25:
            headers.insert(choose.randrange(len(headers) + 1), choose.choice(ODD_HEADERS))
        line = f"{method} {path} HTTP/{choose.choice(('1.1', '1.1', '1.1', '1.0', '2.0'))}".encode()
        message = b"\r\n".join([line, *headers]) + b"\r\n\r\n" + body
        if choose.random() < 0.1:
            message = self._changed_bytes(message)
        if choose.random() < 0.05:
            message *= choose.randint(2, 4)  # pipelined
        return message

    def _changed_value(self, value: Any) -> Any:
        choose = self._random
        if isinstance(value, dict) and value and choose.random() < 0.8:
            key = choose.choice(list(value))
            rest = {name: item for name, item in value.items() if name != key}
            if choose.random() < 0.2:
                return rest
            if choose.random() < 0.1:
                return {**value, choose.choice(("kwargs", "query", "x" * 200)): 1}
            return {**rest, key: self._changed_value(value[key])}
        if isinstance(value, list) and value and choose.random() < 0.5:
            at = choose.randrange(len(value))
            return [*value[:at], self._changed_value(value[at]), *value[at + 1 :]]
        return choose.choice(ODD_VALUES)

    def _changed_bytes(self, message: bytes) -> bytes:
        choose = self._random
        changed = bytearray(message)
        for _ in range(choose.randint(1, 4)):
            at = choose.randrange(len(changed) + 1)
            what = choose.random()
            if what < 0.4:
                changed[at : at + 1] = bytes([choose.randrange(256)])
            elif what < 0.6:
                del changed[at : at + choose.randint(1, 40)]
            elif what < 0.8:
                changed[at:at] = choose.randbytes(choose.randint(1, 20))
            else:
                del changed[at:]
        return bytes(changed)


def statuses(port: int, fuzz: RequestFuzz, number: int) -> Counter[str]:
    """Send requests, each on a new connection; return how many had which status.

    "none": the connection ended without an answer, as after half a request.

    Raises:
        TimeoutError: a connection does not end although the client has closed its side.
    """
    counts: Counter[str] = Counter()
    for _ in range(number):
        counts[_status(port, fuzz.request())] += 1
    return counts


def _status(port: int, request: bytes) -> str:
    with connect(port, ANSWER_SECONDS) as client:
        answer, is_open = b"", True
        try:
            client.sendall(request)
            while True:
                if is_open and not select.select([client], [], [], WAIT_SECONDS)[0]:
                    client.shutdown(socket.SHUT_WR)
                    is_open = False
                part = client.recv(1 << 16)
                if not part:
                    break
                answer += part
        except ConnectionError:
            pass  # the server was faster
        if not answer:
            return "none"
        assert answer.startswith(b"HTTP/1.1 "), answer[:100]
        return answer[9:12].decode()
