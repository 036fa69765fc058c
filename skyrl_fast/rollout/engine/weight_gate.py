"""The gate in front of the engine: requests pass while the weights stand still."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)

WORD_SECONDS = 60.0  # an update that waits so long says so
# A request that had passed the gate but not yet reached the engine when it was interrupted is
# caught by the next interruption.
INTERRUPT_AGAIN_SECONDS = 0.05


class WeightGate:
    """Counts the requests in the engine, and keeps new ones out while it gets other weights.

    So each request runs under one policy version from its first token to its last, and knows it.

    Example:
        async with gate.request() as version:
            generation = await engine.generate(..., policy_version=version)
        async with gate.closed(engine.interrupt):
            await engine.update_weights(weights)
            gate.version += 1
    """

    def __init__(self, version: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.version = version
        self._clock = clock
        self.num_inside = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[int]:
        """Wait until the gate is open; inside, the version stays what is returned."""
        while not self._open.is_set():
            await self._open.wait()
        self.num_inside += 1
        self._empty.clear()
        try:
            yield self.version
        finally:
            self.num_inside -= 1
            if self.num_inside == 0:
                self._empty.set()

    @asynccontextmanager
    async def closed(self, interrupt: Callable[[], Awaitable[None]]) -> AsyncIterator[int]:
        """No request is in the engine inside.

        Args:
            interrupt: makes requests in the engine end soon; called until none is left.

        Returns:
            How many requests there were.
        """
        self._open.clear()
        inside = self.num_inside
        said = self._clock()
        try:
            while self.num_inside:
                await interrupt()
                try:
                    await asyncio.wait_for(self._empty.wait(), INTERRUPT_AGAIN_SECONDS)
                except TimeoutError:
                    if self._clock() - said >= WORD_SECONDS:
                        said = self._clock()
                        log.warning("a weight update waits for %d requests", self.num_inside)
            yield inside
        finally:
            self._open.set()
