"""A run whose ranks are on several nodes: rank 0 is a Ray actor too, watched from here.

The process that calls `train` needs no GPU. It reserves the nodes, starts rank 0 there, forwards
signals, and starts the run again from its newest checkpoint after a process or a node was lost.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_fast.config import Config
from skyrl_fast.train.flow.event_loop import StopSignals
from skyrl_fast.train.output.checkpoint import checkpoints
from skyrl_fast.train.parallel.rank_processes import RankStarter
from skyrl_fast.train.parallel.ranks import RankError
from skyrl_fast.train.parallel.ray_ranks import RayRanks

logger = logging.getLogger(__name__)

PLACE_SECONDS = 120.0  # for the nodes to be reserved; a lost one may come back in the meantime
POLL_SECONDS = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM)

RunHere = Callable[[Config, StopSignals, RankStarter], Any]


class ClusterError(RuntimeError):
    """Ray is missing, the cluster has too few nodes, or it lost them without any progress."""


def run_on_cluster(config: Config, run_here: RunHere, checkpoint_folder: Path) -> Any:
    """Return the result of `run_here`, called in an actor on the first of the run's nodes.

    A lost process or node ends the attempt; the next one resumes from the newest checkpoint, on
    fewer nodes if the cluster has no more. Two attempts without a new checkpoint between them end
    the run.

    Args:
        run_here: picklable; gets the settings, the signals to stop by, and who starts the ranks.

    Raises:
        ClusterError: Ray is missing, or too few nodes have the CPUs or GPUs.
        Whatever `run_here` raises.
    """
    ray = _ray()
    with _connected(ray):
        placement = config.trainer.placement
        nodes, failed_at = placement.policy_num_nodes, -1
        while True:
            group, nodes = _reserved(ray, nodes, placement.policy_num_gpus_per_node)
            try:
                return _attempt(ray, group, _on_nodes(config, nodes), run_here)
            except _lost(ray) as error:
                steps = [step for step, _ in checkpoints(checkpoint_folder)]
                newest = max(steps, default=0)
                if newest <= failed_at:
                    raise
                logger.error("%s; the run starts again from step %d", _reason(error), newest)
                failed_at, config = newest, _resumed(config)
            finally:
                ray.util.remove_placement_group(group)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            "trainer.placement.policy_num_nodes: several nodes need Ray: pip install "
            "'skyrl_fast[ray]', and `ray start` on each node"
        ) from error
    return ray


@contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS, else of this machine, else start one."""
    if ray.is_initialized():
        yield
        return
    ray.init()
    try:
        yield
    finally:
        ray.shutdown()


def _reserved(ray: Any, nodes: int, per_node: int) -> tuple[Any, int]:
    """Return a placement group with a bundle on each of at most so many nodes, and their number."""
    bundle = {"CPU": float(per_node)}
    if ray.cluster_resources().get("GPU", 0):
        bundle["GPU"] = float(per_node)
    for count in range(nodes, 0, -1):
        group = ray.util.placement_group([bundle] * count, strategy="STRICT_SPREAD")
        if group.wait(PLACE_SECONDS):
            return group, count
        ray.util.remove_placement_group(group)
        logger.warning(
            "trainer.placement: no %d nodes with %s free in %.0f s", count, bundle, PLACE_SECONDS
        )
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    raise ClusterError(f"trainer.placement: wanted nodes with {bundle} free, got {alive}")


def _on_nodes(config: Config, nodes: int) -> Config:
    placement = replace(config.trainer.placement, policy_num_nodes=nodes)
    return replace(config, trainer=replace(config.trainer, placement=placement))


def _resumed(config: Config) -> Config:
    return replace(config, trainer=replace(config.trainer, resume_mode="latest"))


def _attempt(ray: Any, group: Any, config: Config, run_here: RunHere) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    gpus = min(1, group.bundle_specs[0].get("GPU", 0))
    actor = (
        ray.remote(_RankZero)
        .options(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy, max_concurrency=2)
        .remote()
    )
    try:
        running = actor.run.remote(config, run_here, group)
        with _forwarded_signals(actor):
            while not ray.wait([running], timeout=POLL_SECONDS)[0]:
                pass
        try:
            return ray.get(running)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
    finally:
        ray.kill(actor)


@contextmanager
def _forwarded_signals(actor: Any) -> Iterator[None]:
    """Let the first signal stop the run with a checkpoint; the second one ends this process."""

    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield
        return

    def forward(number: int, _frame: Any) -> None:
        for other, handler in before.items():
            signal.signal(other, handler)
        actor.stop.remote(number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _lost(ray: Any) -> tuple[type[BaseException], ...]:
    return RankError, ray.exceptions.RayActorError, ray.exceptions.NodeDiedError


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


class _RankZero:
    def __init__(self) -> None:
        self._signals = StopSignals()

    def run(self, config: Config, run_here: RunHere, group: Any) -> Any:
        per_node = config.trainer.placement.policy_num_gpus_per_node
        return run_here(config, self._signals, RayRanks(group, per_node))

    def stop(self, number: int) -> None:
        self._signals.forward(number)
