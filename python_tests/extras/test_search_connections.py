"""Connections of the search server that are slow, idle or too many."""

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("h11")

from _asgi import Recorder
from _http_server import connect, exchange, serving

from skyrl_fast.extras.search import connections
from skyrl_fast.extras.search.connections import LimitedProtocol, backlog, max_connections

pytestmark = pytest.mark.spec("search.connections")

REQUEST = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
LAST_REQUEST = REQUEST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
CLOSED_SECONDS = 20.0  # for a loaded machine; it takes a fraction of a second


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(LimitedProtocol, "limit", 8)
    with serving(Recorder(), http=LimitedProtocol, timeout_keep_alive=60) as port:
        yield port


def closed(client: socket.socket) -> bool:
    client.settimeout(CLOSED_SECONDS)
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", REQUEST[:-2], REQUEST[:-1]])
def test_connections_without_a_complete_header_are_closed(port: int, sent: bytes) -> None:
    with connect(port) as client:
        client.sendall(sent)
        assert closed(client)


def test_header_that_arrives_byte_by_byte_has_the_same_time(port: int) -> None:
    with connect(port) as client:
        started = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - started < CLOSED_SECONDS:
                client.sendall(b"G")
                time.sleep(0.05)
    assert time.monotonic() - started < CLOSED_SECONDS


@pytest.mark.parametrize("after", [b"", b"GET /hea"])
def test_kept_connection_is_closed_between_two_requests(port: int, after: bytes) -> None:
    with connect(port) as client:
        for _ in range(2):
            client.sendall(REQUEST)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(after)
        assert closed(client)


def test_idle_connections_do_not_keep_others_out(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 100.0)
    idle = [connect(port) for _ in range(50)]
    assert exchange(port, LAST_REQUEST).startswith(b"HTTP/1.1 200")
    assert all(closed(client) for client in idle[: 50 - 8])  # the oldest
    for client in idle:
        client.close()


BEGUN = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("gap", [0.0, 0.1])
def test_invalid_bytes_behind_a_request_end_the_connection(
    gap: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def at_once(scope: Any, receive: Any, send: Any) -> None:
        length = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await asyncio.sleep(2 * gap)
        await send({"type": "http.response.body", "body": b"ab"})

    with serving(at_once, http=LimitedProtocol) as port, connect(port) as client:
        if gap:
            client.sendall(BEGUN)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
            client.sendall(b"no chunk\r\n")
        else:
            client.sendall(BEGUN + b"no chunk\r\n")
        assert closed(client)
        time.sleep(3 * gap)
    assert [record for record in caplog.records if record.exc_info] == []
    assert "Traceback" not in caplog.text


def test_request_that_takes_too_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.2)

    async def stuck(scope: object, receive: object, send: object) -> None:
        await asyncio.sleep(CLOSED_SECONDS)

    with serving(stuck, http=LimitedProtocol) as port, connect(port) as client:
        client.sendall(REQUEST)
        assert closed(client)


@pytest.mark.parametrize(
    ("descriptors", "wanted"), [(300, (150, 75)), (1024, (512, 256)), (10**6, (1024, 512))]
)
def test_limit_follows_the_descriptors_of_the_process(
    descriptors: int, wanted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (descriptors, descriptors))
    assert (max_connections(), backlog()) == wanted
