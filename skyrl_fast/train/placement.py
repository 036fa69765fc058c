"""Where the run's own engines compute: their GPUs, whether they sleep, how they get new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_fast.config import Config, ConfigError

_KEY = "generator.inference_engine"


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """The GPUs of the run's own engines.

    Args:
        engines: the GPUs of each engine, as torch numbers them; the trainer has the first ones.
        shared: those of them that the trainer uses, too.
        sleeps: whether engines free their memory while the trainer computes.
        weight_sync: "ipc", "nccl", "gloo" or "file".
    """

    engines: tuple[tuple[int, ...], ...]
    shared: tuple[int, ...]
    sleeps: bool
    weight_sync: str

    @property
    def gpu_ids(self) -> tuple[int, ...]:
        """The GPUs of all engines, one engine's after another's."""
        return tuple(gpu for engine in self.engines for gpu in engine)


def engine_placement(config: Config, num_gpus: int) -> EnginePlacement:
    """Return where the run's own engines compute, on a machine with so many GPUs.

    | `num_engines` | `gpu_ids` | engines |
    |---|---|---|
    | null | null | as many as ranks, on GPUs that no rank uses, as far as there are any |
    | null | null, and all GPUs have ranks | one on each |
    | a number | null | on the last GPUs, if the trainer leaves enough of them, else the first |
    | null | given | as many as these are enough for |

    With `tensor_parallel_size` and its like, an engine takes several GPUs. A run with several
    policies, or with one rank whose weights are read by CUDA IPC, has one engine unless a number is
    set. Of several nodes that have engines (`Config.spreads_engines`), each has the same, and a
    part of `num_engines`.

    Raises:
        ConfigError: `gpu_ids` names a GPU that does not exist, or another number of them than vLLM
            uses; there are fewer GPUs than `num_engines` needs; `enable_sleep_mode` is true, but no
            GPU is shared; `offload_weights` is true, but no engine sleeps; `weight_sync_backend` is
            ipc, but engines are not on GPUs of ranks, or several read those of one rank; or nccl,
            but no GPU holds all weights, or a GPU is shared.
    """
    # An engine that shares a GPU sleeps during updates. In asynchronous training it generates
    # meanwhile, so it never does.
    engine = config.generator.inference_engine
    ranks = config.trainer.placement.ranks_per_node
    each = engine.num_gpus
    if engine.gpu_ids is not None:
        gpu_ids = _check_gpu_ids(engine.gpu_ids, _number_of_machine(config), each, num_gpus)
    else:
        gpu_ids = _choose_gpus(config, ranks, each, num_gpus)
    engines = []
    for first in range(0, len(gpu_ids), each):
        engines.append(gpu_ids[first : first + each])
    shared = tuple(gpu for gpu in gpu_ids if gpu < ranks)
    chosen = engine.enable_sleep_mode
    if chosen and not shared:
        raise ConfigError(
            f"{_KEY}.enable_sleep_mode: expected null or false, as the engine shares no GPU with "
            f"the trainer (gpu_ids: {[*gpu_ids]}), got true"
        )
    # In asynchronous training it generates during updates.
    can_sleep = bool(shared) and config.max_staleness == 0
    sleeps = can_sleep if chosen is None else chosen
    if config.trainer.placement.offload_weights and not sleeps:
        raise ConfigError(
            "trainer.placement.offload_weights: expected null or false, as no engine sleeps on the "
            f"trainer's GPUs (gpu_ids: {[*gpu_ids]}; {_KEY}.enable_sleep_mode: {chosen}), got true"
        )
    weight_sync = _weight_sync(config, gpu_ids, shared, len(engines))
    return EnginePlacement(tuple(engines), shared, sleeps, weight_sync)


def rank_choices(config: Config, num_gpus: int, *, with_engine: bool = True) -> list[int]:
    """Return on how many of a machine's GPUs the policy may be trained, the preferred first.

    For `policy_num_gpus_per_node=null`: on all, but for those that engines of an asynchronous run
    need, which generate during updates. Without `num_engines` these get half of the GPUs, or fewer.
    """
    engine = config.generator.inference_engine
    has_engine_gpus = with_engine and config.engine_place.is_here and config.max_staleness > 0
    most = num_gpus
    least = num_gpus
    if has_engine_gpus:
        most = num_gpus - (engine.num_engines or 1) * engine.num_gpus
        least = most
        if engine.num_engines is None:
            least = min(most, (num_gpus + 1) // 2)
    # Ranks that share a pass are a group.
    shared = config.trainer.policy.sequence_parallel_size
    choices = [ranks for ranks in range(max(1, least), most + 1) if ranks % shared == 0]
    return choices or [max(1, most // shared * shared)]


def node_placement(config: Config, num_gpus: int) -> EnginePlacement:
    """Return the engines of each of several nodes; without a GPU there is one unless more are set.

    Args:
        num_gpus: those of a node that the run may use; 0: it computes on CPUs.
    """
    if num_gpus > 0:
        return engine_placement(config, num_gpus)
    number = _number_of_machine(config) or 1
    backend = config.generator.inference_engine.weight_sync_backend
    return EnginePlacement(((),) * number, (), False, "gloo" if backend == "auto" else backend)


def draw_nodes(config: Config, placement: EnginePlacement | None) -> str:
    """Return which GPU holds which rank and which engine, of several nodes for the first one."""
    ranks = config.trainer.placement.ranks_per_node
    nodes = config.trainer.placement.policy_num_nodes
    drawing = draw_placement(ranks, placement)
    if nodes == 1 or not drawing:
        return drawing
    if config.spreads_engines or placement is None:
        others = "the others are like it"
    else:
        others = "the others have ranks alone"
    return f"the first of {nodes} nodes; {others}\n{drawing}"


def draw_placement(num_ranks: int, placement: EnginePlacement | None) -> str:
    """Return which GPU holds which rank and which engine of a machine; "" where there is one GPU.

    Example:
        >>> print(draw_placement(2, EnginePlacement(((2,), (3,)), (), False, "file")))
        GPU     0  1  2  3
        rank    0  1  .  .
        engine  .  .  0  1
        engines get their weights by file
    """
    engine_of = {}
    if placement is not None:
        for number, gpus in enumerate(placement.engines):
            engine_of.update(dict.fromkeys(gpus, str(number)))
    used = sorted({*range(num_ranks), *engine_of})
    if len(used) < 2:
        return ""
    rows = {"GPU": [str(gpu) for gpu in used]}
    rows["rank"] = [str(gpu) if gpu < num_ranks else "." for gpu in used]
    if placement is not None:
        rows["engine"] = [engine_of.get(gpu, ".") for gpu in used]
    lines = []
    for name, cells in rows.items():
        lines.append(f"{name:<6}" + "".join(f"{cell:>3}" for cell in cells))
    if placement is not None:
        asleep = "; they sleep during updates" if placement.sleeps else ""
        lines.append(f"engines get their weights by {placement.weight_sync}{asleep}")
    return "\n".join(lines)


def _check_gpu_ids(
    given: Sequence[int], num_engines: int | None, each: int, num_gpus: int
) -> tuple[int, ...]:
    if num_engines is None:
        is_enough = bool(given) and len(given) % each == 0
        wanted = f"{each}" if each == 1 else f"a multiple of {each}"
    else:
        is_enough = len(given) == num_engines * each
        wanted = str(num_engines * each)
    if len(set(given)) != len(given) or not is_enough:
        raise ConfigError(f"{_KEY}.gpu_ids: expected {wanted} different ones, got {[*given]}")
    if not all(0 <= gpu < num_gpus for gpu in given):
        raise ConfigError(f"{_KEY}.gpu_ids: expected 0 to {num_gpus - 1}, got {[*given]}")
    return tuple(given)


def _choose_gpus(config: Config, ranks: int, each: int, num_gpus: int) -> tuple[int, ...]:
    """Return the last GPUs if the trainer leaves enough of them, else the first ones."""
    number = _number_of_machine(config)
    spare = num_gpus - ranks
    if number is None:
        number = _default_number(config, ranks, each, spare)
    total = number * each
    if number > 1 and total > num_gpus:
        raise ConfigError(
            f"{_KEY}.num_engines: expected at most {num_gpus // each}, as {num_gpus} GPUs are "
            f"found and each engine takes {each}, got {number}"
        )
    if spare >= total:
        first = num_gpus - total
    else:
        first = 0
    return tuple(range(first, first + total))


def _number_of_machine(config: Config) -> int | None:
    """Return how many engines a machine has by the settings; None: they leave it open."""
    number = config.generator.inference_engine.num_engines
    if number is None or not config.spreads_engines:
        return number
    return number // config.trainer.placement.policy_num_nodes


def _default_number(config: Config, ranks: int, each: int, spare: int) -> int:
    backend = config.generator.inference_engine.weight_sync_backend
    is_single = config.trainer.placement.num_ranks == 1
    if config.policies or (backend == "ipc" and is_single):
        return 1
    if spare >= each:
        gpus = min(spare, ranks)
    else:
        gpus = ranks
    return max(1, gpus // each)


def _weight_sync(
    config: Config, gpu_ids: Sequence[int], shared: tuple[int, ...], num_engines: int
) -> str:
    engine = config.generator.inference_engine
    placement = config.trainer.placement
    ranks = placement.num_ranks
    backend = engine.weight_sync_backend
    one_replica = engine.engine_init_kwargs.get("data_parallel_size", 1) == 1
    # Each rank gathers all weights on its GPU, where its engine may read them. Merged adapters not:
    # ranks would multiply them each by itself, and receipts need the same bits. Adapters alone are
    # small, and vLLM takes them from main memory.
    elsewhere = [gpu for gpu in gpu_ids if gpu not in shared]
    is_colocated = ranks > 1 and placement.policy_num_nodes == 1 and not elsewhere
    reads_ranks = is_colocated and one_replica and not config.trains_adapter
    reason = None
    if backend == "nccl" and ranks > 1:
        reason = f"the weights are sharded over {ranks} GPUs"
    elif backend == "ipc" and ranks > 1 and elsewhere:
        reason = f"no rank has the engines' GPUs {elsewhere}"
    elif backend == "ipc" and ranks == 1 and num_engines > 1:
        reason = f"{num_engines} engines are processes of their own, which one rank gives files"
    elif backend == "nccl" and shared:
        reason = "NCCL does not connect processes on one GPU"
    if reason is not None:
        # A file would need a folder that the nodes share.
        other = "gloo" if config.spreads_engines else "file"
        raise ConfigError(
            f"{_KEY}.weight_sync_backend: expected auto or {other}, as {reason}, got {backend}"
        )
    if backend != "auto":
        return backend
    if config.spreads_engines:
        return "gloo"
    if reads_ranks:
        return "ipc"
    if num_engines > 1:
        return "file"
    if shared and placement.offload_weights:
        return "file"
    if shared and ranks == 1:
        return "ipc"
    if ranks == 1 and one_replica:
        return "nccl"
    return "file"
