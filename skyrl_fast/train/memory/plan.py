"""A run's memory per GPU, before anything is loaded: a sum, what exceeds it, and what to set.

`parts.py` says what each part takes, `remedies.py` what to change where the sum is too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from skyrl_fast.config import Config, ConfigError
from skyrl_fast.config.features import check_features
from skyrl_fast.config.modes import EnginePlace
from skyrl_fast.config.settings import OptimizerConfig
from skyrl_fast.train.memory.device_plan import DevicePlan, Item, MemoryPlan
from skyrl_fast.train.memory.gpus import HERE, Gpus
from skyrl_fast.train.memory.measurements import Measurements
from skyrl_fast.train.memory.parts import (
    ASLEEP_BYTES,
    CONTEXT_BYTES,
    RECEIVED_BUCKETS,
    SENT_BUCKETS,
    all_weights,
    broadcast_bytes,
    cpu_engine_items,
    dtype_of,
    engine_item,
    engine_weight_bytes,
    handed_over_item,
    host_bytes,
    largest_update,
    offloaded_bytes,
    planned_device,
    probe_item,
    resident_items,
    resident_moments,
    returning_item,
    row_length,
    spare_bytes,
    total_bytes,
)
from skyrl_fast.train.memory.remedies import (
    MAX_GPUS,
    axes_of,
    find_remedies,
    with_settings,
)
from skyrl_fast.train.parallel.sequence_ranks import check_heads
from skyrl_fast.train.placement import (
    EnginePlacement,
    draw_nodes,
    engine_placement,
    rank_choices,
)


def gpu_memory(config: Config, *, with_engine: bool = True, gpus: Gpus = HERE) -> int | None:
    """Return the bytes of the smallest GPU that the trainer or its engine uses; None without one.

    Raises:
        ValueError: the engine cannot be placed.
    """
    used = _find_used_gpus(config, gpus, with_engine)
    return min((gpus.sizes[gpu] for gpu in used), default=None)


def memory_in_use(config: Config, *, with_engine: bool = True, gpus: Gpus = HERE) -> int:
    """Return the bytes of each such GPU that are not free before the run, at most; 0 without one.

    Of other processes, a display, and this process's CUDA contexts; what torch's allocator holds
    here counts as free. On GPUs of several sizes it is the largest share, of the smallest GPU.
    """
    sizes = gpus.sizes
    used = _find_used_gpus(config, gpus, with_engine)
    if not used:
        return 0
    shares = []
    for gpu in used:
        in_use = max(0, sizes[gpu] - gpus.free_bytes(gpu))
        shares.append(in_use / sizes[gpu])
    smallest = min(sizes[gpu] for gpu in used)
    return math.ceil(max(shares) * smallest)


def _find_used_gpus(config: Config, gpus: Gpus, with_engine: bool) -> list[int]:
    """Return the numbers of the GPUs that the trainer or its engine uses."""
    num_gpus = len(gpus.sizes)
    if num_gpus == 0:
        return []
    used = set(range(config.trainer.placement.ranks_per_node))
    if with_engine and config.engine_place.is_here:
        used |= set(engine_placement(config, num_gpus).gpu_ids)
    return [gpu for gpu in sorted(used) if gpu < num_gpus]


def plan_memory(
    config: Config,
    *,
    capacity: int,
    in_use: int = 0,
    num_gpus: int | None = None,
    with_engine: bool = True,
    measurements: Measurements | None = None,
) -> MemoryPlan:
    """Return the memory plan of a run on GPUs, or with `trainer.device=cpu` in main memory.

    Args:
        config: checked settings; of the models only config.json is read.
        capacity: bytes of each GPU, or of the main memory.
        in_use: those of each GPU that others use.
        num_gpus: GPUs of the machine, of which at least those of the trainer are assumed.
        with_engine: False: nothing is sampled by vLLM, whatever the settings.
        measurements: of earlier plans, which share them; None: models are measured.

    Raises:
        ValueError: a model's config cannot be read, the engine cannot be placed, or the ranks of a
            long row cannot share the policy's heads.
        UnmeasurableError: a model's code does not run on fake tensors.
    """
    return _Planner(capacity, in_use, num_gpus, with_engine, measurements).plan(config)


def settle_ranks(
    config: Config,
    *,
    capacity: int,
    in_use: int = 0,
    num_gpus: int,
    with_engine: bool = True,
) -> None:
    """Set `policy_num_gpus_per_node` in place where it is null: the first choice that fits.

    Where none does, it is the one with the most ranks; without a GPU, 1. Arguments are those of
    `plan_memory`.

    Raises:
        ConfigError: so many ranks exclude another setting.
        ValueError: as of `plan_memory`.
    """
    placement = config.trainer.placement
    if placement.policy_num_gpus_per_node is not None:
        return
    if planned_device(config).type == "cpu":
        placement.policy_num_gpus_per_node = placement.ranks_per_node
        return
    planner = _Planner(capacity, in_use, num_gpus, with_engine)
    for ranks in rank_choices(config, num_gpus, with_engine=with_engine):
        placement.policy_num_gpus_per_node = ranks
        if planner.plan(config).fits:
            break
    check_features(config)


def plan_with_remedies(
    config: Config,
    *,
    capacity: int,
    in_use: int = 0,
    num_gpus: int | None = None,
    with_engine: bool = True,
    measurements: Measurements | None = None,
) -> MemoryPlan:
    """Return the plan as `plan_memory` does; where it does not fit, with settings that would.

    They are looked for among hundreds of plans, which takes seconds.

    Args:
        num_gpus: no more are proposed; None: unknown, at most MAX_GPUS are proposed.
        measurements: of earlier plans, which share them; None: models are measured.
    """
    planner = _Planner(capacity, in_use, num_gpus, with_engine, measurements)
    plan = planner.plan(config)
    if plan.fits:
        return plan
    given = config.trainer.placement.ranks_per_node
    if num_gpus is None:
        max_gpus = MAX_GPUS
    else:
        max_gpus = max(num_gpus, given)
    remedies = find_remedies(
        config,
        list(axes_of(config, with_engine, max_gpus)),
        partial(planner.plan_changed, config),
        is_on_gpus=planned_device(config).type == "cuda",
    )
    return replace(planner.plan_as_set(config), remedies=remedies)


class _Planner:
    """Plans settings on one machine; each model is measured once."""

    def __init__(
        self,
        capacity: int,
        in_use: int,
        num_gpus: int | None,
        with_engine: bool,
        measurements: Measurements | None = None,
    ) -> None:
        self._capacity = capacity
        self._in_use = in_use
        self._num_gpus = num_gpus or 1
        self._with_engine = with_engine
        self._measure = measurements or Measurements()

    def plan(self, config: Config, *, with_activations: bool = True) -> MemoryPlan:
        """Return the plan; without activations, which take long to measure, a lower bound of it.

        Where weights and moments on the GPUs do not fit, and settings leave it open, weights,
        moments, or both are offloaded: the first that fits.
        """
        best = self.plan_as_set(config, with_activations=with_activations)
        if planned_device(config).type == "cpu":
            return best
        moments = bool(_open_offloads(config))
        weights = self._with_engine and _may_offload_weights(config, self._gpus_of(config))
        choices = ((False, weights), (moments, False), (moments, weights))
        for with_moments, with_weights in choices:
            if best.fits:
                break
            if not (with_moments or with_weights):
                continue
            offloaded = replace(config, trainer=deepcopy(config.trainer))
            if with_moments:
                offload_moments(offloaded)
            if with_weights:
                offloaded.trainer.placement.offload_weights = True
            other = self.plan_as_set(offloaded, with_activations=with_activations)
            if other.lacking_bytes < best.lacking_bytes:
                best = replace(other, offloads_moments=with_moments, offloads_weights=with_weights)
        return best

    def _gpus_of(self, config: Config) -> int:
        return max(self._num_gpus, config.trainer.placement.ranks_per_node)

    def plan_as_set(self, config: Config, *, with_activations: bool = True) -> MemoryPlan:
        """Return the plan with all moments on the GPUs that the settings do not offload."""
        if with_activations:
            measure = self._measure
        else:
            measure = self._measure.without_activations()
        local = self._with_engine and config.engine_place.is_here
        if planned_device(config).type == "cpu":
            return _plan_main_memory(_with_dtypes_of_cpu(config), measure, self._capacity, local)
        gpus = self._gpus_of(config)
        policy = config.trainer.policy
        text = measure.config(str(policy.model.path)).get_text_config()
        check_heads(text, policy.sequence_parallel_size)
        if local:
            engine = engine_placement(config, gpus)
        else:
            engine = None
        by = config.generator.inference_engine.weight_sync_backend
        is_on_cluster = self._with_engine and config.engine_place is EnginePlace.CLUSTER
        on_cluster = is_on_cluster and by in ("auto", "nccl")
        make = partial(
            _plan, config, measure, self._capacity, in_use=self._in_use, on_cluster=on_cluster
        )
        plan = make(engine)
        if engine is None or by != "auto" or plan.fits or not _reads_ranks(config, engine):
            return plan
        by_file = make(replace(engine, weight_sync="file"))
        if by_file.lacking_bytes < plan.lacking_bytes:
            return replace(by_file, sends_files=True)
        return plan

    def plan_changed(
        self, config: Config, settings: dict[str, Any], *, with_activations: bool = True
    ) -> MemoryPlan | None:
        """Return the plan with settings changed; None where they exclude each other."""
        changed = with_settings(config, settings)
        shared = changed.trainer.policy.sequence_parallel_size
        if changed.trainer.placement.num_ranks % shared:
            return None
        # A micro-batch that is smaller than a row has the row all the same.
        budget = settings.get("trainer.max_tokens_per_microbatch")
        if budget is not None and budget * shared < row_length(changed):
            return None
        try:
            check_features(changed)
            return self.plan(changed, with_activations=with_activations)
        except ValueError:  # such as ipc with an adapter
            return None


def _open_offloads(config: Config) -> list[OptimizerConfig]:
    """Return the optimizers whose settings leave it open whether moments are in main memory."""
    trainer = config.trainer
    optimizers = [trainer.policy.optimizer_config]
    if trainer.critic.model.path is not None:
        optimizers.append(trainer.critic.optimizer_config)
    return [one for one in optimizers if one.offload_after_step is None]


def offload_moments(config: Config) -> None:
    """Decide in place what the settings leave open, as a plan with `offloads_moments` has it."""
    for optimizer in _open_offloads(config):
        optimizer.offload_after_step = True


def _may_offload_weights(config: Config, num_gpus: int) -> bool:
    """Return whether the settings leave it open that weights leave the GPUs to engines."""
    if config.trainer.placement.offload_weights is not None:
        return False
    open_as_set = with_settings(config, {"trainer.placement.offload_weights": True})
    try:
        check_features(open_as_set)
        engine_placement(open_as_set, num_gpus)
    except ConfigError:
        return False
    return config.engine_place.is_here and not config.trains_adapter


def _plan(
    config: Config,
    measure: Measurements,
    capacity: int,
    engine: EnginePlacement | None,
    *,
    in_use: int,
    on_cluster: bool,
) -> MemoryPlan:
    if in_use:
        before = [Item("in use before the run", in_use)]
    else:
        before = []
    size = measure.policy_size(config)
    resident = resident_items(config, measure)
    trainer = [*resident, *largest_update(config, measure)]
    placement = config.trainer.placement
    if config.spreads_engines:  # the nodes are alike
        ranks = range(placement.ranks_per_node)
    else:
        ranks = range(placement.num_ranks)
    bucket = broadcast_bytes(config, size)
    sent = Item("buckets of weights that are broadcast", SENT_BUCKETS * bucket)
    if engine is None:
        if on_cluster:
            trainer = [*trainer, sent]
        alone = (*_devices(ranks, [*before, *trainer], capacity),)
        drawing = draw_nodes(config, None)
        host = offloaded_bytes(config, size)
        return MemoryPlan(alone, None, host, *spare_bytes(config, measure, alone), drawing=drawing)
    context = Item("engine: CUDA context", CONTEXT_BYTES)
    reads_ranks = _reads_ranks(config, engine)
    if reads_ranks:
        sent = replace(sent, name="buckets of weights for engines")
    if engine.weight_sync == "nccl" or reads_ranks:
        received = RECEIVED_BUCKETS * bucket
        context = Item("engine: CUDA context, buckets", CONTEXT_BYTES + received)
        trainer = [sent, *trainer]
    readers = _reader_items(engine, ranks=placement.num_ranks)
    staying = [sent] if reads_ranks else []  # on the trainer's GPU
    if not engine.shared:
        trainer = [*readers, *trainer]
    # On the engine's fullest GPU.
    if engine.shared:
        together = [*trainer, *readers, context]
    else:
        together = [context]
    offloads = engine.sleeps and config.offloads_base(EnginePlace.HERE_ASLEEP)
    if engine.sleeps:
        several = config.spreads_engines or len(engine.engines) > 1
        if several and placement.num_ranks > 1:
            next_to_generation = returning_item(config, size)
        else:
            next_to_generation = probe_item(config, size)
        together = [*resident, next_to_generation, *staying, *readers, context]
    if offloads:  # the probe's side of the trainer is computed before the engine wakes up
        _, *others = resident
        together = [*others, Item("trainer: CUDA context", CONTEXT_BYTES), *readers, context]
    leaves = engine.sleeps and config.offloads_weights(EnginePlace.HERE_ASLEEP)
    if leaves:
        stay = resident_moments(config, measure)
        with_context = [*stay, Item("trainer: CUDA context", CONTEXT_BYTES)]
        together = [*with_context, *staying, *readers, context]
    used = total_bytes([*before, *together])
    part, share = engine_item(config, size, len(engine.engines[0]), capacity, used)
    shared = engine.shared
    phase = ", generation" if engine.sleeps else ""
    of_trainer = [gpu for gpu in ranks if gpu not in shared]
    of_engine = [gpu for gpu in engine.gpu_ids if gpu not in ranks]
    devices = [
        *_devices(shared, [*before, *together, part], capacity, phase),
        *_devices(of_trainer, [*before, *trainer], capacity),
        *_devices(of_engine, [*before, context, part], capacity),
    ]
    if engine.sleeps:
        asleep = Item("sleeping engine: CUDA context and graphs", ASLEEP_BYTES)
        update = [*before, *trainer, *readers, asleep]
        devices = [*_devices(shared, update, capacity, ", update"), *devices]
        if leaves and config.trainer.placement.num_ranks > 1:
            # Gathered on the GPUs; the engine allocates its weights meanwhile.
            gpus_of_engine = len(engine.engines[0])
            engine_bytes = math.ceil(engine_weight_bytes(config, size) / gpus_of_engine)
            loaded = Item("engine: weights", engine_bytes)
            probe = probe_item(config, size)
            both = [*before, *resident, probe, *staying, *readers, context, loaded]
            if reads_ranks:
                both.append(handed_over_item(config, size))
            devices += _devices(shared, both, capacity, ", hand-over")
    updates = []
    for device in devices:
        if trainer[-1] in device.items:
            updates.append(device)
    host = host_bytes(config, size, engine)
    if offloads:
        dtype = dtype_of(config.trainer.policy.dtype)
        host += dtype.itemsize * size.frozen_parameters
    if leaves:
        of_rank = total_bytes(all_weights(config, measure))
        of_all_ranks = of_rank * placement.num_ranks
        host += math.ceil(of_all_ranks / placement.policy_num_nodes)
    held, logits = spare_bytes(config, measure, updates)
    drawing = draw_nodes(config, engine)
    return MemoryPlan(tuple(devices), share, host, held, logits, drawing=drawing)


def _reads_ranks(config: Config, engine: EnginePlacement) -> bool:
    """Return whether weights go to engines by buckets on the ranks' GPUs."""
    return engine.weight_sync == "ipc" and config.trainer.placement.num_ranks > 1


