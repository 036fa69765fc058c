"""A process group of the trainer and its engine's workers, over which weights are broadcast.

It is made of torch's backends without `init_process_group`, whose default group the trainer's ranks
and vLLM use themselves. Each engine has a group, so that the death of one ends no other's.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from skyrl_fast.system.network_interface import LOOPBACK, address_towards

BACKENDS = ("nccl", "gloo")  # as in weight_sync_backend
JOIN_SECONDS = 120.0  # for all members to come
WAIT_SECONDS = 300.0  # for all to be ready for a bucket: the workers load the one before
# The same of a worker, longer: the trainer may wait for the workers of another engine first.
WORKER_WAIT_SECONDS = 2 * WAIT_SECONDS
MOVE_SECONDS = 30.0  # timeout of one operation once all members are ready, and of the store
POLL_SECONDS = 0.002  # between two checks whether all are ready, or a bucket was sent
GIVEN_UP = "given up"  # key of the store: the others need not wait


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
        timeout=timedelta(seconds=MOVE_SECONDS),
        master_listen_fd=listener.detach(),
    )
    return store, port


def store_at(address: str, port: int) -> dist.Store:
    return dist.TCPStore(address, port, timeout=timedelta(seconds=MOVE_SECONDS))


class WeightsGroup:
    """One member's side of the group; the trainer is rank 0.

    Args:
        backend: "nccl", for members on different GPUs, or "gloo".
        device: device of the tensors that are broadcast; for gloo the CPU.
        trainer: the trainer's address; gloo listens on the interface to it alone.
        wait_seconds: for all members to be ready for a bucket; None: WAIT_SECONDS, or of a
            worker WORKER_WAIT_SECONDS.
    """

    def __init__(
        self,
        backend: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        trainer: str = LOOPBACK,
        wait_seconds: float | None = None,
    ) -> None:
        self._backend = backend
        self._rank = rank
        self._size = size
        self.device = device
        self._trainer = trainer
        if wait_seconds is None:
            wait_seconds = WORKER_WAIT_SECONDS if rank else WAIT_SECONDS
        self.wait_seconds = wait_seconds
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
        self.meet(seconds=JOIN_SECONDS)
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
        self.meet()
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects now

    def meet(self, text: str = "", *, seconds: float | None = None) -> str:
        """Wait until all members are here; return the trainer's text.

        torch's backends cannot be told to stop waiting for a member, even when the process exits.
        Members that have met wait for each other no longer than a transfer takes.

        Raises:
            TimeoutError: some members did not come in time, `wait_seconds` unless given.
            RuntimeError: a member gave up or is gone.
        """
        if seconds is None:
            seconds = self.wait_seconds
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

        Raises:
            TimeoutError: it was not over in time.
            RuntimeError: a member is gone, or this one was aborted.
        """
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

    def give_up(self) -> None:
        """Tell the others that they need not wait."""
        self._store.set(GIVEN_UP, "")

    def abort(self) -> None:
        """Make this member's pending and later calls fail soon; from any thread."""
        self._aborted = True
