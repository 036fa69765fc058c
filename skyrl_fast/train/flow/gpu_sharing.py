"""Who has the GPUs when: what engines and trainer do before and after an update of the weights.

The order of a step where engines sleep: `begin_update`, the optimizer steps, `before_sync`, and the
engines wake up when they have read `weights` to the end.

Design: docs/design/018-asynchronous.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from skyrl_fast.config import Config
from skyrl_fast.config.modes import EnginePlace
from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.weights.buckets import Bucket, TensorInfo
from skyrl_fast.rollout.engine.weights.tensor_file import StreamedWeights
from skyrl_fast.rollout.engine.weights.transports.rank_ipc import RankBuckets, RankWeights
from skyrl_fast.system.torch_threads import end_torch_threads
from skyrl_fast.train.model.policy import Policy

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class GpuSharing:
    """Engines with memory of their own: nothing makes room for anything."""

    sleeps = False
    sends_first = False  # whether engines that start with the policy's weights get them, too

    async def begin_update(self, policy: Policy) -> None:
        """Give the trainer the GPUs; no trajectory is running."""

    async def before_sync(self, policy: Policy, compute_probe: Callable[[], None]) -> None:
        """Let engines load new weights.

        Args:
            compute_probe: computes the policy's side of the comparison after the sync, and keeps
                it.
        """

    def weights(self, policy: Policy, weights: NamedTensors) -> NamedTensors:
        """Return the weights as they are sent: name and tensor of each."""
        return weights

    def metrics(self, policy: Policy) -> dict[str, float]:
        """Return what an update has moved."""
        return {}


class SleepingEngines(GpuSharing):
    """Engines that free their memory during updates."""

    sleeps = True

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def begin_update(self, policy: Policy) -> None:
        await self._pool.sleep()

    def weights(self, policy: Policy, weights: NamedTensors) -> NamedTensors:
        return ThenMakeRoom(policy.free_cached_memory, weights)


class ThenMakeRoom(Iterable[tuple[str, torch.Tensor]]):
    """Weights that make room each time that they have been read to the end.

    An engine wakes up when all have been read.
    """

    def __init__(self, make_room: Callable[[], None], weights: NamedTensors) -> None:
        self._make_room = make_room
        self._weights = weights

    def infos(self, dtype: torch.dtype | None) -> list[TensorInfo] | None:
        """See `StreamedWeights`."""
        if isinstance(self._weights, StreamedWeights):
            return self._weights.infos(dtype)
        return None

    def share(self, dtype: torch.dtype | None, bucket_bytes: int) -> RankBuckets:
        """See `RankWeights`."""
        assert isinstance(self._weights, RankWeights)
        buckets = self._weights.share(dtype, bucket_bytes)

        def pack() -> Iterator[Bucket]:
            yield from buckets.pack()
            self._make_room()

        return replace(buckets, pack=pack)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights
        self._make_room()


class EnginesInPlaceOfBase(SleepingEngines):
    """Sleeping engines on GPUs that cannot hold both copies of an adapter's base at once."""

    async def begin_update(self, policy: Policy) -> None:
        await super().begin_update(policy)
        await asyncio.to_thread(policy.load_base)

    async def before_sync(self, policy: Policy, compute_probe: Callable[[], None]) -> None:
        # The trainer's copy of the base needs the memory that engines hold.
        await self._pool.sleep()  # at the start of a run they are awake
        await asyncio.to_thread(self._leave_device, policy, compute_probe)

    def _leave_device(self, policy: Policy, compute_probe: Callable[[], None]) -> None:
        policy.load_base()
        try:
            # Now, as the probe is compared when the engine has the GPU's memory.
            compute_probe()
        finally:
            end_torch_threads()
        policy.offload_base()


class EnginesInPlaceOfWeights(SleepingEngines):
    """Sleeping engines on GPUs that cannot hold the models' weights next to keys and values.

    The weights are on the GPUs from the start of an update until all were read for the engines.
    """

    sends_first = True  # they were asleep while the probe was computed

    async def begin_update(self, policy: Policy) -> None:
        await super().begin_update(policy)
        await asyncio.to_thread(policy.load_weights)

    async def before_sync(self, policy: Policy, compute_probe: Callable[[], None]) -> None:
        await self._pool.sleep()  # at the start of a run they are awake
        await asyncio.to_thread(self._compute, policy, compute_probe)

    def _compute(self, policy: Policy, compute_probe: Callable[[], None]) -> None:
        policy.load_weights()
        try:
            compute_probe()
        finally:
            end_torch_threads()
        # Several ranks gather them on the GPUs. One has complete copies in main memory, which may
        # be read more than once.
        if policy.ranks.size == 1:
            policy.offload_weights()

    def weights(self, policy: Policy, weights: NamedTensors) -> NamedTensors:
        def make_room() -> None:
            policy.offload_weights()
            policy.free_cached_memory()

        return ThenMakeRoom(make_room, weights)

    def metrics(self, policy: Policy) -> dict[str, float]:
        return {"sync/offloaded_bytes": float(policy.offloaded_bytes)}


def make_gpu_sharing(config: Config, pool: EnginePool) -> GpuSharing:
    """Return how the engines of a pool and the trainer share GPUs, by the settings."""
    place = config.engine_place
    if place is not EnginePlace.HERE_ASLEEP:
        return GpuSharing()
    if config.offloads_base(place):
        return EnginesInPlaceOfBase(pool)
    if config.offloads_weights(place):
        return EnginesInPlaceOfWeights(pool)
    return SleepingEngines(pool)
