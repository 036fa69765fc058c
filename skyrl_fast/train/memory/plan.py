"""A run's memory per GPU, before anything is loaded: a sum, what exceeds it, and what to set.

Weights, gradients and moments follow from the model's config; activations are measured on fake
tensors (`activation_memory`). What FSDP2, the CUDA context and the engine need is estimated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from skyrl_fast.config import Config, ConfigError, policy_loss_spec
from skyrl_fast.config.features import check_features
from skyrl_fast.config.modes import EnginePlace, EngineWeights
from skyrl_fast.config.settings import LoraConfig, OptimizerConfig, max_response_length
from skyrl_fast.ops.logprob.linear_rows import COLUMN_MULTIPLE, default_chunk_rows
from skyrl_fast.rollout.engine.vllm_start import CPU_CACHE_GIB, CPU_CACHE_VARIABLE
from skyrl_fast.rollout.engine.weights.buckets import BUCKET_BYTES
from skyrl_fast.rollout.engine.weights.receipt import dtype_name
from skyrl_fast.train.memory.activations import (
    FLOAT32_BYTES,
    ActivationMemory,
    FakeBackbones,
    ModelSize,
    PassMemory,
    activation_memory,
    load_model_config,
    model_size,
)
from skyrl_fast.train.memory.device_plan import GIB, DevicePlan, Item, MemoryPlan
from skyrl_fast.train.memory.gpus import HERE, Gpus
from skyrl_fast.train.memory.remedies import (
    ENGINE,
    PLACEMENT,
    SERVER,
    SHORTER,
    Axis,
    find_remedies,
    one_setting,
    with_settings,
)
from skyrl_fast.train.model.loading import recomputes_activations
from skyrl_fast.train.parallel.sequence_ranks import check_heads
from skyrl_fast.train.placement import (
    EnginePlacement,
    draw_nodes,
    engine_placement,
    rank_choices,
)

WEIGHT_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8  # per parameter; AdamW has two moments
BLOCK_VALUES = 256  # block of torchao's 8-bit moments, which share a float32 scale
# FSDP2 gathers a layer's weights, and reduces its gradients, through buffers of the same size, for
# one layer while the next one arrives. Weights outside the layers stay gathered during a pass, and
# their gradients are reduced at its end, when the activations are freed.
LAYER_BYTES, ROOT_BYTES = 12, 8  # per gathered parameter: weights, gradients, a layer's buffer
GATHERED_LAYERS = 2
CONTEXT_BYTES = GIB  # a process's CUDA context and libraries
# Memory of a process without a GPU, as measured for a trainer and an engine of a tiny model.
CPU_TRAINER_BYTES = 800 << 20
CPU_ENGINE_BYTES = 900 << 20
# Buckets of a broadcast that exist at a time: one on its way, and one being packed; one being
# received, one being loaded, and one of whose layer not all was loaded.
SENT_BUCKETS = 2
RECEIVED_BUCKETS = 3
ASLEEP_BYTES = 2 * GIB  # memory of a sleeping engine: its context, CUDA graphs, libraries
# Share of activations: blocks that the caching allocator cannot reuse, and the holes of a CPU's
# heap, which were measured as 0.03 to 0.6.
FRAGMENTATION = 0.1
CPU_FRAGMENTATION = 0.3
ENGINE_LIMIT = 0.9  # largest share that is computed for the engine; vLLM's default
ENGINE_SLACK = 2 * GIB  # within its share: CUDA graphs, activations of a step
LOGIT_COPIES = 4  # float32 logits of one engine step: sorted, their probabilities, ...
MAX_GPUS = 8  # to propose


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
    if _device(config).type == "cpu":
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
        list(_axes(config, with_engine, max_gpus)),
        partial(planner.plan_changed, config),
        is_on_gpus=_device(config).type == "cuda",
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
        if _device(config).type == "cpu":
            return best
        moments = bool(_open_offloads(config))
        weights = self._with_engine and _may_offload_weights(config)
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

    def plan_as_set(self, config: Config, *, with_activations: bool = True) -> MemoryPlan:
        """Return the plan with all moments on the GPUs that the settings do not offload."""
        if with_activations:
            measure = self._measure
        else:
            measure = self._measure.without_activations()
        local = self._with_engine and config.engine_place.is_here
        if _device(config).type == "cpu":
            return _plan_main_memory(_with_dtypes_of_cpu(config), measure, self._capacity, local)
        gpus = max(self._num_gpus, config.trainer.placement.ranks_per_node)
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
        if budget is not None and budget * shared < _row_length(changed):
            return None
        try:
            return self.plan(changed, with_activations=with_activations)
        except ValueError:  # such as ipc with several GPUs
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


def _may_offload_weights(config: Config) -> bool:
    """Return whether the settings leave it open that weights leave the GPUs to engines."""
    if config.trainer.placement.offload_weights is not None:
        return False
    open_as_set = with_settings(config, {"trainer.placement.offload_weights": True})
    try:
        check_features(open_as_set)
    except ConfigError:
        return False
    can_sleep = config.generator.inference_engine.enable_sleep_mode is not False
    return config.engine_place.is_here and can_sleep and not config.trains_adapter


@dataclass(slots=True)
class Measurements:
    """Sizes and activations by model, each measured once; plans of one process may share them.

    Models are told apart by their path, and their config.json is read once.
    """

    _configs: dict[str, Any] = field(default_factory=dict)
    _sizes: dict[tuple[str, str], ModelSize] = field(default_factory=dict)
    _activations: dict[tuple[Any, ...], ActivationMemory] = field(default_factory=dict)
    _backbones: FakeBackbones = field(default_factory=FakeBackbones)

    def config(self, path: str) -> Any:
        if path not in self._configs:
            self._configs[path] = load_model_config(path)
        return self._configs[path]

    def size(self, path: str, lora: LoraConfig | None = None) -> ModelSize:
        key = path, repr(lora)
        if key not in self._sizes:
            self._sizes[key] = model_size(self.config(path), lora)
        return self._sizes[key]

    def policy_size(self, config: Config) -> ModelSize:
        path = str(config.trainer.policy.model.path)
        return self.size(path, _lora(config))

    def activations(self, path: str, length: int, **options: Any) -> ActivationMemory:
        key = (path, length, *map(repr, options.values()))
        if key not in self._activations:
            self._activations[key] = activation_memory(
                self.config(path), length, backbones=self._backbones, **options
            )
        return self._activations[key]

    def without_activations(self) -> Measurements:
        """Return the same sizes, with activations of 0 bytes."""
        return _SizesOnly(self._configs, self._sizes)


class _SizesOnly(Measurements):
    def activations(self, path: str, length: int, **options: Any) -> ActivationMemory:
        return ActivationMemory(PassMemory(0, 0), PassMemory(0, 0))


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
    resident = _resident_items(config, measure)
    trainer = [*resident, *_largest_update(config, measure)]
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
        host = _offloaded_bytes(config, size)
        return MemoryPlan(alone, None, host, *_spare_bytes(config, measure, alone), drawing=drawing)
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
        together = [*resident, _probe_item(config, size), *staying, *readers, context]
    if offloads:  # the probe's side of the trainer is computed before the engine wakes up
        _, *others = resident
        together = [*others, Item("trainer: CUDA context", CONTEXT_BYTES), *readers, context]
    leaves = engine.sleeps and config.offloads_weights(EnginePlace.HERE_ASLEEP)
    if leaves:
        stay = _resident_moments(config, measure)
        with_context = [*stay, Item("trainer: CUDA context", CONTEXT_BYTES)]
        together = [*with_context, *staying, *readers, context]
    used = _total([*before, *together])
    part, share = _engine_item(config, size, len(engine.engines[0]), capacity, used)
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
            engine_bytes = math.ceil(_engine_weight_bytes(config, size) / gpus_of_engine)
            loaded = Item("engine: weights", engine_bytes)
            probe = _probe_item(config, size)
            both = [*before, *resident, probe, *staying, *readers, context, loaded]
            if reads_ranks:
                both.append(_gathered_item(config, size))
            devices += _devices(shared, both, capacity, ", hand-over")
    updates = []
    for device in devices:
        if trainer[-1] in device.items:
            updates.append(device)
    host = _host_bytes(config, size, engine)
    if offloads:
        dtype = _dtype(config.trainer.policy.dtype)
        host += dtype.itemsize * size.frozen_parameters
    if leaves:
        of_rank = _total(_all_weights(config, measure))
        of_all_ranks = of_rank * placement.num_ranks
        host += math.ceil(of_all_ranks / placement.policy_num_nodes)
    held, logits = _spare_bytes(config, measure, updates)
    drawing = draw_nodes(config, engine)
    return MemoryPlan(tuple(devices), share, host, held, logits, drawing=drawing)


def _reads_ranks(config: Config, engine: EnginePlacement) -> bool:
    """Return whether weights go to engines by buckets on the ranks' GPUs."""
    return engine.weight_sync == "ipc" and config.trainer.placement.num_ranks > 1


