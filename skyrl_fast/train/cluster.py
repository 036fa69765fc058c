"""A run on the nodes of a Ray cluster: rank 0 is an actor, too, watched from here.

The process that calls `train_agent` needs no GPU. It reserves nodes, starts rank 0 there, forwards
signals, and starts the run again from its newest checkpoint after a process or a node was lost.

Design: docs/design/020-several-gpus.md.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_fast.config import Config
from skyrl_fast.config.modes import EnginePlace
from skyrl_fast.errors import RunError
from skyrl_fast.rollout.engine.ray_engine import EngineBundle, enter
from skyrl_fast.system.ray_connection import connect_ray, import_ray
from skyrl_fast.train.checkpoint.local import STATE, checkpoints
from skyrl_fast.train.flow.event_loop import StopSignals
from skyrl_fast.train.parallel.rank_processes import RankStarter
from skyrl_fast.train.parallel.ranks import RankError
from skyrl_fast.train.parallel.ray_ranks import EnginesOfNode, RayRanks
from skyrl_fast.train.placement import node_placement

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class ClusterSeconds:
    """How long a run waits for the cluster.

    Args:
        place: for the nodes to be reserved; a lost one may come back in the meantime.
        settle: for Ray to place what fits.
    """

    place: float = 120.0
    settle: float = 5.0


SECONDS = ClusterSeconds()
RunHere = Callable[[Config, StopSignals, RankStarter], Any]


@dataclass(frozen=True, slots=True)
class _Reservation:
    """What an attempt has of the cluster."""

    nodes: int
    ranks: Any  # a placement group with a bundle per node
    engines: tuple[EngineBundle, ...] = ()  # a place may have no node yet
    colocated: EnginesOfNode | None = None  # engines in the bundles of the ranks

    def release(self, ray: Any) -> None:
        for group in {place.group.id: place.group for place in self.engines}.values():
            ray.util.remove_placement_group(group)
        # Ray also ends the processes in a group that is removed.
        ray.util.remove_placement_group(self.ranks)


def run_on_cluster(
    config: Config,
    run_here: RunHere,
    checkpoint_folder: Path,
    *,
    with_engines: bool = False,
    seconds: ClusterSeconds = SECONDS,
) -> Any:
    """Return the result of `run_here`, called in an actor on the first of the run's nodes.

    A lost process or node of the ranks ends the attempt; the next one resumes from the newest
    checkpoint, on fewer nodes if the cluster has no more. Two attempts without a new checkpoint
    between them end the run. Lost engines end no attempt, see `RayEngine`.

    Args:
        run_here: picklable; gets the settings, the signals to stop by, and who starts the ranks.
        with_engines: whether the run has engines, which each node gets room for where they are
            colocated with ranks.
        seconds: how long it waits for nodes.

    Raises:
        RunError: Ray is missing, or too few nodes have the CPUs or GPUs.
        Whatever `run_here` raises.
    """
    ray = _ray()
    with connect_ray(ray) as started_here:
        if started_here:
            seconds = replace(seconds, place=seconds.settle)
        nodes = config.trainer.placement.policy_num_nodes

        def attempt(config: Config) -> Any:
            nonlocal nodes
            colocated = _engines_of_node(ray, config) if with_engines else None
            reserved = _reserve(ray, config, nodes, seconds, colocated)
            nodes = reserved.nodes
            try:
                config_of_attempt = _on_nodes(config, nodes, colocated)
                return _attempt(ray, reserved, config_of_attempt, run_here)
            finally:
                reserved.release(ray)

        return run_attempts(config, attempt, checkpoint_folder, lost=_lost(ray))


def run_attempts(
    config: Config,
    attempt: Callable[[Config], Any],
    checkpoint_folder: Path,
    *,
    lost: tuple[type[BaseException], ...],
) -> Any:
    """Return the result of the first attempt that loses no process and no node.

    Args:
        config: settings of the first attempt; later ones resume from the newest checkpoint.
        attempt: runs with these settings.
        checkpoint_folder: where it writes its checkpoints.
        lost: errors of a lost process or node.

    Raises:
        One of `lost`: two attempts lost something without a new checkpoint between them.
        Whatever else `attempt` raises.
    """
    failed_at = -1
    before = {identity_of(path) for _, path in checkpoints(checkpoint_folder)}
    while True:
        try:
            return attempt(config)
        # Not the run's own errors: those would come again.
        except lost as error:
            saved = checkpoints(checkpoint_folder)
            newest = max((step for step, _ in saved), default=0)
            # No new checkpoint since the last loss: another attempt would likely end the same way.
            if newest <= failed_at:
                raise
            failed_at = newest
            begin = f"step {newest}"
            # Until it has a checkpoint of its own, a run begins with the one that it was given.
            own = {identity_of(path) for _, path in saved} - before
            if config.trainer.resume_mode == "from_path" and not own:
                begin = str(config.trainer.resume_path)
            else:
                config = _resume_latest(config)
            logger.error("%s; the run starts again from %s", _reason(error), begin)


def _ray() -> Any:
    try:
        return import_ray("trainer.placement: several nodes, and colocate_all=false")
    except ValueError as error:
        raise RunError(str(error)) from error


def _engines_of_node(ray: Any, config: Config) -> EnginesOfNode | None:
    """Return the engines of each of several nodes; None: they are elsewhere."""
    if not config.spreads_engines:
        return None
    placement = config.trainer.placement
    sizes = []
    for node in ray.nodes():
        if node["Alive"]:
            sizes.append(int(node["Resources"].get("GPU", 0)))
    sizes.sort(reverse=True)
    num_gpus = None
    if sizes[0] > 0 and config.trainer.device != "cpu":
        # As many as the nodes with most of them have; too few for the ranks are none to reserve.
        least = min(sizes[: placement.policy_num_nodes])
        num_gpus = max(least, placement.ranks_per_node)
    engines = node_placement(config, num_gpus or 0).engines
    cpus = _engine_bundle(ray, config)["CPU"]
    return EnginesOfNode(engines, cpus, num_gpus)


def _reserve(
    ray: Any,
    config: Config,
    nodes: int,
    seconds: ClusterSeconds,
    colocated: EnginesOfNode | None,
) -> _Reservation:
    # Engines are packed on nodes, and ranks placed on what remains, so that an engine shares a node
    # with a rank only if it must. Where not all engines fit, ranks come first and the others wait.
    for count in possible_counts(config, nodes):
        reserved = _reserve_all(ray, config, count, seconds.place, colocated)
        if reserved is None and config.engine_place is EnginePlace.CLUSTER:
            reserved = _reserve_some(ray, config, count, seconds.settle)
        if reserved is not None:
            return reserved
        request = _describe_request(ray, config, count, colocated)
        wanted = f"{request} free within {seconds.place:g} s"
        logger.warning("trainer.placement: no room for %s", wanted)
    # What the cluster has, next to what was asked for.
    alive = []
    for node in ray.nodes():
        if node["Alive"]:
            alive.append(node["Resources"])
    raise RunError(f"trainer.placement: expected room for {wanted}, got nodes with {alive}")


def possible_counts(config: Config, nodes: int) -> Iterator[int]:
    """Yield numbers of nodes with which the run can go on, the largest first."""
    trainer = config.trainer
    yield nodes
    if trainer.policy.optimizer_config.optimizer == "adamw_8bit":
        return  # whose moments are loaded by as many ranks as wrote them
    for count in range(nodes - 1, 0, -1):
        ranks = count * trainer.placement.ranks_per_node
        if ranks % trainer.policy.sequence_parallel_size == 0:
            yield count


def _reserve_all(
    ray: Any, config: Config, nodes: int, seconds: float, colocated: EnginesOfNode | None
) -> _Reservation | None:
    """Reserve nodes and all engines; None if that is not possible in so many seconds."""
    deadline = time.monotonic() + seconds
    engines: tuple[EngineBundle, ...] = ()
    if config.engine_place is EnginePlace.CLUSTER:
        bundles = [_engine_bundle(ray, config)] * config.num_engines
        group = ray.util.placement_group(bundles, strategy="PACK")
        engines = tuple(EngineBundle(group, bundle) for bundle in range(len(bundles)))
    of_nodes = [_rank_bundle(ray, config, colocated)] * nodes
    ranks = ray.util.placement_group(of_nodes, strategy="STRICT_SPREAD")
    reserved = _Reservation(nodes, ranks, engines, colocated)
    groups = [ranks, *(place.group for place in engines[:1])]
    if all(group.wait(max(0.0, deadline - time.monotonic())) for group in groups):
        return reserved
    reserved.release(ray)
    return None


def _reserve_some(ray: Any, config: Config, nodes: int, seconds: float) -> _Reservation | None:
    """Reserve nodes and one engine or more; None if that is not possible in so many seconds."""
    ranks = ray.util.placement_group([_rank_bundle(ray, config)] * nodes, strategy="STRICT_SPREAD")
    reserved = _Reservation(nodes, ranks)
    if ranks.wait(seconds):
        number = config.num_engines
        bundle = _engine_bundle(ray, config)
        groups = []
        for _ in range(number):
            groups.append(ray.util.placement_group([bundle]))
        reserved = replace(reserved, engines=tuple(EngineBundle(group, 0) for group in groups))
        missing = sum(not group.wait(seconds / number) for group in groups)
        if missing < number:
            logger.warning("%d of %d engines wait for a node with %s", missing, number, bundle)
            return reserved
    reserved.release(ray)
    return None


def _rank_bundle(
    ray: Any, config: Config, colocated: EnginesOfNode | None = None
) -> dict[str, float]:
    """Return what a node's ranks reserve, and the engines colocated with them."""
    per_node = config.trainer.placement.ranks_per_node
    bundle = _bundle(ray, per_node, cpus=None)
    if colocated is not None:
        engines = colocated.resources(per_node)
        bundle = {name: number + engines[name] for name, number in bundle.items()}
    return bundle


