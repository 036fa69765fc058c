"""Processes of the other ranks: start, supervision, and exit without orphans.

Each process creates the same models from the same settings and follows rank 0 (`ranks.py`). Its
output goes to `rank_1.log`, ... in the run folder.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from skyrl_fast.log_tail import log_tail
from skyrl_fast.parent_watch import children_exit_with_this_process
from skyrl_fast.train.parallel.ranks import SINGLE_RANK, RankError, Ranks

logger = logging.getLogger(__name__)

START_SECONDS = 300.0  # for the other processes to finish their imports
STOP_SECONDS = 30.0  # for them to exit by themselves
HANG_SECONDS = 60.0  # for a collective of rank 0 to fail after another rank has exited
WATCH_SECONDS = 0.5  # between checks whether rank 0 waits
NO_TIMEOUT = timedelta(days=365)
LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
LOG_LINES = 5  # of a rank's log, shown in the error when it has exited


@contextlib.contextmanager
def started_ranks(
    size: int, make_models: Callable[[Ranks], object], *, cuda: bool, folder: Path
) -> Iterator[Ranks]:
    """Yield the `Ranks` of rank 0 among `size` processes; the others exit with the block.

    Args:
        make_models: called by every other rank before it follows; importable by name. Rank 0 calls
            the same function inside the block.
        cuda: rank r computes on the r-th visible GPU; False: all compute on the CPU.
        folder: for the logs.

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
    if cuda and torch.cuda.device_count() < size:
        raise ValueError(
            f"trainer.placement.policy_num_gpus_per_node: wanted at most the GPUs that are visible "
            f"({torch.cuda.device_count()}), got {size}"
        )
    listener = socket.create_server((LOOPBACK, 0))  # torch's listener would accept other machines
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        *(LOOPBACK, port),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(
            target=_follow,
            args=(rank, size, port, cuda, _log(folder, rank), make_models),
            name=f"rank {rank}",
            daemon=True,
        )
        for rank in range(1, size)
    ]
    ending = threading.Event()
    try:
        with children_exit_with_this_process():
            for process in processes:
                process.start()
        _wait_for_all(store, processes, folder)
        ranks = Ranks(0, size)
        watch = (ranks, processes, folder, ending)
        threading.Thread(target=_watch, args=watch, name="ranks", daemon=True).start()
        _connect(ranks, store, cuda)  # waits for the others, even if they have exited by now
        yield ranks
        ending.set()
        if ranks.release():
            dist.destroy_process_group()
            for process in processes:
                process.join(STOP_SECONDS)
    finally:
        ending.set()
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
        if dist.is_initialized() and not cuda:  # on GPUs this would wait for exited ranks
            dist.destroy_process_group()


def _connect(ranks: Ranks, store: Any, cuda: bool) -> None:
    if cuda:
        torch.cuda.set_device(ranks.rank)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    with _on_loopback():
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)
        messages = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
        mesh = dist.init_device_mesh("cuda" if cuda else "cpu", (ranks.size,))
    ranks.connect(messages, mesh)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make gloo listen on the loopback interface only, unless GLOO_SOCKET_IFNAME is set."""
    before = os.environ.get(INTERFACE)
    os.environ.setdefault(INTERFACE, "lo")
    try:
        yield
    finally:
        if before is None:
            del os.environ[INTERFACE]


def _wait_for_all(store: Any, processes: Sequence[BaseProcess], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not store.check([_ready(rank + 1) for rank in range(len(processes))]):
        dead = [process for process in processes if process.exitcode is not None]
        if dead or time.monotonic() > deadline:
            what = _exit_message(dead[0], folder) if dead else f"no answer in {START_SECONDS:.0f} s"
            raise RankError(f"trainer.placement: the ranks did not start: {what}")
        time.sleep(0.05)


def _watch(
    ranks: Ranks, processes: Sequence[BaseProcess], folder: Path, ending: threading.Event
) -> None:
    """Report that a rank has exited; exit this process if it keeps waiting for that rank."""
    ended = wait([process.sentinel for process in processes])
    if ending.is_set():
        return
    process = next(process for process in processes if process.sentinel in ended)
    process.join()
    reason = _exit_message(process, folder)
    ranks.fail(reason)
    logger.error("%s", reason)
    since = time.monotonic()
    while not ending.wait(WATCH_SECONDS):
        if not ranks.is_waiting:  # its next call raises
            since = time.monotonic()
        elif time.monotonic() - since > HANG_SECONDS:  # collectives on a GPU wait forever
            logger.error("rank 0 still waits for it: exiting; the last checkpoint is complete")
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(1)


def _exit_message(process: BaseProcess, folder: Path) -> str:
    log = _log(folder, int(process.name.removeprefix("rank ")))
    lines = log_tail(log).splitlines()[-LOG_LINES:]
    tail = f", which ends: {' | '.join(lines)}" if lines else ""
    return f"{process.name} exited with code {process.exitcode}; its log is {log}{tail}"


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def _ready(rank: int) -> str:
    return f"ready/{rank}"


def _follow(
    rank: int,
    size: int,
    port: int,
    cuda: bool,
    log: Path,
    make_models: Callable[[Ranks], object],
) -> None:
    """Run the process of another rank: create the models and follow rank 0."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 decides when to exit
        signal.signal(number, signal.SIG_IGN)
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    try:
        store = dist.TCPStore(LOOPBACK, port)
        store.set(_ready(rank), "1")
        ranks = Ranks(rank, size)
        _connect(ranks, store, cuda)
        models = make_models(ranks)
        ranks.follow()
        del models
        dist.destroy_process_group()
    except (
        BaseException
    ):  # at once: finalization would wait for threads, and on a GPU for the others
        traceback.print_exc()
        os._exit(1)
