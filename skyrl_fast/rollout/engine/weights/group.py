"""A process group of the trainer and its engine's workers, over which weights are broadcast.

It is made of torch's backends without `init_process_group`, whose default group the trainer's ranks
and vLLM use themselves.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from skyrl_fast.network_interface import LOOPBACK, address_towards
from skyrl_fast.rollout.engine.weights.digest import dtype_name

# A tensor that is sent: its name, dtype and shape.
TensorInfo = Sequence[Any]

BACKENDS = ("nccl", "gloo")  # as in weight_sync_backend
BUCKET_BYTES = 128 << 20  # sent at once; a larger tensor is sent alone
ALIGNMENT = 16  # bytes; of the tensors in a bucket
JOIN_SECONDS = 120.0  # for all members to come
WAIT_SECONDS = 300.0  # for all to be ready for a bucket: the workers load the one before
MOVE_SECONDS = 30.0  # for members that are ready to connect, or to send a bucket; for the store
POLL_SECONDS = 0.002  # between two checks whether all are ready, or a bucket was sent
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


def tensor_infos(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> list[list[Any]]:
    """Return what the workers need to receive the tensors.

    Args:
        dtype: that floating-point tensors are cast to; None: as they are.
    """
    return [
        [
            name,
            dtype_name(dtype if dtype and tensor.is_floating_point() else tensor.dtype),
            list(tensor.shape),
        ]
        for name, tensor in tensors.items()
    ]


class WeightsGroup:
    """One member's side of the group; the trainer is rank 0.

    Args:
        backend: "nccl", for members on different GPUs, or "gloo".
        rank: of this member.
        size: number of members.
        device: on which buckets are sent and received; for gloo the CPU.
        trainer: the trainer's address; gloo listens on the interface to it alone.
        bucket_bytes: of one broadcast.
        seconds: for all members to be ready for a bucket.
    """

    def __init__(
        self,
        backend: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        trainer: str = LOOPBACK,
        bucket_bytes: int = BUCKET_BYTES,
        seconds: float = WAIT_SECONDS,
    ) -> None:
        self._backend, self._rank, self._size = backend, rank, size
        self._device = device
        self._trainer = trainer
        self._bucket_bytes = bucket_bytes
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
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device))  # NCCL connects now

    def _meet(self, seconds: float) -> None:
        """Wait until all members are here.

        torch's backends cannot be told to stop waiting for a member, even when the process exits.
        Members that have met wait for each other no longer than a transfer takes.
        """
        self._meetings += 1
        here = [f"{rank} at {self._meetings}" for rank in range(self._size)]
        self._store.set(here[self._rank], "")
        self._store.delete_key(f"{self._rank} at {self._meetings - 2}")  # all have left it
        deadline = time.monotonic() + seconds
        while True:
            # The store raises if the trainer's process is gone.
            if self._aborted or self._store.check([GIVEN_UP]):
                self._store.set(GIVEN_UP, "")
                raise RuntimeError("the broadcast of weights was aborted")
            if self._store.check(here):
                return
            if time.monotonic() > deadline:
                self._store.set(GIVEN_UP, "")
                missing = [rank for rank, key in enumerate(here) if not self._store.check([key])]
                raise TimeoutError(
                    f"weight_sync_backend={self._backend}: ranks {missing} of {self._size} (0: the "
                    f"trainer) were not ready for new weights within {seconds:g} s"
                )
            time.sleep(POLL_SECONDS)

    def send(self, infos: Iterable[TensorInfo], tensors: Mapping[str, torch.Tensor]) -> None:
        """Broadcast tensors to the workers; blocks until all have received them.

        Args:
            infos: of `tensor_infos`.
            tensors: by name, of any device; not to be changed meanwhile.

        Raises:
            TimeoutError: the workers do not receive.
            RuntimeError: a worker is gone, or the group was aborted.
        """
        for bucket in _buckets(infos, self._bucket_bytes):
            data, views = self._allocated(bucket)
            for name, view in views:
                view.copy_(tensors[name].detach())
            self._broadcast(data)

    def receive(self, infos: Iterable[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the trainer sends, in its order.

        A bucket's memory is not used again: vLLM holds tensors until their layer is complete.

        Raises:
            TimeoutError: the trainer does not send. RuntimeError: it is gone.
        """
        for bucket in _buckets(infos, self._bucket_bytes):
            data, views = self._allocated(bucket)
            self._broadcast(data)
            yield from views

    def abort(self) -> None:
        """Make this member's pending and later calls fail soon; from any thread."""
        self._aborted = True

    def _allocated(
        self, bucket: Sequence[TensorInfo]
    ) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
        """Return memory for a bucket, and the tensors in it by name."""
        data = torch.empty(sum(map(_num_bytes, bucket)), dtype=torch.uint8, device=self._device)
        views, start = [], 0
        for info in bucket:
            name, dtype, shape = info
            wanted = getattr(torch, dtype)
            size = torch.Size(shape).numel() * wanted.itemsize
            views.append((name, data[start : start + size].view(wanted).view(shape)))
            start += _num_bytes(info)
        return data, views

    def _broadcast(self, data: torch.Tensor) -> None:
        if not data.numel():
            return
        self._meet(self._seconds)
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


def _num_bytes(info: TensorInfo) -> int:
    """Return the bytes of a tensor in a bucket: the next one is aligned."""
    _, dtype, shape = info
    size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    return int(size + -size % ALIGNMENT)


def _buckets(infos: Iterable[TensorInfo], most_bytes: int) -> Iterator[list[TensorInfo]]:
    """Yield the tensors in order, in parts of at most `most_bytes`, or of one tensor."""
    bucket: list[TensorInfo] = []
    total = 0
    for info in infos:
        size = _num_bytes(info)
        if bucket and total + size > most_bytes:
            yield bucket
            bucket, total = [], 0
        bucket.append(info)
        total += size
    if bucket:
        yield bucket