def _reader_items(engine: EnginePlacement, *, ranks: int) -> list[Item]:
    """Return the contexts on the trainer's GPU of workers that compute on others, and read it.

    With several ranks each worker reads the one on its own GPU.
    """
    if engine.weight_sync == "ipc" and ranks == 1:
        num_readers = sum(gpu != 0 for gpu in engine.gpu_ids)
    else:
        num_readers = 0
    if not num_readers:
        return []
    name = f"engine: CUDA contexts of {num_readers} workers on other GPUs"
    return [Item(name, num_readers * CONTEXT_BYTES)]


def _plan_main_memory(
    config: Config, measure: Measurements, capacity: int, with_engine: bool
) -> MemoryPlan:
    """Return the plan of a run on this machine's processor: its ranks, and its engine."""
    size = measure.policy_size(config)
    ranks = config.trainer.placement.ranks_per_node
    if ranks == 1:
        whose = "trainer"
    else:
        whose = f"{ranks} ranks"
    parts = [*resident_items(config, measure), *largest_update(config, measure)]
    items = []
    for part in parts:
        name = f"{whose}: {part.name}"
        items.append(replace(part, name=name, num_bytes=ranks * part.num_bytes))
    if with_engine:
        items += cpu_engine_items(config, size)
    return MemoryPlan((DevicePlan("main memory", tuple(items), capacity),), None, 0)


def _with_dtypes_of_cpu(config: Config) -> Config:
    """Return the settings with float32 where they leave a dtype to the device."""
    chosen = {
        "trainer.policy.dtype": config.trainer.policy.dtype,
        "generator.inference_engine.model_dtype": config.generator.inference_engine.model_dtype,
    }
    defaults = {}
    for name, dtype in chosen.items():
        if dtype == "auto":
            defaults[name] = "float32"
    return with_settings(config, defaults)


def _devices(
    gpus: Sequence[int], items: Sequence[Item], capacity: int, phase: str = ""
) -> Iterator[DevicePlan]:
    if gpus:
        first = gpus[0]
        last = gpus[-1]
        if len(gpus) == 1:
            name = f"GPU {first}"
        elif list(gpus) == list(range(first, last + 1)):
            name = f"each of GPU {first} to {last}"
        else:
            name = f"each of GPU {', '.join(map(str, gpus))}"
        yield DevicePlan(name + phase, tuple(items), capacity)
