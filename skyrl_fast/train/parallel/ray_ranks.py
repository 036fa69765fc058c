"""Ranks on the nodes of a Ray cluster: an actor each, in the placement group of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_fast.rollout.engine.ray_engine import EngineBundle, enter, reserved_gpus
from skyrl_fast.train.parallel.rank_processes import RankPlace, follow


@dataclass(frozen=True, slots=True)
class EnginesOfNode:
    """The engines of each node, colocated with its ranks.

    Args:
        gpus: of each engine, by their numbers on a node, whose first ones have ranks.
        cpus: that an engine reserves.
        num_gpus: GPUs of a node that the run may use; None: it computes on CPUs.
    """

    gpus: tuple[tuple[int, ...], ...]
    cpus: float
    num_gpus: int | None

    def resources(self, per_node: int) -> dict[str, float]:
        """Return what they reserve of a node with so many ranks: its GPUs without a rank."""
        spare = {gpu for engine in self.gpus for gpu in engine if gpu >= per_node}
        return {"CPU": len(self.gpus) * self.cpus, "GPU": float(len(spare))}


@dataclass(frozen=True, slots=True)
class RayRanks:
    """Starts ranks as actors; rank r is in bundle r // per_node of the placement group.

    Args:
        group: a placement group with a bundle per node, in whose bundle 0 this process is an actor.
        bundles: of engines on GPUs of their own.
        engines: those in the ranks' bundles; None: there are none.
    """

    group: Any
    per_node: int
    bundles: Sequence[EngineBundle] = ()
    engines: EnginesOfNode | None = None
    _gpus: list[Any] = field(default_factory=list)  # pending ids of the others' GPUs, by rank

    @property
    def address(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())

    @property
    def num_gpus(self) -> int | None:
        if self.engines is None:
            return None
        return self.engines.num_gpus

    @property
    def engine_bundles(self) -> Sequence[EngineBundle]:
        if self.engines is None:
            return self.bundles
        import ray

        gpus = [reserved_gpus(), *ray.get(self._gpus)]
        return colocated_bundles(self.group, self.engines, self.per_node, gpus)

    def start(self, size: int, port: int, *, cuda: bool) -> Sequence[RayRank]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        follower = ray.remote(_Follower)
        address = self.address
        started = []
        for rank in range(1, size):
            node = rank // self.per_node
            actor = follower.options(
                name=None,
                num_cpus=1,
                num_gpus=min(1, self.group.bundle_specs[node].get("GPU", 0)),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=node
                ),
            ).remote(os.getcwd())
            self._gpus.append(actor.gpus.remote())
            # Ray makes an actor's own GPU its only visible one.
            place = RankPlace(rank, size, address, port, 0 if cuda else None)
            # `follow` does not return before the run ends, so its result tells that the rank has.
            following = actor.follow.remote(place)
            started.append(RayRank(rank, actor, following))
        return started


def colocated_bundles(
    group: Any, engines: EnginesOfNode, per_node: int, gpus: Sequence[Sequence[str]]
) -> list[EngineBundle]:
    """Return where the engines of all nodes run: a node's engines after another's.

    Args:
        group: of the ranks, with a bundle per node.
        per_node: ranks of a node.
        gpus: ids of the GPUs that each rank has reserved, by rank; none without GPUs.
    """
    bundles = []
    for node in range(len(gpus) // per_node):
        of_ranks = gpus[node * per_node : (node + 1) * per_node]
        for numbers in engines.gpus:
            shared: list[str] = []
            spare = 0
            for number in numbers:
                if number < per_node:
                    shared += of_ranks[number]
                else:
                    spare += 1
            resources = {"CPU": engines.cpus, "GPU": float(spare)}
            bundles.append(EngineBundle(group, node, resources, tuple(shared)))
    return bundles


@dataclass(frozen=True, slots=True)
class RayRank:
    """An actor that follows rank 0.

    Args:
        following: the pending result of `follow`.
    """

    rank: int
    actor: Any
    following: Any

    def exit_message(self) -> str | None:
        import ray

        if not ray.wait([self.following], timeout=0)[0]:
            return None
        try:
            ray.get(self.following)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            return f"rank {self.rank} has ended: {type(cause).__name__}: {cause}"
        return f"rank {self.rank} has ended"

    def join(self, seconds: float) -> None:
        import ray

        ray.wait([self.following], timeout=seconds)

    def kill(self) -> None:
        import ray

        ray.kill(self.actor)


class _Follower:
    def __init__(self, folder: str) -> None:
        enter(folder)

    def gpus(self) -> list[str]:
        return reserved_gpus()

    def follow(self, place: RankPlace) -> None:
        follow(place)
