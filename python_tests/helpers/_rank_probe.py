"""Probes of rank processes; without models, whose imports every process would repeat."""

import os
import threading
import time
from typing import Any

from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks


class Probe:
    """Reports which ranks take part in a call and what is sent; `fault_on` raises on one rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        ranks.register(self)

    @run_on_all_ranks
    def processes(self) -> list[int]:
        return self.ranks.gather([os.getpid()])

    @run_on_all_ranks
    def echo(self, value: Any, *, of: Any = None) -> list[Any]:
        return self.ranks.gather([(self.ranks.rank, value, of is self)])

    @run_on_all_ranks
    def fault_on(self, rank: int) -> None:
        if self.ranks.rank == rank:
            raise ValueError(f"a fault of rank {rank}")
        self.ranks.gather([0])

    @run_on_all_ranks
    def nested(self) -> list[int]:
        return self.processes()


def with_a_thread(ranks: Ranks) -> Probe:
    """Return a probe; other ranks start a thread that Python would join at exit."""
    if ranks.rank > 0:
        threading.Thread(target=time.sleep, args=(60,)).start()
    return Probe(ranks)


def fail(ranks: Ranks) -> None:
    """Fail to build the models on the other ranks."""
    if ranks.rank > 0:
        raise ValueError("no such model here")
