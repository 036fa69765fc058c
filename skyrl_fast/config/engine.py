"""Settings of the engines that generate; SkyRL's names where SkyRL has the key."""
# ruff: noqa: RUF009 - setting() returns dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl_fast.setting import DTYPES, setting


@dataclass(slots=True)
class InferenceEngineConfig:
    """The engine that generates."""

    backend: str = setting("vllm", "the engine", choices=("vllm",))
    run_engines_locally: bool = setting(True, "false: external_server_urls are used")
    external_server_urls: list[str] = setting(
        [], "addresses of `vllm serve`; requests are shared among them"
    )
    weight_sync_backend: str = setting(
        "extension",
        "of external servers, which read the weights from weight_sync_path. extension: by this "
        "package's worker extension; reload: by vLLM's own reload_weights",
        choices=("extension", "reload"),
    )
    weight_sync_path: str | None = setting(
        None, "folder that trainer and servers share; null: this machine's shared memory"
    )
    max_restarts: int = setting(
        3, "of an engine that dies, between two weight updates that it survives", at_least=0
    )
    model_dtype: str = setting("auto", "auto: the policy's", choices=DTYPES)
    enable_prefix_caching: bool = setting(True, "reuse the keys and values of earlier turns")
    enable_return_routed_experts: bool = setting(
        False, "mixture of experts: record where the engine sent each token"
    )
    enforce_eager: bool = setting(True, "no graph capture: faster start")
    max_num_seqs: int = setting(256, "sequences generated at once", at_least=1)
    max_num_batched_tokens: int = setting(8192, "tokens of one engine step", at_least=1)
    gpu_memory_utilization: float = setting(0.8, "of the engine, on GPU", above=0, at_most=1)
    cpu_kvcache_gib: int = setting(1, "memory for keys and values, on CPU", at_least=1)
    num_threads: int | None = setting(
        None, "CPU threads of the engine; null: all cores but one", at_least=1
    )
    engine_init_kwargs: dict[str, Any] = setting({}, "further vLLM engine arguments")
