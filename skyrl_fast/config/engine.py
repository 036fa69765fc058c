"""Settings of the inference engine; SkyRL's names where SkyRL has the key."""
# ruff: noqa: RUF009 - setting() returns dataclass fields

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from skyrl_fast.setting import DTYPES, setting

_PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM has memory layouts for


@dataclass(slots=True)
class InferenceEngineConfig:
    """The inference engine."""

    backend: str = setting("vllm", "inference engine", choices=("vllm",))
    external_server_urls: list[str] = setting(
        [],
        "addresses of `vllm serve`, over which requests are distributed; none: the run starts its "
        "own engines",
    )
    num_engines: int | None = setting(
        None,
        "engines that the run starts. null: one for each GPU of the trainer's, or for each "
        "tensor_parallel_size of them: on GPUs that no rank uses, as far as there are any, else on "
        "the trainer's; one with several policies, or on a cluster; one without a GPU, on each of "
        "several nodes",
        at_least=1,
    )
    tensor_parallel_size: int = setting(
        1, "GPUs over which vLLM shards the weights of one engine", at_least=1
    )
    weight_sync_backend: str = setting(
        "auto",
        "how the engine gets new weights. ipc: it reads the memory of the trainer's GPU, with "
        "several ranks each worker that of the rank on its own; nccl: a broadcast from the "
        "trainer's GPU to other GPUs; gloo: a broadcast by the CPU; file: a safetensors file; "
        "reload: the same, loaded by vLLM's own reload_weights, for servers without this package. "
        "auto: for engines on a cluster nccl, without GPUs gloo; on several nodes gloo; otherwise, "
        "where a single rank trains, ipc if the run's own engine shares its GPU, nccl if not (file "
        "with several replicas), and on a CPU the engine reads the trainer's memory; with several "
        "ranks ipc if all GPUs of engines have ranks, no LoRA adapter is trained, and its buckets "
        "have room; else file",
        choices=("auto", "ipc", "nccl", "gloo", "file", "reload"),
    )
    weight_sync_path: str | None = setting(
        None, "folder shared by trainer and servers; null: this machine's shared memory"
    )
    api_key_file: str | None = setting(
        None,
        "file with the key of external servers, which only its owner may read; created if missing. "
        "null: RUN/engine_key. The variable SKYRL_FAST_ENGINE_KEY takes precedence",
    )
    max_restarts: int = setting(
        3, "maximum restarts of a dead engine between two successful weight updates", at_least=0
    )
    model_dtype: str = setting("auto", "dtype of the engine; auto: the policy's", choices=DTYPES)
    enable_prefix_caching: bool = setting(True, "whether to reuse the KV cache of earlier turns")
    enable_return_routed_experts: bool = setting(
        False, "mixture of experts: whether to record the experts of each token"
    )
    enforce_eager: bool | None = setting(
        None, "whether to skip CUDA graph capture; null: only on a CPU"
    )
    enable_sleep_mode: bool | None = setting(
        None,
        "whether vLLM frees its GPU memory during updates; null: where the run's own engine shares "
        "a GPU with the trainer and training is synchronous",
    )
    gpu_ids: list[int] | None = setting(
        None,
        "GPUs of the engines, as torch numbers them, one engine's after another's; null: the last "
        "ones, if there are more than trainer.placement.policy_num_gpus_per_node, else the first "
        "ones, shared with the trainer; of a server: the first ones",
    )
    max_num_seqs: int = setting(256, "maximum sequences generated concurrently", at_least=1)
    max_num_batched_tokens: int = setting(8192, "maximum tokens of one engine step", at_least=1)
    gpu_memory_utilization: float | None = setting(
        None,
        "share of the GPU's memory for the engine; null: what the trainer leaves by the plan, at "
        "most 0.9; of a server or on GPUs of its own: 0.9",
        above=0,
        at_most=1,
    )
    num_threads: int | None = setting(
        None,
        "CPU threads of the engine, and CPUs that it reserves on a cluster; null: all cores but "
        "one, all in synchronous training of a model of 64 MiB or more, on a cluster 1",
        at_least=1,
    )
    engine_init_kwargs: dict[str, Any] = setting({}, "additional vLLM engine arguments")

    @property
    def num_gpus(self) -> int:
        sizes = {"tensor_parallel_size": self.tensor_parallel_size, **self.engine_init_kwargs}
        return math.prod(int(sizes.get(name, 1)) for name in _PARALLEL_SIZES)
