"""Connections of the HTTP server: those that do not send their request in time are closed.

uvicorn has a limit of the time between requests only. A client that sends nothing, or half a
header, would keep a descriptor for good, and a few hundred of them all descriptors.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # for a request's header to arrive
REQUEST_SECONDS = 300.0  # for everything after it: body, search, answer
MAX_CONNECTIONS = 1024


def max_connections() -> int:
    """Return how many connections may be open at once: half of the descriptors at most.

    A quarter is for connections that asyncio accepts at once (`backlog`), a quarter for files.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(2, min(MAX_CONNECTIONS, descriptors // 2))


def backlog() -> int:
    """Return how many connections may wait to be accepted; asyncio accepts as many at once."""
    return max_connections() // 2


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 with limits of time for a connection and of the number of connections.

    If there are too many, the one is closed that has waited longest for its header, so that clients
    which send nothing cannot keep others out.
    """

    limit = max_connections()
    _deadline: asyncio.TimerHandle | None = None
    _numbers = itertools.count()
    _number = 0  # rises with the time since which a connection waits

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect(HEADER_SECONDS)
        if len(self.connections) > self.limit:
            waiting = [other for other in self.connections if not other._is_serving()]  # type: ignore[union-attr]
            min(waiting, key=lambda other: other._number).abort()  # type: ignore[union-attr]

    def handle_events(self) -> None:
        # From its header on, a request has more time.
        was_serving = self._is_serving()
        super().handle_events()
        if self._is_serving() and not was_serving:
            self._expect(REQUEST_SECONDS)

    def send_400_response(self, msg: str) -> None:
        # What is not HTTP is refused; behind a request that is being answered, only disconnect.
        if self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.abort()

    def on_response_complete(self) -> None:
        # The next header has its own time.
        self._expect(HEADER_SECONDS)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        self.connections.discard(self)
        self.transport.abort()

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._number = next(self._numbers)
        self._deadline = self.loop.call_later(seconds, self.abort)
