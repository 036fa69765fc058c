"""Connections of the HTTP server: how many there may be, and how long one may wait for a request.

A connection needs a descriptor, of which a process has few; a client needs no key to open one.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

log = logging.getLogger(__name__)

REQUEST_SECONDS = 30.0  # for a request's headers to arrive, from a connection's start on
SHARE_OF_DESCRIPTORS = 0.5  # share of what the process may open; the rest is the trainer's


class Connection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """A connection that is closed if there are too many, or if its request does not come.

    Between two requests it may be idle for as long as uvicorn's `timeout_keep_alive`.

    Args:
        arguments, options: uvicorn's.
        request_seconds: for a request's headers to arrive.
        most: number of connections; None: `max_connections()`.
    """

    def __init__(
        self,
        *arguments: Any,
        request_seconds: float = REQUEST_SECONDS,
        most: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._request_seconds = request_seconds
        self._most = most
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        limit = max_connections() if self._most is None else self._most
        if len(self.connections) > limit:
            log.warning("the gateway has its %d connections: it closes another one", limit)
            transport.abort()
        else:
            self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def _set_deadline(self) -> None:
        """Begin to wait for the headers of a request, or stop if they are there."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._request_seconds, self.transport.close)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def max_connections() -> int:
    """Return how many connections there may be with the descriptors that the process has now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(soft * SHARE_OF_DESCRIPTORS)
