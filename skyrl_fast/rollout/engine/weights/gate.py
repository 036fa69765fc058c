"""The gate in front of the engine: requests pass while the weights do not change.

Design: docs/design/018-asynchronous.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)

LOG_SECONDS = 60.0  # between two log messages of a waiting update
# A request that had passed the gate but not yet reached the engine when it was interrupted is
# caught by the next interruption.
INTERRUPT_AGAIN_SECONDS = 0.05


class WeightGate:
    """Count the requests in the engine, and hold back new ones while its weights are updated.

    So each request runs under a single, known policy version.

    Example:
        async with gate.request() as version:
            generation = await engine.generate(..., policy_version=version)
        async with gate.hold_closed(engine.interrupt):
            await engine.load_weights(call)
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
        """Wait until the gate is open; within the context, the yielded version does not change."""
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
    async def hold_closed(self, interrupt: Callable[[], Awaitable[None]]) -> AsyncIterator[int]:
        """Close the gate: no request is in the engine within the context.

        `interrupt` ends those that are; it is called until none is left. Yields their number.
        """
        self._open.clear()
        num_interrupted = self.num_inside
        logged = self._clock()
        try:
            while self.num_inside:
                await interrupt()
                try:
                    async with asyncio.timeout(INTERRUPT_AGAIN_SECONDS):
                        await self._empty.wait()
                except TimeoutError:
                    if self._clock() - logged >= LOG_SECONDS:
                        logged = self._clock()
                        log.warning("a weight update waits for %d requests", self.num_inside)
            yield num_interrupted
        finally:
            self._open.set()