def _gathered_item(config: Config, size: ModelSize) -> Item:
    """Return a layer as the engine gets it, and the largest weight in float32."""
    item = _dtype(config.engine_dtype).itemsize
    largest = FLOAT32_BYTES * size.vocab_size * size.hidden_size
    return Item("a layer that is handed over", item * size.layer_parameters + largest)


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
    parts = [*_resident_items(config, measure), *_largest_update(config, measure)]
    items = []
    for part in parts:
        name = f"{whose}: {part.name}"
        items.append(replace(part, name=name, num_bytes=ranks * part.num_bytes))
    if with_engine:
        items += _cpu_engine_items(config, size)
    return MemoryPlan((DevicePlan("main memory", tuple(items), capacity),), None, 0)


def _cpu_engine_items(config: Config, size: ModelSize) -> Iterator[Item]:
    item = _dtype(config.engine_dtype).itemsize
    if config.trains_adapter:
        base = size.frozen_parameters
    else:
        base = size.parameters
    number = config.num_engines
    whose = "engine" if number == 1 else f"{number} engines"
    yield Item(f"{whose}: libraries", number * CPU_ENGINE_BYTES)
    weights = number * 2 * item * base
    yield Item(f"{whose}: weights, and their copy in the kernels' layout", weights)
    gibs = os.environ.get(CPU_CACHE_VARIABLE, CPU_CACHE_GIB)
    cache = number * round(float(gibs) * GIB)
    yield Item(f"{whose}: KV cache ({CPU_CACHE_VARIABLE})", cache)
    logits = FLOAT32_BYTES * config.generator.inference_engine.max_num_seqs * size.vocab_size
    by_seqs = ("generator.inference_engine.max_num_seqs",)
    yield Item(f"{whose}: logits", number * LOGIT_COPIES * logits, by_seqs)
    one_rank = config.trainer.placement.num_ranks == 1
    in_memory = one_rank and number == 1 and not config.trains_adapter
    if not in_memory and config.engine_weights is not EngineWeights.ADAPTER:
        yield Item("weights for the engine, and their file", 2 * item * base)


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


