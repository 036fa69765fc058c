"""Weights by a broadcast, where engines have GPUs or nodes of their own.

The trainer sends buckets over each engine's `WeightsGroup`, while a call of its workers receives
them. Each bucket is made once for all engines: gathered, cast on its device, packed, and its
tensors' digests computed, while the engines receive the one before.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from skyrl_fast.rollout.engine.weights.buckets import (
    BUCKET_BYTES,
    Bucket,
    pack_buckets,
    read_header,
)
from skyrl_fast.rollout.engine.weights.group import (
    GROUPS,
    SECONDS,
    GroupSeconds,
    WeightsGroup,
    listening_store,
)
from skyrl_fast.rollout.engine.weights.prefetch import Prefetch, Reader
from skyrl_fast.rollout.engine.weights.receipt import SentWeights, WeightSyncError
from skyrl_fast.rollout.engine.weights.transfer import Weights, WorkerCall, distinct_tensors
from skyrl_fast.system.network_interface import LOOPBACK
from skyrl_fast.system.tasks import ignore_result

T = TypeVar("T")

THE_END = "the end"  # in place of the header of a bucket
# For a thread to end after `abort`: Python's exit can crash one that is in torch.
ABORT_SECONDS = 5.0


@contextmanager
def send_by_broadcast(
    weights: Weights,
    dtype: torch.dtype | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[BroadcastCall]:
    """Make buckets of the trainer's tensors while they are gathered, for `BroadcastSender.send`.

    Args:
        weights: not to be changed in the context.
        dtype: dtype of the floating-point tensors that are sent; None: as they are.

    Raises:
        WeightSyncError: there are none.
    """
    if isinstance(weights, Iterator):
        weights = dict(distinct_tensors(weights))  # a restarted engine needs them again

    def pack(device: torch.device) -> Iterator[Bucket]:
        tensors = distinct_tensors(weights)
        return pack_buckets(tensors, dtype, device=device, bucket_bytes=bucket_bytes)

    with send_from(BucketSource(pack)) as call:
        yield call


@contextmanager
def send_from(source: BucketSource) -> Iterator[BroadcastCall]:
    """Yield the call that loads the buckets of a source, until the end of the context."""
    try:
        yield source.make_calls(1)[0]
    except Exception:
        # An engine reports that its connection was lost; why, the source knows.
        source.raise_error()
        raise
    finally:
        source.close()


def receive_by_broadcast(group: WeightsGroup) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that the trainer sends, in its order; the next bucket comes meanwhile.

    Raises:
        RuntimeError: the trainer does not send in time, is gone, or sends something else.
    """
    return receive_buckets(group, read=lambda data: None)


