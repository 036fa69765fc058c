"""Ranks on this machine: a process each, whose output goes to `rank_1.log`, ... ."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from skyrl_fast.rollout.engine.ray_engine import EngineBundle
from skyrl_fast.system.log_tail import log_tail
from skyrl_fast.system.network_interface import LOOPBACK
from skyrl_fast.system.parent_watch import children_exit_with_this_process
from skyrl_fast.train.parallel.rank_processes import RankPlace, follow

LOG_LINES = 5  # last lines of a rank's log, shown when it has exited


@dataclass(frozen=True, slots=True)
class LocalRanks:
    """Starts ranks on this machine; rank r computes on the r-th visible GPU."""

    folder: Path
    address: str = LOOPBACK
    engine_bundles: Sequence[EngineBundle] = ()
    num_gpus: int | None = None

    def start(self, size: int, port: int, *, cuda: bool) -> Sequence[LocalRank]:
        if cuda and torch.cuda.device_count() < size:
            raise ValueError(
                "trainer.placement.policy_num_gpus_per_node: wanted at most the GPUs that are "
                f"visible ({torch.cuda.device_count()}), got {size}"
            )
        places = []
        for r in range(1, size):
            places.append(RankPlace(r, size, self.address, port, r if cuda else None))
        logs = [self.folder / f"rank_{place.rank}.log" for place in places]
        spawn = multiprocessing.get_context("spawn")
        ranks = [
            LocalRank(
                spawn.Process(
                    target=_follow,
                    args=(place, log),
                    name=f"rank {place.rank}",
                    daemon=True,
                ),
                log,
            )
            for place, log in zip(places, logs, strict=True)
        ]
        try:
            with children_exit_with_this_process():
                for rank in ranks:
                    rank.process.start()
        except BaseException:
            for rank in ranks:
                rank.kill()
            raise
        return ranks


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A child process."""

    process: BaseProcess
    log: Path

    def exit_message(self) -> str | None:
        code = self.process.exitcode
        if code is None:
            return None
        lines = log_tail(self.log).splitlines()[-LOG_LINES:]
        if lines:
            tail = f", which ends: {' | '.join(lines)}"
        else:
            tail = ""
        return f"{self.process.name} exited with code {code}; its log is {self.log}{tail}"

    def join(self, seconds: float) -> None:
        self.process.join(seconds)

    def kill(self) -> None:
        if self.process.pid is not None:
            self.process.kill()
            self.process.join()


def _follow(place: RankPlace, log: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 decides when to exit
        signal.signal(number, signal.SIG_IGN)
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            # Also what C++ writes, such as NCCL's warnings.
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.enable()  # a crash in C++ names where each thread was
    try:
        follow(place)
    except (
        BaseException
    ):  # at once: finalization would wait for threads, and on a GPU for the others
        traceback.print_exc()
        os._exit(1)