def _device(config: Config) -> torch.device:
    """Return the kind of device that is planned for: GPUs, unless the settings name the CPU."""
    return torch.device("cpu" if config.trainer.device == "cpu" else "cuda")


def _host_bytes(config: Config, size: ModelSize, engine: EnginePlacement) -> int:
    """Return the main memory of a file's weights, and of those of a sleeping engine."""
    item = _dtype(config.engine_dtype).itemsize
    sends_adapter = config.engine_weights is EngineWeights.ADAPTER
    sent = size.trained_parameters if sends_adapter else size.parameters
    parameters = 0
    if engine.weight_sync == "file":  # a copy in this process, and the file in shared memory
        parameters += 2 * sent
    if engine.sleeps:
        parameters += len(engine.engines) * size.parameters
    return item * parameters + _offloaded_bytes(config, size)


def _offloaded_bytes(config: Config, size: ModelSize) -> int:
    """Return the main memory of the policy's moments that leave the GPUs of a machine."""
    optimizer = config.trainer.policy.optimizer_config
    if not optimizer.offload_after_step:
        return 0
    share = size.trained_parameters / config.trainer.placement.policy_num_nodes
    return math.ceil(share * moment_bytes(optimizer))


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


def _total(items: Iterable[Item]) -> int:
    return sum(item.num_bytes for item in items)


def _share_bytes(config: Config, name: str, parameters: int, each: float) -> Item:
    """Return a part of `each` bytes a parameter, of which every rank has its share."""
    by_gpus = ("trainer.placement.policy_num_gpus_per_node",)
    num_ranks = config.trainer.placement.num_ranks
    return Item(name, math.ceil(parameters * each / num_ranks), by_gpus)


