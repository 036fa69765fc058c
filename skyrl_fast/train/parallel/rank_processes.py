"""Processes of the other ranks: start, supervision, and exit without orphans.

Each process creates the same models from the same settings and follows rank 0 (`ranks.py`). Who
starts them is a `RankStarter`: `local_ranks.py` on this machine, `ray_ranks.py` on a Ray cluster.
Where a run resumes they first read its checkpoint, each a part, to verify it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from skyrl_fast.rollout.engine.ray_engine import EngineBundle
from skyrl_fast.system.network_interface import interface_to
from skyrl_fast.train.checkpoint.manifest import digest_pieces
from skyrl_fast.train.parallel.ranks import SINGLE_RANK, RankError, Ranks
from skyrl_fast.train.parallel.shared_files import SharedFiles

logger = logging.getLogger(__name__)

START_SECONDS = 300.0  # for the other processes to finish their imports
STOP_SECONDS = 30.0  # for them to exit by themselves
HANG_SECONDS = 60.0  # for a collective of rank 0 to fail after another rank has exited
WATCH_SECONDS = 0.5  # between checks whether rank 0 waits
EXIT_SECONDS = 0.1  # between checks whether another rank has exited
NO_TIMEOUT = timedelta(days=365)
INTERFACE = "GLOO_SOCKET_IFNAME"


class RankProcess(Protocol):
    """The process of another rank."""

    def exit_message(self) -> str | None:
        """Return which rank has exited and why, or None while it runs."""

    def join(self, seconds: float) -> None:
        """Wait for its exit, at most for some time."""

    def kill(self) -> None:
        """End it at once, and wait for that."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """What a rank needs to know to join the others.

    Args:
        rank, size: number of this rank, and number of ranks.
        address, port: of rank 0's store.
        gpu: index among the process's visible GPUs; None: it computes on the CPU.
    """

    rank: int
    size: int
    address: str
    port: int
    gpu: int | None


class RankStarter(Protocol):
    """Starts the processes of the other ranks."""

    @property
    def address(self) -> str:
        """The address of this process that the others reach; nothing listens on another one."""

    @property
    def engine_bundles(self) -> Sequence[EngineBundle]:
        """Where the run's engines are started; none: in this process, or elsewhere.

        Those colocated with ranks are known once the ranks have started.
        """

    @property
    def num_gpus(self) -> int | None:
        """GPUs of this node that the run has; None: those that this process sees."""

    def start(self, size: int, port: int, *, cuda: bool) -> Sequence[RankProcess]:
        """Start ranks 1 to size - 1; each calls `follow`."""


@contextlib.contextmanager
def start_ranks(
    size: int, make_models: Callable[[Ranks], object], *, cuda: bool, starter: RankStarter
) -> Iterator[Ranks]:
    """Yield the `Ranks` of rank 0 among `size` processes; the others exit with the block.

    Args:
        make_models: called by every other rank before it follows; importable by name. Rank 0 calls
            the same function inside the block.
        cuda: each rank computes on a GPU; False: all compute on the CPU.

    Raises:
        ValueError: fewer GPUs than ranks.
        RankError: a process did not start, or this process is already in a process group.
    """
    processes = RankProcesses(starter, cuda=cuda)
    with contextlib.closing(processes), processes.connect(size, make_models) as ranks:
        yield ranks


class RankProcesses:
    """The processes of the other ranks, which start when they are first needed.

    Before they connect they have rank 0's store and no process group: a run that is refused until
    then leaves nothing behind in this process.

    Args:
        starter: starts them.
        cuda: each rank computes on a GPU; False: all compute on the CPU.
    """

    def __init__(self, starter: RankStarter, *, cuda: bool) -> None:
        self.starter = starter
        self._cuda = cuda
        self._store: Any = None
        self._port = 0
        self._processes: Sequence[RankProcess] = ()
        self._num_orders = 0

    def digest_pieces(
        self, size: int, folder: Path, sizes: Mapping[str, int]
    ) -> Iterable[bytes | str]:
        """Return what `manifest.digest_pieces` yields, of which each of `size` ranks reads a part.

        Raises:
            RankError: a process has exited, or did not start.
        """
        if size == 1:
            return digest_pieces(folder, sizes)
        self._start(size)
        order = self._send(partial(_digest_part, folder, sizes))
        found = _digest_part(folder, sizes, 0, size)
        answers = []
        for rank in range(1, size):
            answers.append(_answer(order, rank))
        what = "the ranks did not verify the checkpoint"
        _wait_for(self._store, answers, self._processes, what=what)
        for answer in answers:
            found += pickle.loads(self._store.get(answer))
        return found

    @contextlib.contextmanager
    def connect(self, size: int, make_models: Callable[[Ranks], object]) -> Iterator[Ranks]:
        """Yield the `Ranks` of rank 0; the others exit with the block; see `start_ranks`."""
        if size == 1:
            yield SINGLE_RANK
            return
        self._start(size)
        self._send(_Models(make_models))
        ending = threading.Event()
        try:
            ranks = Ranks(0, size)
            arguments = (ranks, self._processes, ending)
            threading.Thread(target=_watch, args=arguments, name="ranks", daemon=True).start()
            gpu = 0 if self._cuda else None
            place = RankPlace(0, size, self.starter.address, self._port, gpu)
            # Waits for the others, even if they have exited by now.
            _connect(ranks, self._store, place)
            yield ranks
            ending.set()
            if ranks.release():
                ranks.files.close()
                dist.destroy_process_group()
                for process in self._processes:
                    # They exit by themselves after the release; then they are killed.
                    process.join(STOP_SECONDS)
        finally:
            ending.set()
            self.close()
            if dist.is_initialized() and not self._cuda:
                # On GPUs this would wait for exited ranks.
                dist.destroy_process_group()

    def close(self) -> None:
        """End the processes, and wait for that."""
        for process in self._processes:
            process.kill()

    def _start(self, size: int) -> None:
        """Start the processes unless they run, and wait until all have finished their imports."""
        if self._store is None:
            self._listen()
            self._processes = self.starter.start(size, self._port, cuda=self._cuda)
        assert size == len(self._processes) + 1
        ready = [_ready(rank) for rank in range(1, size)]
        what = "the ranks did not start"
        _wait_for(self._store, ready, self._processes, what=what, seconds=START_SECONDS)

    def _listen(self) -> None:
        if dist.is_initialized():
            raise RankError(
                "trainer.placement: this process is already in a torch.distributed process group, "
                "of torchrun or of a failed run: start the run in a new process of its own"
            )
        address = self.starter.address
        # torch's own listener would accept connections on every interface
        listener = socket.create_server((address, 0))
        self._port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            address,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def _send(self, order: Callable[[int, int], object] | _Models) -> int:
        """Let the others execute an order, whose results `_answer` names; return its number."""
        number = self._num_orders
        self._num_orders += 1
        self._store.set(_order(number), pickle.dumps(order))
        return number


@dataclass(frozen=True, slots=True)
class _Models:
    """The last order: connect, make these models, and follow rank 0."""

    make: Callable[[Ranks], object]


def follow(place: RankPlace) -> None:
    """On another rank: execute rank 0's orders and calls until it releases this one."""
    store: Any = dist.TCPStore(place.address, place.port)
    # Rank 0 then waits in collectives only for ranks that have finished their imports.
    store.set(_ready(place.rank), "1")
    for number in itertools.count():
        # Without a timeout: rank 0 loads data and plans the memory meanwhile.
        store.wait([_order(number)], NO_TIMEOUT)
        sent = store.get(_order(number))
        order = pickle.loads(sent)
        if isinstance(order, _Models):
            break
        answer = order(place.rank, place.size)
        store.set(_answer(number, place.rank), pickle.dumps(answer))
    ranks = Ranks(place.rank, place.size)
    _connect(ranks, store, place)
    models = order.make(ranks)
    ranks.follow()
    ranks.files.close()
    del models
    dist.destroy_process_group()