def _engine_bundle(ray: Any, config: Config) -> dict[str, float]:
    engine = config.generator.inference_engine
    return _bundle(ray, engine.num_gpus, cpus=engine.num_threads)


def _bundle(ray: Any, gpus: int, *, cpus: int | None) -> dict[str, float]:
    """Return GPUs if the cluster has any, and as many CPUs unless another number is given."""
    bundle = {"CPU": float(cpus or gpus)}
    return bundle | ({"GPU": float(gpus)} if ray.cluster_resources().get("GPU", 0) else {})


def _describe_request(ray: Any, config: Config, nodes: int, colocated: EnginesOfNode | None) -> str:
    bundle = _rank_bundle(ray, config, colocated)
    text = f"{'a node' if nodes == 1 else f'{nodes} nodes'} with {bundle}"
    if config.engine_place is EnginePlace.CLUSTER:
        text += f" and an engine with {_engine_bundle(ray, config)}"
    return text


def _on_nodes(config: Config, nodes: int, colocated: EnginesOfNode | None) -> Config:
    """Return the settings of so many nodes, each with its engines; also of one that remains."""
    placement = replace(config.trainer.placement, policy_num_nodes=nodes)
    engine = config.generator.inference_engine
    if colocated is not None:
        engine = replace(engine, num_engines=nodes * len(colocated.gpus))
        if engine.weight_sync_backend == "auto":
            engine.weight_sync_backend = "gloo"
    return replace(
        config,
        trainer=replace(config.trainer, placement=placement),
        generator=replace(config.generator, inference_engine=engine),
    )


