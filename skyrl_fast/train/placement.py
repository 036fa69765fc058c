"""Where the run's own engine computes: its GPUs, whether it sleeps, how it gets new weights."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_fast.config import Config, ConfigError

_KEY = "generator.inference_engine"


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """The GPUs of the run's own engine.

    Args:
        gpu_ids: as torch numbers them; the trainer has the first ones.
        shared: those of them that the trainer uses, too.
        sleeps: whether the engine frees its memory while the trainer computes.
        weight_sync: "ipc", "nccl", "gloo" or "file".
    """

    gpu_ids: tuple[int, ...]
    shared: tuple[int, ...]
    sleeps: bool
    weight_sync: str


def engine_placement(config: Config, num_gpus: int) -> EnginePlacement:
    """Return where the run's own engine computes.

    Raises:
        ConfigError: `gpu_ids` names a GPU that does not exist, or another number of them than vLLM
            uses; `enable_sleep_mode` is true, but no GPU is shared; `weight_sync_backend` is ipc or
            nccl, but no GPU holds all weights; or nccl, but a GPU is shared.
    """
    # Without `gpu_ids`, the last GPUs if the trainer leaves enough of them, else the first ones. An
    # engine that shares one sleeps during updates. In asynchronous training it generates meanwhile,
    # so it never does.
    engine = config.generator.inference_engine
    ranks = config.trainer.placement.policy_num_gpus_per_node
    needed = engine.num_gpus
    if engine.gpu_ids is not None:
        gpu_ids = tuple(engine.gpu_ids)
        if len(set(gpu_ids)) != needed or len(gpu_ids) != needed:
            raise ConfigError(f"{_KEY}.gpu_ids: expected {needed} different ones, got {[*gpu_ids]}")
        if not all(0 <= gpu < num_gpus for gpu in gpu_ids):
            raise ConfigError(f"{_KEY}.gpu_ids: expected 0 to {num_gpus - 1}, got {[*gpu_ids]}")
    else:
        if num_gpus >= ranks + needed:
            first = num_gpus - needed
        else:
            first = 0
        gpu_ids = tuple(range(first, first + needed))
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
    return EnginePlacement(gpu_ids, shared, sleeps, _weight_sync(config, shared))


def _weight_sync(config: Config, shared: tuple[int, ...]) -> str:
    engine = config.generator.inference_engine
    ranks = config.trainer.placement.policy_num_gpus_per_node
    backend = engine.weight_sync_backend
    reason = None
    if backend in ("ipc", "nccl") and ranks > 1:
        reason = f"the weights are sharded over {ranks} GPUs"
    elif backend == "nccl" and shared:
        reason = "NCCL does not connect processes on one GPU"
    if reason is not None:
        raise ConfigError(
            f"{_KEY}.weight_sync_backend: expected auto or file, as {reason}, got {backend}"
        )
    if backend != "auto":
        return backend
    if shared and ranks == 1:
        return "ipc"
    one_replica = engine.engine_init_kwargs.get("data_parallel_size", 1) == 1
    if ranks == 1 and one_replica:
        return "nccl"
    return "file"