def _resident_items(config: Config, measure: Measurements) -> list[Item]:
    """Return what a rank holds throughout: the policy's weights and moments come first."""
    weights = _all_weights(config, measure)
    moments = _resident_moments(config, measure)
    number = len(_weight_items(config, measure.policy_size(config)))
    return [*weights[:number], *moments, *weights[number:]]


def _all_weights(config: Config, measure: Measurements) -> list[Item]:
    """Return a rank's weights of the policy, then those of the other models."""
    trainer = config.trainer
    algorithm = config.trainer.algorithm
    policy = str(trainer.policy.model.path)
    size = measure.policy_size(config)
    items = _weight_items(config, size)
    if (algorithm.use_kl_loss or algorithm.use_kl_in_reward) and not config.shares_reference:
        reference = measure.size(trainer.ref.model.path or policy).parameters
        items.append(_share_bytes(config, "reference model", reference, WEIGHT_BYTES))
    if trainer.critic.model.path is not None:
        weights = measure.size(trainer.critic.model.path).parameters
        name = "weights"
        if config.shares_critic:
            weights = size.trained_parameters + size.hidden_size
            name = "adapter, head"
        items.append(_share_bytes(config, f"critic's {name}", weights, WEIGHT_BYTES))
    return items


def _resident_moments(config: Config, measure: Measurements) -> list[Item]:
    """Return a rank's moments that stay on its GPU between steps."""
    trainer = config.trainer
    size = measure.policy_size(config)
    items = []
    if not trainer.policy.optimizer_config.offload_after_step:
        items.append(_moments_item(config, "", size.trained_parameters))
    path = trainer.critic.model.path
    if path is not None and not trainer.critic.optimizer_config.offload_after_step:
        parameters = measure.size(path).parameters
        if config.shares_critic:
            parameters = size.trained_parameters + size.hidden_size
        items.append(_moments_item(config, "critic's ", parameters))
    return items


def _moments_item(config: Config, whose: str, parameters: int) -> Item:
    trainer = config.trainer
    model = trainer.critic if whose else trainer.policy
    each = moment_bytes(model.optimizer_config)
    return _share_bytes(config, f"{whose}AdamW's moments", parameters, each)


def moment_bytes(config: OptimizerConfig) -> float:
    """Return the bytes of AdamW's moments, per parameter."""
    if config.optimizer == "adamw":
        return MOMENT_BYTES
    return 2 * (1 + FLOAT32_BYTES / BLOCK_VALUES)


def _weight_items(config: Config, size: ModelSize) -> list[Item]:
    """Return the policy's weights on one GPU; those below an adapter are frozen."""
    if not config.trains_adapter:
        return [_share_bytes(config, "weights, float32", size.parameters, WEIGHT_BYTES)]
    dtype = _dtype(config.trainer.policy.dtype)
    frozen = size.frozen_parameters
    if config.policies:
        kind = f"{len(config.policies)} adapters"
    else:
        kind = "adapter"
    return [
        _share_bytes(config, f"frozen weights, {dtype_name(dtype)}", frozen, dtype.itemsize),
        _share_bytes(config, f"{kind}, float32", size.trained_parameters, WEIGHT_BYTES),
    ]


def _lora(config: Config) -> LoraConfig | None:
    if config.trains_adapter:
        return config.trainer.policy.model.lora
    return None


def _largest_update(config: Config, measure: Measurements) -> list[Item]:
    """Return the trainer's further parts on one GPU, at the peak of an update."""
    # Policy and critic are updated one after the other; a critic on the policy's base has the same
    # layers and no LM head.
    trainer = config.trainer
    paths = [str(trainer.policy.model.path)]
    if trainer.critic.model.path is not None and not config.shares_critic:
        paths.append(trainer.critic.model.path)
    updates = []
    for path in paths:
        is_policy = path == paths[0]
        updates.append(_update_items(config, measure, path, is_policy))
    largest = max(updates, key=_total)
    context = CONTEXT_BYTES
    share = FRAGMENTATION
    kind = "CUDA context"
    if _device(config).type == "cpu":
        context = CPU_TRAINER_BYTES
        share = CPU_FRAGMENTATION
        kind = "libraries"
    passes = _total(largest[1:])
    slack = context + math.ceil(share * passes)
    return [*largest, Item(f"{kind}, and blocks that the allocator cannot reuse", slack)]


