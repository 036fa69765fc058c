"""A group of the trainer and its engine's workers, over which weights are broadcast.

It is made of torch's backends without `init_process_group`, whose default group the trainer's ranks
and vLLM use themselves. Each engine has a group, so that the death of one ends no other's.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from skyrl_fast.system.network_interface import LOOPBACK, address_towards

BACKENDS = ("nccl", "gloo")  # as in weight_sync_backend
IPC = "ipc"  # workers read buckets of ranks on their own GPUs; the group says when
GROUPS = (*BACKENDS, IPC)
POLL_SECONDS = 0.002  # between two checks whether all are ready, or a bucket was sent
GIVEN_UP = "given up"  # key of the store: the others need not wait


@dataclass(frozen=True, slots=True)
class GroupSeconds:
    """How long a member of a group waits.

    Args:
        join: for all members to come.
        ready: for all to be ready for a bucket: the workers load the one before. A worker waits
            twice as long: the trainer may wait for the workers of another engine first.
        move: for one operation once all members are ready, and for the store.
        notice: for an engine's death to be noticed after the connection was lost.
    """

    join: float = 120.0
    ready: float = 300.0
    move: float = 30.0
    notice: float = 10.0


SECONDS = GroupSeconds()


def listening_store(address: str = LOOPBACK) -> tuple[dist.Store, int]:
    """Return a store through which members meet, and its port.

    Args:
        address: address of this machine; torch's listener would accept connections to any of them.
    """
    listener = socket.create_server((address, 0))
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=SECONDS.move),
        master_listen_fd=listener.detach(),
    )
    return store, port


def store_at(address: str, port: int) -> dist.Store:
    return dist.TCPStore(address, port, timeout=timedelta(seconds=SECONDS.move))


class WeightsGroup:
    """One member's side of the group; the trainer is rank 0.

    Args:
        backend: "nccl", for members on different GPUs, "gloo", or "ipc", which moves nothing.
        device: device of the tensors that are broadcast; for gloo the CPU.
        trainer: the trainer's address; gloo listens on the interface to it alone.
        seconds: how long it waits for the others.
    """

    def __init__(
        self,
        backend: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        trainer: str = LOOPBACK,
        seconds: GroupSeconds = SECONDS,
    ) -> None:
        self._backend = backend
        self._rank = rank
        self._size = size
        self.device = device
        self._trainer = trainer
        self._seconds = seconds
        self._ready_seconds = 2 * seconds.ready if rank else seconds.ready
        self._store: Any = None
        self._group: Any = None
        self._meetings = 0
        self._aborted = False

    def connect(self, store: dist.Store) -> None:
        """Connect with all other members; blocks until they have.

        Raises:
            TimeoutError: some did not come in time.
            RuntimeError: a member gave up or is gone.
        """
        self._store = store
        self.meet(seconds=self._seconds.join)
        if self._backend == "nccl":
            options: Any = dist.ProcessGroupNCCL.Options()
            # NCCL's watchdog ends the process at this time-out: broadcasts raise before it.
            options._timeout = timedelta(seconds=2 * self._seconds.move)
            self._group = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
        elif self._backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address_towards(self._trainer))]
            options._timeout = timedelta(seconds=self._seconds.move)
            self._group = gloo(store, self._rank, self._size, options)
        self.meet()
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects now

    def meet(self, text: str = "", *, seconds: float | None = None) -> str:
        """Wait until all members are here; return the trainer's text.

        torch's backends cannot be told to stop waiting for a member, even when the process exits.
        Members that have met wait for each other no longer than a transfer takes.

        Raises:
            TimeoutError: some members did not come in time, `ready` unless given.
            RuntimeError: a member gave up or is gone.
        """
        if seconds is None:
            seconds = self._ready_seconds
        self._meetings += 1
        here = [f"{rank} at {self._meetings}" for rank in range(self._size)]
        self._store.set(here[self._rank], text)
        # All have left the meeting before the last one: they came to the last one.
        self._store.delete_key(f"{self._rank} at {self._meetings - 2}")
        deadline = time.monotonic() + seconds
        while True:
            # The store raises if the trainer's process is gone.
            if self._aborted or self._store.check([GIVEN_UP]):
                self.give_up()
                raise RuntimeError("the broadcast of weights was aborted")
            if self._store.check(here):
                return str(self._store.get(here[0]).decode())
            if time.monotonic() > deadline:
                self.give_up()
                missing = [rank for rank, key in enumerate(here) if not self._store.check([key])]
                raise TimeoutError(
                    f"weight_sync_backend={self._backend}: ranks {missing} of {self._size} (0: the "
                    f"trainer) were not ready for new weights within {seconds:g} s"
                )
            time.sleep(POLL_SECONDS)

    def broadcast(self, data: torch.Tensor) -> None:
        """Send the trainer's bytes, or receive them; blocks until this member has.

        By "ipc" each worker has copied them before; blocks until all have.

        Raises:
            TimeoutError: it was not over in time.
            RuntimeError: a member is gone, or this one was aborted.
        """
        if not data.numel():
            return
        if self._backend == IPC:
            self.meet()
            return
        deadline = time.monotonic() + self._seconds.move
        work = self._group.broadcast(data, 0)
        while not work.is_completed():
            if self._aborted or time.monotonic() > deadline:
                self._group.abort()  # ends NCCL's kernel; gloo's call has a time-out
                if self._aborted:
                    raise RuntimeError("the broadcast of weights was aborted")
                raise TimeoutError(
                    f"weight_sync_backend={self._backend}: a broadcast of {data.numel()} bytes of "
                    f"weights was not over within {self._seconds.move:g} s"
                )
            time.sleep(POLL_SECONDS)
        work.wait(timedelta(seconds=self._seconds.move))  # raises what it failed with

    def give_up(self) -> None:
        """Tell the others that they need not wait; one whose trainer is gone knows it."""
        with suppress(RuntimeError):
            self._store.set(GIVEN_UP, "")

    def abort(self) -> None:
        """Make this member's pending and later calls fail soon; from any thread."""
        self._aborted = True
