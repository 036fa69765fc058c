"""Processes of the other ranks: start, supervision, and exit without orphans.

Each process creates the same models from the same settings and follows rank 0 (`ranks.py`). Who
starts them is a `RankStarter`: `local_ranks.py` on this machine, `ray_ranks.py` on a Ray cluster.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from skyrl_fast.rollout.engine.ray_engine import EngineBundle
from skyrl_fast.system.network_interface import interface_to
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

        Those beside ranks are known once the ranks have started.
        """

    @property
    def num_gpus(self) -> int | None:
        """GPUs of this node that the run has; None: those that this process sees."""

    def start(
        self, size: int, port: int, make_models: Callable[[Ranks], object], *, cuda: bool
    ) -> Sequence[RankProcess]:
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
    if size == 1:
        yield SINGLE_RANK
        return
    if dist.is_initialized():
        raise RankError(
            "trainer.placement: this process is already in a torch.distributed process group, "
            "of torchrun or of a failed run: start the run in a new process of its own"
        )
    # torch's own listener would accept connections on every interface
    listener = socket.create_server((starter.address, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        starter.address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    ending = threading.Event()
    processes: Sequence[RankProcess] = ()
    try:
        processes = starter.start(size, port, make_models, cuda=cuda)
        _wait_for_all(store, processes)
        ranks = Ranks(0, size)
        threading.Thread(
            target=_watch, args=(ranks, processes, ending), name="ranks", daemon=True
        ).start()
        place = RankPlace(0, size, starter.address, port, 0 if cuda else None)
        _connect(ranks, store, place)  # waits for the others, even if they have exited by now
        yield ranks
        ending.set()
        if ranks.release():
            ranks.files.close()
            dist.destroy_process_group()
            for process in processes:
                # They exit by themselves after the release; then they are killed.
                process.join(STOP_SECONDS)
    finally:
        ending.set()
        for process in processes:
            process.kill()
        if dist.is_initialized() and not cuda:  # on GPUs this would wait for exited ranks
            dist.destroy_process_group()


def follow(place: RankPlace, make_models: Callable[[Ranks], object]) -> None:
    """On another rank: create the models and execute rank 0's calls until it releases this one."""
    store = dist.TCPStore(place.address, place.port)
    # Rank 0 then waits in collectives only for ranks that have finished their imports.
    store.set(_ready(place.rank), "1")
    ranks = Ranks(place.rank, place.size)
    _connect(ranks, store, place)
    models = make_models(ranks)
    ranks.follow()
    ranks.files.close()
    del models
    dist.destroy_process_group()


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


def _wait_for_all(store: Any, processes: Sequence[RankProcess]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not store.check([_ready(rank + 1) for rank in range(len(processes))]):
        dead = [message for process in processes if (message := process.exit_message())]
        if dead or time.monotonic() > deadline:
            if dead:
                what = dead[0]
            else:
                what = f"no answer in {START_SECONDS:.0f} s"
            raise RankError(f"trainer.placement: the ranks did not start: {what}")
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