def _digest_part(folder: Path, sizes: Mapping[str, int], rank: int, size: int) -> list[bytes | str]:
    found: list[bytes | str] = []
    for digest in digest_pieces(folder, sizes, rank=rank, size=size):
        if isinstance(digest, str):
            found.append(f"{digest} (rank {rank})")
        else:
            found.append(digest)
    return found


def _connect(ranks: Ranks, store: Any, place: RankPlace) -> None:
    cuda = place.gpu is not None
    if cuda:
        # Before NCCL is initialised, which takes the current device.
        torch.cuda.set_device(place.gpu)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    with _listening_next_to(place.address):
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)
        # Groups of their own: collectives of one group must not be interleaved by threads.
        # Without a timeout: between two calls rollouts may take arbitrarily long.
        messages, files = (dist.new_group(backend="gloo", timeout=NO_TIMEOUT) for _ in range(2))
        mesh = dist.init_device_mesh("cuda" if cuda else "cpu", (ranks.size,))
    SharedFiles(ranks, files)
    ranks.connect(messages, mesh)


@contextlib.contextmanager
def _listening_next_to(address: str) -> Iterator[None]:
    """Make gloo listen on the interface to rank 0 alone, unless GLOO_SOCKET_IFNAME is set."""
    before = os.environ.get(INTERFACE)
    os.environ.setdefault(INTERFACE, interface_to(address))
    try:
        yield
    finally:
        if before is None:
            del os.environ[INTERFACE]


def _wait_for(
    store: Any,
    keys: Sequence[str],
    processes: Sequence[RankProcess],
    *,
    what: str,
    seconds: float = math.inf,
) -> None:
    """Wait until others have set keys of the store; RankError if one has exited, or is late."""
    deadline = time.monotonic() + seconds
    while True:
        dead = [message for process in processes if (message := process.exit_message())]
        if dead:
            raise RankError(f"trainer.placement: {what}: {dead[0]}")
        if store.check(keys):
            return
        if time.monotonic() > deadline:
            raise RankError(f"trainer.placement: {what}: no answer in {seconds:.0f} s")
        time.sleep(0.05)


def _watch(ranks: Ranks, processes: Sequence[RankProcess], ending: threading.Event) -> None:
    """Report that a rank has exited; exit this process if it keeps waiting for that rank."""
    dead: list[str] = []
    while not dead:
        if ending.wait(EXIT_SECONDS):
            return
        dead = [message for process in processes if (message := process.exit_message())]
    if ending.is_set():
        return
    ranks.fail(dead[0])
    logger.error("%s", dead[0])
    since = time.monotonic()
    while not ending.wait(WATCH_SECONDS):
        if not ranks.is_waiting:  # its next call raises
            since = time.monotonic()
        elif time.monotonic() - since > HANG_SECONDS:  # collectives on a GPU wait forever
            logger.error("rank 0 still waits for it: exiting; the last checkpoint is complete")
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(1)


def _ready(rank: int) -> str:
    return f"ready/{rank}"


def _order(number: int) -> str:
    return f"order/{number}"


def _answer(number: int, rank: int) -> str:
    return f"answer/{number}/{rank}"
