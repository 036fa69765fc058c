"""Probes of rank processes; without models, whose imports every process would repeat."""

import os
import threading
import time
from typing import Any

import torch.distributed as dist

from skyrl_fast.train.parallel.per_rank import PerRank
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
    def parts(self, first: PerRank[Any], common: int, *, last: PerRank[Any]) -> list[Any]:
        """Return the rank and what it has of the arguments, for each rank."""
        return self.ranks.gather([(self.ranks.rank, first.here, common, last.here)])

    @run_on_all_ranks
    def parts_of_all(self, argument: PerRank[Any]) -> list[Any]:
        """Return the parts of all ranks, also of those that share sequences."""
        found: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(found, argument.here)
        return found

    @run_on_all_ranks
    def ranks_of(self, from_each: bool) -> list[int]:
        """Return the ranks whose items are gathered."""
        return self.ranks.gather([self.ranks.rank], from_each=from_each)

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


def sharing_probe(ranks: Ranks) -> Probe:
    """Return a probe of ranks of which each two share sequences."""
    ranks.share_sequences(2)
    return Probe(ranks)


class Unreadable:
    """A value that can be sent, but not received."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def fail(ranks: Ranks) -> None:
    """Fail to build the models on the other ranks."""
    if ranks.rank > 0:
        raise ValueError("no such model here")
