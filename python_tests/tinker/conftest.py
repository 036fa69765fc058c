"""The SDK's clients, closed at the end of each test."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def clients_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop the heartbeats of a test's clients, which would log errors for the rest of the run."""
    try:
        from tinker.lib.internal_client_holder import InternalClientHolder
    except ImportError:  # the tests of this folder that need no client
        yield
        return
    begin = InternalClientHolder.__init__
    made: list[Any] = []

    def record(holder: Any, *arguments: Any, **options: Any) -> None:
        begin(holder, *arguments, **options)
        # Others are shared by all clients of a server, and have no heartbeat.
        if holder._session_heartbeat_task is not None:
            made.append(holder)

    monkeypatch.setattr(InternalClientHolder, "__init__", record)
    yield
    for holder in made:
        holder.close()