def receive_buckets(
    group: WeightsGroup, *, read: Callable[[torch.Tensor], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of buckets, see `receive_by_broadcast`.

    A bucket's memory is not used again: vLLM holds tensors until their layer is complete.

    Args:
        read: fills a bucket's memory where the group moves nothing.
    """
    # Of the caller: a bucket that it has freed is used again only after what it has queued.
    if group.device.type == "cuda":
        stream = torch.cuda.current_stream(group.device)
    else:
        stream = None
    received = Prefetch(partial(_receive_buckets, group, stream, read))
    (reader,) = received.readers
    try:
        for bucket in reader:
            yield from bucket.tensors()
            del bucket
    except BaseException:  # raised by the loader, too
        group.abort()
        group.give_up()  # no member waits for this one
        raise
    finally:
        received.close()


def check_broadcast_call(
    arguments: list[Any], folders: Sequence[Path], trainer: str | None
) -> list[Any] | None:
    if arguments or trainer is None:
        return None
    return []


def _receive_buckets(
    group: WeightsGroup, stream: Any, read: Callable[[torch.Tensor], None]
) -> Iterator[Bucket]:
    with torch.cuda.stream(stream):  # None: does nothing
        while (text := group.meet()) != THE_END:
            bucket = Bucket.empty(read_header(text), group.device)
            read(bucket.data)
            group.broadcast(bucket.data)
            yield bucket
            del bucket


def send_buckets(group: WeightsGroup, buckets: Iterable[Bucket]) -> None:
    """Broadcast buckets to the workers; blocks until all have received them.

    Raises:
        TimeoutError: the workers do not receive.
        What `buckets` raises.
    """
    try:
        for bucket in buckets:
            group.meet(bucket.header())  # only members that are there enter torch's call
            group.broadcast(bucket.data)
            del bucket  # its memory may be that of the next but one
        group.meet(THE_END)
    except BaseException:
        group.give_up()
        raise


@dataclass(frozen=True, slots=True)
class BroadcastCall(WorkerCall):
    """The call of one engine's workers, while which the trainer sends."""

    source: BucketSource
    buckets: Reader[Bucket]

    def for_engines(self, number: int) -> Sequence[BroadcastCall]:
        # They share buckets, each of which is sent to all before the next but one.
        return self.source.make_calls(number)

    async def make(
        self, sender: BroadcastSender | None, call: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        if sender is None:
            expected = f"expected one of {', '.join(GROUPS)} at the engine's start"
            raise WeightSyncError(f"weight_sync_backend: {expected}, got another one")
        return await sender.send(self, call())

    def close(self) -> None:
        self.buckets.close()


class BucketSource:
    """The buckets of an update, made once for all engines that load them together.

    Args:
        pack: makes the buckets, on the senders' device, from the start each time.
        transport, arguments: of the engines' call.
    """

    def __init__(
        self,
        pack: Callable[[torch.device], Iterator[Bucket]],
        *,
        transport: str = "broadcast",
        arguments: Sequence[Any] = (),
    ) -> None:
        self._pack = pack
        self._transport = transport
        self._arguments = list(arguments)
        self._pass: Prefetch[Bucket] | None = None
        self._sent = SentWeights()
        self.device = torch.device("cpu")  # set by the senders, which have the same

    def make_calls(self, number: int) -> list[BroadcastCall]:
        """Return the calls for so many engines; those of an earlier call end."""
        self.close()
        # From the start: engines that are restarted have nothing of an earlier pass.
        self._pass = Prefetch(self._make_buckets, number)
        result: list[BroadcastCall] = []
        for reader in self._pass.readers:
            call = BroadcastCall(self._transport, self._arguments, self._sent, self, reader)
            result.append(call)
        return result

    def raise_error(self) -> None:
        """Raise the error of the weights' iterator, if there was one."""
        if self._pass is not None and self._pass.error is not None:
            raise self._pass.error

    def close(self) -> None:
        if self._pass is not None:
            self._pass.close()

    def _make_buckets(self) -> Iterator[Bucket]:
        for bucket in self._pack(self.device):
            for name, tensor in bucket.tensors():
                self._sent.add(name, tensor)  # as it is sent: a wrong cast or copy differs
            yield bucket
            del bucket
        if not self._sent.digests:
            raise WeightSyncError("there are no weights to hand over")


class BroadcastSender:
    """Broadcasts weights to the workers of one start of an engine.

    Args:
        address: address of this machine that the workers reach; nothing listens on another one.
        seconds: how long it waits for the workers.
    """

    def __init__(
        self,
        backend: str,
        *,
        num_workers: int,
        address: str = LOOPBACK,
        seconds: GroupSeconds = SECONDS,
    ) -> None:
        is_cuda = backend == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else "cpu"
        self._store, port = listening_store(address)
        self._group = WeightsGroup(
            backend,
            rank=0,
            size=num_workers + 1,
            device=torch.device(device),
            trainer=address,
            seconds=seconds,
        )
        self._notice_seconds = seconds.notice
        # Arguments of the workers' `join_weights_group`.
        self.join_arguments = (backend, address, port, num_workers + 1)

    async def connect(self, answer: Coroutine[Any, Any, object]) -> None:
        """Connect with the workers while they join.

        Raises:
            RuntimeError: they do not connect, or what `answer` raises.
        """
        connect = partial(self._group.connect, self._store)
        await _run_together(
            connect, answer, stop=self._group.abort, notice_seconds=self._notice_seconds
        )

    async def send(self, call: BroadcastCall, answer: Coroutine[Any, Any, T]) -> T:
        """Return the workers' answer to a call, whose buckets are broadcast meanwhile.

        After an error the sender cannot be used again.

        Raises:
            TimeoutError: the workers do not receive.
            RuntimeError: the connection was lost, or what `answer` raises.
        """
        call.source.device = self._group.device

        def stop() -> None:
            call.close()
            self._group.abort()

        try:
            send = partial(send_buckets, self._group, call.buckets)
            return await _run_together(send, answer, stop=stop, notice_seconds=self._notice_seconds)
        finally:
            call.close()


async def _run_together(
    send: Callable[[], None],
    answer: Coroutine[Any, Any, T],
    *,
    stop: Callable[[], None],
    notice_seconds: float,
) -> T:
    """Run `send` in a thread, and return the answer when both are done; `stop` ends `send`."""
    answered = asyncio.create_task(answer)
    sent = _run_in_thread(send)
    both: list[asyncio.Future[Any]] = [answered, sent]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        # Where a worker has died, `send` fails before the answer does, which says why.
        if not answered.done():
            await asyncio.wait({answered}, timeout=notice_seconds)
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


def _run_in_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    """Return the end of a call in a thread that a process does not wait for at its exit."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:  # raised by CUDA, too; raised again where it is awaited
            future.set_exception(error)
        else:
            future.set_result(None)

    future.set_running_or_notify_cancel()  # it cannot be cancelled
    threading.Thread(target=run, name="weights", daemon=True).start()
    result = asyncio.wrap_future(future)
    result.add_done_callback(ignore_result)  # it may be
    return result
