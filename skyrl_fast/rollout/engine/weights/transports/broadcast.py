"""The trainer's side of `WeightsGroup`: a thread sends while a call of the workers receives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from skyrl_fast.rollout.engine.weights.group import WeightsGroup, listening_store
from skyrl_fast.rollout.engine.weights.transfer import WorkerCall
from skyrl_fast.system.network_interface import LOOPBACK

T = TypeVar("T")

NOTICE_SECONDS = 10.0  # for an engine's death to be noticed after the connection was lost
ABORT_SECONDS = (
    5.0  # for a thread to end after `abort`: Python's exit can crash one that is in torch
)


class WeightsSender:
    """Broadcasts weights to the workers of one start of an engine.

    Args:
        backend: of `WeightsGroup`.
        num_workers: of the engine.
        address: of this machine, which the workers reach; nothing listens on another one.
    """

    def __init__(self, backend: str, *, num_workers: int, address: str = LOOPBACK) -> None:
        is_cuda = backend == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else "cpu"
        self._store, port = listening_store(address)
        self._group = WeightsGroup(
            backend,
            rank=0,
            size=num_workers + 1,
            device=torch.device(device),
            trainer=address,
        )
        # Of the workers' `join_weights_group`.
        self.join_arguments = (backend, address, port, num_workers + 1)

    async def connect(self, answer: Coroutine[Any, Any, object]) -> None:
        """Connect with the workers while they join.

        Args:
            answer: of their `join_weights_group`.

        Raises:
            RuntimeError: they do not connect, or what `answer` raises.
        """
        await self._together(partial(self._group.connect, self._store), answer, self._group.abort)

    async def send(self, call: WorkerCall, answer: Coroutine[Any, Any, T]) -> T:
        """Return the workers' answer to a call, whose buckets are broadcast meanwhile.

        After an error the sender cannot be used again.

        Raises:
            TimeoutError: the workers do not receive.
            RuntimeError: the connection was lost, or what `answer` raises.
        """
        assert call.buckets is not None
        buckets = call.buckets.on(self._group.device)

        def stop() -> None:
            buckets.close()
            self._group.abort()

        try:
            return await self._together(partial(self._group.send, buckets), answer, stop)
        finally:
            buckets.close()

    async def _together(
        self, send: Callable[[], None], answer: Coroutine[Any, Any, T], stop: Callable[[], None]
    ) -> T:
        answered = asyncio.create_task(answer)
        sent = _in_thread(send)
        both: list[asyncio.Future[Any]] = [answered, sent]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            if not answered.done():
                await asyncio.wait({answered}, timeout=NOTICE_SECONDS)
            if answered.done():
                result = answered.result()  # says more than that the connection was lost
                await asyncio.wait({sent})
                sent.result()
                return result
            sent.result()
            raise AssertionError("neither side failed")
        finally:
            answered.cancel()
            if not sent.done() or sent.exception():
                stop()
                await asyncio.wait({sent}, timeout=ABORT_SECONDS)


def _in_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    """Return the end of a call in a thread that a process does not wait for at its exit."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:  # of CUDA, too; it is raised where it is awaited
            future.set_exception(error)
        else:
            future.set_result(None)

    future.set_running_or_notify_cancel()  # it cannot be cancelled
    threading.Thread(target=run, name="weights", daemon=True).start()
    result = asyncio.wrap_future(future)
    result.add_done_callback(lambda done: done.cancelled() or done.exception())  # may be ignored
    return result
