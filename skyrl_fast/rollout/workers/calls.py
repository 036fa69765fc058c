"""Single calls in processes: what may never end, or take all memory, is killed at its deadline."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any

from skyrl_fast.rollout.workers.processes import ProcessWorkers
from skyrl_fast.rollout.workers.protocol import CallResult, HandlerSettings


class ProcessCalls:
    """Answers single calls, each in an idle process; the processes start with the first call.

    Args:
        settings: the handler, which keeps nothing between calls.
        max_processes: limit of calls at a time; others wait.
    """

    def __init__(self, settings: HandlerSettings, max_processes: int) -> None:
        self._settings = settings
        self._workers: ProcessWorkers | None = None
        self._starting = threading.Lock()
        self._free = asyncio.Semaphore(max_processes)

    async def call(self, what: str, argument: Any, timeout: float) -> CallResult:
        """Return the result of a call, or what failed: also that it took longer than `timeout`.

        The wait for a process is not part of its time.
        """
        try:
            async with self._free:
                workers = self._workers
                if workers is None:
                    workers = await asyncio.to_thread(self._start)
                worker = await workers.acquire()
                result = await worker.call(what, argument, timeout)
        except TimeoutError:  # an OSError
            return CallResult(failure=f"{what}: no answer within {timeout:g} s")
        except OSError as error:
            return CallResult(failure=f"{what}: no process can be started: {error}")
        worker.release()
        return result

    def _start(self) -> ProcessWorkers:
        with self._starting:
            workers = self._workers or ProcessWorkers(self._settings)  # pickles the handler
            if self._workers is None:
                weakref.finalize(self, workers.end)
            self._workers = workers
            return workers