def _update_items(
    config: Config,
    measure: Measurements,
    path: str,
    is_policy: bool,
) -> list[Item]:
    """Return the parts of the update of policy or critic: gradients first, then activations."""
    trainer = config.trainer
    lora = _lora(config) if is_policy else None
    size = measure.size(path, lora)
    dtype = _dtype(trainer.policy.dtype)
    device = _device(config)
    checkpointing = recomputes_activations(trainer, device)
    length = _row_length(config)
    tokens, by_tokens = _pass_tokens(config, length)
    if trainer.residual_dtype == "auto":
        residual = dtype
    else:
        residual = torch.float32
    memory = measure.activations(
        path,
        length,
        dtype=dtype,
        gradient_checkpointing=checkpointing,
        residual_dtype=residual,
        lora=lora,
        on_gpu=device.type == "cuda",
    )
    whose = "" if is_policy else "critic's "
    items = [_share_bytes(config, f"{whose}gradients", size.trained_parameters, GRADIENT_BYTES)]
    if trainer.placement.num_ranks > 1:
        # A frozen weight has no gradient: it and a layer's buffer, in its own dtype.
        of_layer = LAYER_BYTES
        of_root = ROOT_BYTES
        if lora is not None:
            of_layer = 2 * dtype.itemsize
            of_root = of_layer
        layers = of_layer * GATHERED_LAYERS * size.layer_parameters
        gathered = layers + of_root * size.root_parameters
        items.append(Item(f"{whose}gathered weights and gradients", gathered))
    kind = "with" if checkpointing else "without"
    items.append(
        Item(
            f"{whose}activations of {tokens:,} tokens, {kind} checkpointing",
            memory.saved.of(tokens / length),
            (by_tokens, *(() if checkpointing else ("trainer.gradient_checkpointing",))),
        )
    )
    head = 0
    layer = memory.workspace.of(tokens / length)
    if is_policy:
        options = {"trained": lora is None, "on_gpu": device.type == "cuda"}
        head = head_bytes(size, tokens, _head_dtype(config), **options)
    # One after the other. The embeddings' gradient comes last, when the activations are freed.
    name = "LM head: chunks of logits and gradients" if head > layer else "a layer's backward pass"
    items.append(Item(f"{whose}{name}", max(head, layer), (by_tokens,)))
    model = trainer.policy if is_policy else trainer.critic
    if model.optimizer_config.offload_after_step:
        # They are on the GPU for the step, when what the passes took is free.
        moments = _moments_item(config, whose, size.trained_parameters)
        beyond = max(0, moments.num_bytes - _total(items[1:]))
        name = f"{whose}AdamW's moments in a step, beyond what passes take"
        items.append(replace(moments, name=name, num_bytes=beyond))
    return items


def head_bytes(
    size: ModelSize, tokens: int, dtype: torch.dtype, *, trained: bool = True, on_gpu: bool = True
) -> int:
    """Return the bytes of `linear_logprob`'s backward pass, all tokens trained."""
    vocab = size.vocab_size
    hidden = size.hidden_size
    item = dtype.itemsize
    rows = default_chunk_rows(
        torch.empty(vocab, 1, dtype=dtype, device="meta"), tokens, on_gpu=on_gpu
    )
    by_rows = min(rows, tokens) * vocab
    by_columns = min(COLUMN_MULTIPLE, vocab) * tokens
    logits = max(by_rows, by_columns) * item
    copied = 0 if dtype == torch.float32 else vocab * hidden * item  # copy of the weight
    gradient = vocab * hidden * (item + FLOAT32_BYTES)  # gradient of the weight, then in its dtype
    # Selected and converted hidden states, their float32 gradient and its conversion.
    states = tokens * hidden * 2 * (FLOAT32_BYTES + item)
    # A frozen weight is in the dtype of the product, and has no gradient.
    return logits + states + trained * (copied + gradient)


def _spare_bytes(
    config: Config, measure: Measurements, updates: Iterable[DevicePlan]
) -> tuple[int, int]:
    """Return what is put into the memory that updates leave: held gradients, then saved logits."""
    # The gradients are those of policy or critic, all or none; the logits at most those of all
    # tokens of a pass.
    trainer = config.trainer
    policy = str(trainer.policy.model.path)
    left = min(device.capacity - device.total for device in updates)
    held = 0
    if trainer.placement.num_ranks > 1:
        models = [measure.policy_size(config)]
        if trainer.critic.model.path is not None and not config.shares_critic:
            models.append(measure.size(trainer.critic.model.path))
        held = GRADIENT_BYTES * max(model.trained_parameters for model in models)
    held = held if held <= left else 0
    tokens, _ = _pass_tokens(config, _row_length(config))
    vocab = measure.size(policy).vocab_size
    most = tokens * vocab * _head_dtype(config).itemsize
    spare = math.floor((left - held) / (1 + FRAGMENTATION))
    return held, max(0, min(most, spare))


