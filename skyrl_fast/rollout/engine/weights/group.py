"""A process group of the trainer and its engine's workers, over which weights are broadcast.

It is made of torch's backends without `init_process_group`, whose default group the trainer's ranks
and vLLM use themselves. Each engine has a group, so that the death of one ends no other's.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from skyrl_fast.rollout.engine.weights.buckets import Bucket, read_header
from skyrl_fast.rollout.engine.weights.prefetch import Prefetch
from skyrl_fast.system.network_interface import LOOPBACK, address_towards

BACKENDS = ("nccl", "gloo")  # as in weight_sync_backend
JOIN_SECONDS = 120.0  # for all members to come
WAIT_SECONDS = 300.0  # for all to be ready for a bucket: the workers load the one before
# The same of a worker, longer: the trainer may wait for the workers of another engine first.
WORKER_WAIT_SECONDS = 2 * WAIT_SECONDS
MOVE_SECONDS = 30.0  # for members that are ready to connect, or to send a bucket; for the store
POLL_SECONDS = 0.002  # between two checks whether all are ready, or a bucket was sent
THE_END = "the end"  # in place of the header of a bucket
GIVEN_UP = "given up"  # key of the store: the others need not wait


def listening_store(address: str = LOOPBACK) -> tuple[dist.Store, int]:
    """Return a store through which members meet, and its port.

    Args:
        address: of this machine; torch's listener would accept connections to any of them.
    """
    listener = socket.create_server((address, 0))
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        *(address, port),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=MOVE_SECONDS),
        master_listen_fd=listener.detach(),
    )
    return store, port


def store_at(address: str, port: int) -> dist.Store:
    """Return the store of the trainer that listens there."""
    return dist.TCPStore(address, port, timeout=timedelta(seconds=MOVE_SECONDS))


class WeightsGroup:
    """One member's side of the group; the trainer is rank 0.

    Args:
        backend: "nccl", for members on different GPUs, or "gloo".
        rank: of this member.
        size: number of members.
        device: on which buckets are sent and received; for gloo the CPU.
        trainer: the trainer's address; gloo listens on the interface to it alone.
        seconds: for all members to be ready for a bucket; None: WAIT_SECONDS, or of a worker
            WORKER_WAIT_SECONDS.
    """

    def __init__(
        self,
        backend: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        trainer: str = LOOPBACK,
        seconds: float | None = None,
    ) -> None:
        self._backend, self._rank, self._size = backend, rank, size
        self.device = device
        self._trainer = trainer
        if seconds is None:
            seconds = WORKER_WAIT_SECONDS if rank else WAIT_SECONDS
        self._seconds = seconds
        self._store: Any = None
        self._group: Any = None
        self._meetings = 0
        self._aborted = False

    def connect(self, store: dist.Store) -> None:
        """Connect with all other members; blocks until they have.

        Raises:
            TimeoutError: some did not come within JOIN_SECONDS.
            RuntimeError: a member gave up or is gone.
        """
        self._store = store
        self._meet(JOIN_SECONDS)
        if self._backend == "nccl":
            options: Any = dist.ProcessGroupNCCL.Options()
            # NCCL's watchdog ends the process at this time-out: broadcasts raise before it.
            options._timeout = timedelta(seconds=2 * MOVE_SECONDS)
            self._group = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address_towards(self._trainer))]
            options._timeout = timedelta(seconds=MOVE_SECONDS)
            self._group = gloo(store, self._rank, self._size, options)
        self._meet(self._seconds)
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects now

    def _meet(self, seconds: float, text: str = "") -> str:
        """Wait until all members are here; return the trainer's text.

        torch's backends cannot be told to stop waiting for a member, even when the process exits.
        Members that have met wait for each other no longer than a transfer takes.
        """
        self._meetings += 1
        here = [f"{rank} at {self._meetings}" for rank in range(self._size)]
        self._store.set(here[self._rank], text)
        self._store.delete_key(f"{self._rank} at {self._meetings - 2}")  # all have left it
        deadline = time.monotonic() + seconds
        while True:
            # The store raises if the trainer's process is gone.
            if self._aborted or self._store.check([GIVEN_UP]):
                self._store.set(GIVEN_UP, "")
                raise RuntimeError("the broadcast of weights was aborted")
            if self._store.check(here):
                return str(self._store.get(here[0]).decode())
            if time.monotonic() > deadline:
                self._store.set(GIVEN_UP, "")
                missing = [rank for rank, key in enumerate(here) if not self._store.check([key])]
                raise TimeoutError(
                    f"weight_sync_backend={self._backend}: ranks {missing} of {self._size} (0: the "
                    f"trainer) were not ready for new weights within {seconds:g} s"
                )
            time.sleep(POLL_SECONDS)

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Broadcast buckets to the workers; blocks until all have received them.

        Raises:
            TimeoutError: the workers do not receive.
            RuntimeError: a worker is gone, or the group was aborted.
            What `buckets` raises.
        """
        try:
            for bucket in buckets:
                self._meet(self._seconds, bucket.header())
                self._broadcast(bucket.data)
                del bucket  # its memory may be that of the next but one
            self._meet(self._seconds, THE_END)
        except BaseException:
            self._store.set(GIVEN_UP, "")
            raise

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the trainer sends, in its order; the next bucket comes meanwhile.

        A bucket's memory is not used again: vLLM holds tensors until their layer is complete.

        Raises:
            RuntimeError: the trainer does not send in time, is gone, or sends something else.
        """
        # Of the caller: a bucket that it has freed is used again only after what it has queued.
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        received = Prefetch(partial(self._received, stream))
        (reader,) = received.readers
        try:
            for bucket in reader:
                yield from bucket.tensors()
                del bucket
        except BaseException:  # of the loader, too
            self.abort()
            raise
        finally:
            received.close()

    def _received(self, stream: Any) -> Iterator[Bucket]:
        with torch.cuda.stream(stream):  # None: does nothing
            while (text := self._meet(self._seconds)) != THE_END:
                bucket = Bucket.empty(read_header(text), self.device)
                self._broadcast(bucket.data)
                yield bucket
                del bucket

    def abort(self) -> None:
        """Make this member's pending and later calls fail soon; from any thread."""
        self._aborted = True

    def _broadcast(self, data: torch.Tensor) -> None:
        if not data.numel():
            return
        deadline = time.monotonic() + MOVE_SECONDS
        work = self._group.broadcast(data, 0)
        while not work.is_completed():
            if self._aborted or time.monotonic() > deadline:
                self._group.abort()  # ends NCCL's kernel; gloo's call has a time-out
                if self._aborted:
                    raise RuntimeError("the broadcast of weights was aborted")
                raise TimeoutError(
                    f"weight_sync_backend={self._backend}: a broadcast of {data.numel()} bytes of "
                    f"weights was not over within {MOVE_SECONDS:g} s"
                )
            time.sleep(POLL_SECONDS)
        work.wait(timedelta(seconds=MOVE_SECONDS))  # raises what it failed with
