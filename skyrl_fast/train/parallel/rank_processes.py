"""The processes of the other ranks: started, watched, ended, and none left behind.

Each makes the same models from the same settings and follows rank 0 (`ranks.py`). What they print
goes to `rank_1.log`, ... in the run folder.
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

from skyrl_fast.train.parallel.ranks import ALONE, RankError, Ranks

logger = logging.getLogger(__name__)

START_SECONDS = 300.0  # for the other processes to import what they need
STOP_SECONDS = 30.0  # for them to end by themselves
HANG_SECONDS = 60.0  # in which rank 0 notices by itself that another has ended
WATCH_SECONDS = 0.5  # between two looks whether rank 0 waits
PARENT_SECONDS = 1.0  # between two looks whether rank 0 is there
AS_LONG_AS_IT_TAKES = timedelta(days=365)
LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
LOG_LINES = 5  # of a rank's log, shown when it ended


@contextlib.contextmanager
def started_ranks(
    size: int, make_models: Callable[[Ranks], object], *, cuda: bool, folder: Path
) -> Iterator[Ranks]:
    """Yield rank 0's place among `size` processes, the others of which end with the block.

    Args:
        make_models: what every rank makes before it follows; importable by name. Rank 0 makes the
            same, in the block.
        cuda: rank r computes on the r-th visible GPU, else all compute on the CPU.
        folder: of the logs.

    Raises:
        ValueError: fewer GPUs than ranks.
        RankError: a process could not be started, or this one is in a process group already.
    """
    if size == 1:
        yield ALONE
        return
    if dist.is_initialized():
        raise RankError(
            "trainer.placement: this process is in a process group of torch.distributed already, "
            "its own (torchrun?) or that of a run that failed: start the run in a new process, "
            "by itself"
        )
    if cuda and torch.cuda.device_count() < size:
        raise ValueError(
            f"trainer.placement.policy_num_gpus_per_node: wanted at most the GPUs that are visible "
            f"({torch.cuda.device_count()}), got {size}"
        )
    listener = socket.create_server((LOOPBACK, 0))  # torch's own would answer other machines
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
        for process in processes:
            process.start()
        _wait_for_all(store, processes, folder)
        ranks = Ranks(0, size)
        watch = (ranks, processes, folder, ending)
        threading.Thread(target=_watch, args=watch, name="ranks", daemon=True).start()
        _connect(ranks, store, cuda)  # waits for the others, be they gone by now
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
        if dist.is_initialized() and not cuda:  # on GPUs that would wait for those that are gone
            dist.destroy_process_group()


def _connect(ranks: Ranks, store: Any, cuda: bool) -> None:
    if cuda:
        torch.cuda.set_device(ranks.rank)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    with _on_loopback():
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)
        messages = dist.new_group(backend="gloo", timeout=AS_LONG_AS_IT_TAKES)
        mesh = dist.init_device_mesh("cuda" if cuda else "cpu", (ranks.size,))
    ranks.connect(messages, mesh)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Let gloo listen to this machine alone, unless GLOO_SOCKET_IFNAME says otherwise."""
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
            what = _end_of(dead[0], folder) if dead else f"no answer in {START_SECONDS:.0f} s"
            raise RankError(f"trainer.placement: the ranks did not start: {what}")
        time.sleep(0.05)


def _watch(
    ranks: Ranks, processes: Sequence[BaseProcess], folder: Path, ending: threading.Event
) -> None:
    """Say that a rank has ended; end this process where it goes on waiting for it."""
    ended = wait([process.sentinel for process in processes])
    if ending.is_set():
        return
    process = next(process for process in processes if process.sentinel in ended)
    process.join()
    reason = _end_of(process, folder)
    ranks.lose(reason)
    logger.error("%s", reason)
    since = time.monotonic()
    while not ending.wait(WATCH_SECONDS):
        if not ranks.is_waiting:  # its next call raises
            since = time.monotonic()
        elif time.monotonic() - since > HANG_SECONDS:  # as collectives on a GPU do, without end
            logger.error("rank 0 still waits for it: leaving; the last checkpoint is whole")
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(1)


def _end_of(process: BaseProcess, folder: Path) -> str:
    log = _log(folder, int(process.name.removeprefix("rank ")))
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
    said = f", which ends: {' | '.join(lines)}" if lines else ""
    return f"{process.name} ended with exit code {process.exitcode}; its log is {log}{said}"


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
    """What the process of another rank does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when it ends
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    try:
        store = dist.TCPStore(LOOPBACK, port)
        store.set(_ready(rank), "1")
        ranks = Ranks(rank, size)
        _connect(ranks, store, cuda)
        kept = make_models(ranks)
        ranks.follow()
        del kept
        dist.destroy_process_group()
    except BaseException:  # at once: Python's own end waits for threads, and a GPU's for the others
        traceback.print_exc()
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Not by its pipe or by sockets: what it has forked, such as a tool, keeps those open.
    while os.getppid() == parent.pid:
        time.sleep(PARENT_SECONDS)
    os._exit(1)