def _probe_item(config: Config, size: ModelSize) -> Item:
    head = size.vocab_size * size.hidden_size * _head_dtype(config).itemsize
    return Item("CUDA context, the LM head's copy for the probe", CONTEXT_BYTES + head)


def _engine_item(
    config: Config, size: ModelSize, num_gpus: int, capacity: int, used: int
) -> tuple[Item, float]:
    engine = config.generator.inference_engine
    key = "generator.inference_engine.gpu_memory_utilization"
    least = math.ceil(engine_bytes(config, size) / num_gpus)
    chosen = engine.engine_init_kwargs.get("gpu_memory_utilization", engine.gpu_memory_utilization)
    if chosen is None:
        left = max(0, capacity - used)
        percent = math.floor(100 * left / capacity)
        share = min(ENGINE_LIMIT, percent / 100)
        if share * capacity >= least:
            return Item("engine: weights and KV cache", math.floor(share * capacity)), share
        return Item("engine, at least", least), share
    given = math.ceil(chosen * capacity)
    if given >= least:
        item = Item(f"engine: {chosen:.2f} of the GPU", given, (key,))
    else:
        item = Item(f"engine, at least (more than {key}={chosen:g})", least, (key,))
    return item, chosen


def engine_bytes(config: Config, size: ModelSize) -> int:
    """Estimate the least bytes of the engine: weights, the longest sequence's keys and values."""
    engine = config.generator.inference_engine
    item = _dtype(config.engine_dtype).itemsize
    logits = FLOAT32_BYTES * engine.max_num_seqs * size.vocab_size * LOGIT_COPIES
    keys_and_values = item * size.kv_values * _engine_length(config)
    return _engine_weight_bytes(config, size) + keys_and_values + logits + ENGINE_SLACK


def _engine_weight_bytes(config: Config, size: ModelSize) -> int:
    return _dtype(config.engine_dtype).itemsize * size.parameters


def broadcast_bytes(config: Config, size: ModelSize) -> int:
    """Return the bytes of the largest bucket of a broadcast."""
    item = _dtype(config.engine_dtype).itemsize
    # A larger tensor is a bucket by itself; the embedding is the largest of these policies.
    return max(BUCKET_BYTES, item * size.vocab_size * size.hidden_size)


def _dtype(name: str) -> torch.dtype:
    if name == "auto":
        dtype = torch.bfloat16
    else:
        dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _head_dtype(config: Config) -> torch.dtype:
    chosen = config.trainer.policy
    return _dtype(chosen.dtype if chosen.lm_head_dtype == "auto" else chosen.lm_head_dtype)


def _row_length(config: Config) -> int:
    """Return the tokens of the longest row: prompt and response."""
    return config.generator.max_input_length + config.generator.sampling_params.max_generate_length


def _engine_length(config: Config) -> int:
    """Return the engine's `max_model_len`: that of `make_vllm_setup`, or of engine_init_kwargs."""
    chosen = config.generator.inference_engine.engine_init_kwargs.get("max_model_len")
    if isinstance(chosen, int):
        return chosen
    return config.generator.max_input_length + max_response_length(config)


def _pass_tokens(config: Config, length: int) -> tuple[int, str]:
    """Return the most tokens of a pass on a rank, and the setting that they follow from."""
    trainer = config.trainer
    generator = config.generator
    scope = policy_loss_spec(trainer.algorithm).scope
    # Rows of a context that only grows share a sequence.
    grows = generator.context != "retemplate" and not config.agent.is_set
    rows = 1 if grows else generator.turn_limit
    ranks = trainer.policy.sequence_parallel_size  # that share a pass
    prompts = trainer.policy_mini_batch_size
    samples = generator.n_samples_per_prompt
    mini_batch = prompts * samples * rows * length
    if scope == "mini_batch":
        return math.ceil(mini_batch / ranks), "trainer.policy_mini_batch_size"
    together = scope == "sequence" and trainer.algorithm.sequence_scope == "trajectory"
    longest = math.ceil((rows * length if together else length) / ranks)
    if longest > trainer.max_tokens_per_microbatch:
        return longest, "generator.max_input_length"
    # A pass has rows of one mini-batch; a tree of answers has their prompt once.
    if trainer.row_layout == "tree" and grows and generator.turn_limit == 1:
        mini_batch -= prompts * (samples - 1) * config.generator.max_input_length
    if mini_batch < trainer.max_tokens_per_microbatch:
        return mini_batch, "trainer.policy_mini_batch_size"
    return trainer.max_tokens_per_microbatch, "trainer.max_tokens_per_microbatch"