def identity_of(checkpoint: Path) -> tuple[str, int, bytes]:
    """Return what tells a checkpoint from an earlier one of its step, which was set aside."""
    state = checkpoint / STATE
    if state.is_file():
        content = state.read_bytes()
    else:
        content = b""
    return str(checkpoint), checkpoint.stat().st_ino, content


def _resume_latest(config: Config) -> Config:
    return replace(config, trainer=replace(config.trainer, resume_mode="latest"))


def _attempt(ray: Any, reserved: _Reservation, config: Config, run_here: RunHere) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(reserved.ranks, placement_group_bundle_index=0)
    gpus = min(1, reserved.ranks.bundle_specs[0].get("GPU", 0))
    actor = (
        ray.remote(_RankZero)
        # Two calls at once: `stop` must reach a run.
        .options(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy, max_concurrency=2)
        .remote(os.getcwd())
    )
    try:
        running = actor.run.remote(config, run_here, reserved)
        with _forward_signals(actor):
            while not ray.wait([running], timeout=POLL_SECONDS)[0]:
                pass
        try:
            return ray.get(running)
        except ray.exceptions.RayTaskError as error:
            # The run's own error, without Ray's report of it.
            raise error.cause from None
    finally:
        # Ray would keep the actor until all references are gone.
        ray.kill(actor)


@contextmanager
def _forward_signals(actor: Any) -> Iterator[None]:
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
    def __init__(self, folder: str) -> None:
        enter(folder)
        self._signals = StopSignals()

    def run(self, config: Config, run_here: RunHere, reserved: _Reservation) -> Any:
        per_node = config.trainer.placement.ranks_per_node
        starter = RayRanks(reserved.ranks, per_node, reserved.engines, reserved.colocated)
        return run_here(config, self._signals, starter)

    def stop(self, number: int) -> None:
        self._signals.forward(number)
