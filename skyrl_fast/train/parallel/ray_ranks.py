"""Ranks on the nodes of a Ray cluster: an actor each, in the placement group of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_fast.rollout.engine.ray_engine import EngineBundle, enter
from skyrl_fast.train.parallel.rank_processes import RankPlace, follow


@dataclass(frozen=True, slots=True)
class RayRanks:
    """Starts ranks as actors; rank r is in bundle r // per_node of the placement group.

    Args:
        group: a placement group with a bundle per node, in whose bundle 0 this process is an actor.
    """

    group: Any
    per_node: int
    engine_bundles: Sequence[EngineBundle] = ()

    @property
    def address(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())

    def start(self, size: int, port: int, *, cuda: bool) -> Sequence[RayRank]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        follower = ray.remote(_Follower)
        address = self.address
        started = []
        for rank in range(1, size):
            actor = follower.options(
                name=None,
                num_cpus=1,
                num_gpus=int(cuda),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=rank // self.per_node
                ),
            ).remote(os.getcwd())
            # Ray makes an actor's own GPU its only visible one.
            place = RankPlace(rank, size, address, port, 0 if cuda else None)
            # `follow` does not return before the run ends, so its result tells that the rank has.
            started.append(RayRank(rank, actor, actor.follow.remote(place)))
        return started


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

    def follow(self, place: RankPlace) -> None:
        follow(place)