def _axes(config: Config, with_engine: bool, max_gpus: int) -> Iterator[Axis]:
    """Yield what may be changed for a run to fit, in the order in which it is preferred."""
    trainer = config.trainer
    engine = config.generator.inference_engine
    device = _device(config)
    on_gpus = device.type == "cuda"
    if not recomputes_activations(trainer, device):
        values = one_setting("trainer.gradient_checkpointing", [True])
        yield Axis("gradient checkpointing", [*values])
    can_sleep = on_gpus and with_engine and not config.max_staleness
    if can_sleep and engine.enable_sleep_mode is False:
        values = one_setting(f"{ENGINE}.enable_sleep_mode", [None])
        yield Axis("a sleeping engine", [*values])
    if with_engine and engine.gpu_memory_utilization is not None:
        values = one_setting(f"{ENGINE}.gpu_memory_utilization", [None])
        yield Axis("the engine's share", [*values])
    length = _row_length(config)
    budget = trainer.max_tokens_per_microbatch
    # Shorter rows, which are tried last, take smaller micro-batches.
    least = max(1, length // max(SHORTER))
    smaller = []
    for n in range(1, budget.bit_length()):
        if budget >> n >= least:
            smaller.append(budget >> n)
    if smaller:
        values = one_setting("trainer.max_tokens_per_microbatch", smaller)
        yield Axis("smaller micro-batches", [*values])
    is_rounded = _dtype(trainer.policy.dtype) != torch.float32
    if trainer.residual_dtype == "float32" and is_rounded:
        yield Axis("residual_dtype", [*one_setting("trainer.residual_dtype", ["auto"])])
    if on_gpus:
        yield from _axes_of_gpus(config, with_engine, max_gpus)
    if with_engine and config.engine_place is not EnginePlace.SERVERS:
        values = one_setting(f"{ENGINE}.external_server_urls", [[SERVER]])
        yield Axis("engines on servers", [*values], is_last=True)


def _axes_of_gpus(config: Config, with_engine: bool, max_gpus: int) -> Iterator[Axis]:
    trainer = config.trainer
    engine = config.generator.inference_engine
    if trainer.policy.optimizer_config.optimizer == "adamw":
        name = "trainer.policy.optimizer_config.optimizer"
        yield Axis("8-bit moments", [*one_setting(name, ["adamw_8bit"])])
    if trainer.policy.optimizer_config.offload_after_step is False:
        name = "trainer.policy.optimizer_config.offload_after_step"
        yield Axis("moments in main memory", [*one_setting(name, [True])])
    if with_engine and trainer.placement.offload_weights is False:
        values = one_setting("trainer.placement.offload_weights", [True])
        yield Axis("weights in main memory", [*values])
    powers = [n for n in (2, 4, MAX_GPUS) if n <= max_gpus]
    more = [n for n in powers if n > trainer.placement.ranks_per_node]
    if more:
        yield Axis("more GPUs", [*one_setting(PLACEMENT, more)])
    if with_engine and config.engine_place.is_here:
        sizes = [n for n in powers if n > engine.tensor_parallel_size]
        if sizes:
            values = one_setting(f"{ENGINE}.tensor_parallel_size", sizes)
            yield Axis("tensor parallelism of the engine", [*values])
    shared = trainer.policy.sequence_parallel_size
    if _row_length(config) > trainer.max_tokens_per_microbatch * shared:
        nodes = trainer.placement.policy_num_nodes
        most = max_gpus * nodes
        sizes = [n for n in (2, 4, MAX_GPUS) if shared < n <= most]
        if sizes:
            values = one_setting("trainer.policy.sequence_parallel_size", sizes)
            yield Axis("sequence parallelism", [*values])
