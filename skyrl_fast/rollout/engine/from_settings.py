"""Engines from the settings: in this process, on servers, or on a cluster."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.config import SamplingParams, settings
from skyrl_fast.config.model_folder import HUB, ModelHub, find_auto_class, model_folder
from skyrl_fast.config.modes import EnginePlace, EngineWeights
from skyrl_fast.rollout.engine.api_key import DEFAULT_NAME, engine_key
from skyrl_fast.rollout.engine.engine_server import ServerAccess
from skyrl_fast.rollout.engine.model_layers import linear_names
from skyrl_fast.rollout.engine.protocol import Engine
from skyrl_fast.rollout.engine.ray_engine import EngineBundle, RayEngine
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.engine.started_engine import NodeEngine
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import (
    VllmSetup,
    default_num_threads,
    read_model_config,
)
from skyrl_fast.rollout.engine.weights.group import BACKENDS, GROUPS, IPC
from skyrl_fast.rollout.engine.weights.transfer import Transport
from skyrl_fast.rollout.engine.weights.transports import TRANSPORTS
from skyrl_fast.system.network_interface import LOOPBACK

log = logging.getLogger(__name__)

ENGINE_LOG = "engine.log"  # in the run folder


def make_engines(config: settings.Config, model_path: str) -> list[Engine]:
    """Return the engines that the settings ask for, not started."""
    engine = config.generator.inference_engine
    _log_limited_top_k(config.generator.sampling_params)
    if config.engine_place is not EnginePlace.SERVERS:
        return _make_own_engines(config, make_vllm_setup(config, model_path))
    if engine.weight_sync_backend == "reload":
        by = "reload"
    else:
        by = "file"
    return _make_remote_engines(config, model_path, weight_sync=by)


def make_cluster_engines(
    config: settings.Config, model_path: str, address: str, bundles: Sequence[EngineBundle]
) -> list[Engine]:
    """Return the engines of a cluster, not started."""
    engine = config.generator.inference_engine
    folder = _find_cached_folder(model_path)
    _log_limited_top_k(config.generator.sampling_params)
    backend = choose_cluster_backend(config)
    result: list[Engine] = []
    for number, bundle in enumerate(bundles):
        result.append(
            RayEngine(
                number,
                bundle,
                partial(_make_setup_on_node, config, model_path, number),
                _new_access(engine, backend, address),
                weight_sync=backend,
                trainer=address,
                sleeps=bool(engine.enable_sleep_mode),
                records_routes=engine.enable_return_routed_experts,
                vocab_size=read_vocab_size(folder),
                adapter=_adapter_config(config, folder),
            )
        )
    return result


def _make_own_engines(
    config: settings.Config, setup: VllmSetup, *, trained: bool = True
) -> list[Engine]:
    """Return the run's engines on this machine: one in this process, or several servers."""
    if config.num_engines == 1:
        return [VllmEngine(setup)]
    engine = setup.engine
    if trained:
        backend = setup.weights_group or "file"
    else:
        backend = None
    result: list[Engine] = []
    for number in range(config.num_engines):
        result.append(
            NodeEngine(
                number,
                _setup_of_one(setup, number, config.num_engines),
                _new_access(engine, backend, LOOPBACK),
                weight_sync=backend,
                sleeps=bool(engine.enable_sleep_mode),
                records_routes=engine.enable_return_routed_experts,
                vocab_size=read_vocab_size(setup.model),
                adapter=setup.adapter if trained else None,
            )
        )
    return result


def _setup_of_one(setup: VllmSetup, number: int, num_engines: int) -> VllmSetup:
    """Return the settings of one of several engines: its GPUs or threads, and its log."""
    engine = replace(setup.engine)
    if engine.gpu_ids is not None:
        each = engine.num_gpus
        engine.gpu_ids = engine.gpu_ids[number * each : (number + 1) * each]
    if setup.computes_on_cpu and engine.num_threads is None:
        engine.num_threads = max(1, default_num_threads(setup) // num_engines)
    log_file = None
    if setup.log_file is not None:
        log_file = str(Path(setup.log_file).with_name(f"engine_{number}.log"))
    return replace(setup, engine=engine, log_file=log_file)


def _new_access(
    engine: settings.InferenceEngineConfig, backend: str | None, address: str
) -> ServerAccess:
    """Return how a new server is used: with a key of its own."""
    return ServerAccess(
        key=secrets.token_urlsafe(32),
        trainer=address if backend in GROUPS else None,
        weights_folder=engine.weight_sync_path,
        reads_gpu=backend == IPC,
    )


def make_untrained_engines(config: settings.Config, model_path: str) -> list[Engine]:
    """Return the engines of a model whose weights are not updated, not started."""
    if config.engine_place is not EnginePlace.SERVERS:
        # No adapter is loaded, so that there are no policies to call.
        setup = replace(make_vllm_setup(config, model_path), policies=(), reads_ranks=False)
        return _make_own_engines(config, setup, trained=False)
    return _make_remote_engines(config, model_path, weight_sync=None)


def _make_setup_on_node(config: settings.Config, model_path: str, number: int) -> VllmSetup:
    """Return an engine's settings on the node where it runs, where its model may be downloaded."""
    setup = make_vllm_setup(config, str(model_folder(model_path)))
    engine = replace(setup.engine, gpu_ids=None)  # its process sees its own alone
    log_file = str(Path(config.trainer.run_path) / f"engine_{number}.log")
    return replace(setup, engine=engine, log_file=log_file)


def _make_remote_engines(
    config: settings.Config, model_path: str, *, weight_sync: str | None
) -> list[Engine]:
    engine = config.generator.inference_engine
    key = engine_key(key_file(config))
    folder = _find_cached_folder(model_path)
    result: list[Engine] = []
    for url in engine.external_server_urls:
        result.append(
            RemoteEngine(
                url,
                api_key=key,
                weight_sync=weight_sync,
                records_routes=engine.enable_return_routed_experts,
                vocab_size=read_vocab_size(folder),
                adapter=None if weight_sync is None else _adapter_config(config, folder),
            )
        )
    return result


def describe_start(
    config: settings.Config, model_path: str, *, on_nodes: bool = False
) -> tuple[str, Path | None]:
    """Return what starting the engines does, in words, and the log that grows meanwhile, if any.

    Args:
        on_nodes: whether they are on nodes of a cluster.
    """
    folder = Path(config.trainer.run_path)
    place = config.engine_place
    if place is EnginePlace.SERVERS:
        urls = config.generator.inference_engine.external_server_urls
        return f"connecting to {', '.join(urls)}", None
    if on_nodes:
        return f"vLLM starts on the cluster; logs on its nodes: {folder}/engine_0.log, ...", None
    if config.num_engines > 1:
        text = f"{config.num_engines} engines of vLLM start and load {model_path}"
        log = folder / "engine_0.log"
        return f"{text}; logs: {log}, ...", log
    log = folder / ENGINE_LOG
    return f"vLLM starts and loads {model_path}; its log: {log}", log


def choose_transport(config: settings.Config) -> Transport:
    engine = config.generator.inference_engine
    backend = engine.weight_sync_backend
    place = config.engine_place
    if place is EnginePlace.CLUSTER:
        backend = choose_cluster_backend(config)
    one_rank = config.trainer.placement.num_ranks == 1
    one_process = one_rank and place.is_here and config.num_engines == 1
    in_memory = one_process and sys.platform == "linux"  # has unnamed files, opened by /proc
    names = {
        **dict.fromkeys(BACKENDS, "broadcast"),
        "auto": "memory" if in_memory else "file",
        "reload": "file",
        IPC: "rank_ipc" if _reads_ranks(config) else IPC,
    }
    transport = TRANSPORTS[names.get(backend, backend)]
    # A server of its own opens files in the folders of weights only.
    is_reader_here = place.is_here and config.num_engines == 1
    return transport.send(engine.weight_sync_path, is_reader_here)


def choose_cluster_backend(config: settings.Config, *, has_gpu: bool | None = None) -> str:
    """Return how engines of a cluster get new weights; without a shared disk a file cannot.

    Args:
        config: of the run.
        has_gpu: whether this machine has one; None: as torch says.
    """
    backend = config.generator.inference_engine.weight_sync_backend
    if backend != "auto":
        return backend
    # The trainer sends from its GPU if it has one.
    if has_gpu is None:
        has_gpu = torch.cuda.is_available()
    sends_from_gpu = has_gpu and config.trainer.device != "cpu"
    return "nccl" if sends_from_gpu else "gloo"


def key_file(config: settings.Config) -> Path:
    file = config.generator.inference_engine.api_key_file
    if file:
        return Path(expanduser(file))
    return Path(config.trainer.run_path) / DEFAULT_NAME


def make_vllm_setup(config: settings.Config, model_path: str, *, hub: ModelHub = HUB) -> VllmSetup:
    """Return the start-up settings of the engine, from generator.inference_engine.

    Args:
        config: of the run.
        model_path: a folder, or a name in the hub's cache.
        hub: whose cache may have the model.

    Raises:
        ValueError: prompt and response can exceed the model's `max_position_embeddings` or a
            `max_model_len` in engine_init_kwargs, or its config.json is invalid.
    """
    model_path = _find_cached_folder(model_path, hub)
    return VllmSetup(
        model=model_path,
        engine=replace(config.generator.inference_engine, model_dtype=config.engine_dtype),
        max_model_len=_check_longest_sequence(config, model_path),
        seed=config.trainer.seed,
        log_file=str(Path(config.trainer.run_path) / ENGINE_LOG),
        reasoning_parser=config.generator.reasoning_parser,
        takes_turns=config.max_staleness == 0,
        adapter=_adapter_config(config, model_path),
        policies=config.policies,
        reads_ranks=_reads_ranks(config),
    )


def _reads_ranks(config: settings.Config) -> bool:
    """Return whether weights come from several ranks by CUDA IPC; a single one needs no buckets."""
    is_ipc = config.generator.inference_engine.weight_sync_backend == IPC
    return is_ipc and config.trainer.placement.num_ranks > 1


def _adapter_config(config: settings.Config, model_path: str) -> dict[str, Any] | None:
    """Return what an engine must know of the adapter that it gets, by PEFT's names; None: none."""
    if config.engine_weights is not EngineWeights.ADAPTER:
        return None
    lora = config.trainer.policy.model.lora
    targets = list(lora.target_modules)
    if targets == [settings.ALL_LINEAR]:
        targets = read_linear_names(model_path)
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": targets,
        "use_rslora": lora.use_rslora,
        "bias": "none",
    }


def read_linear_names(model_path: str) -> list[str]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        model = find_auto_class(config).from_config(config)
    return linear_names(model)


def _check_longest_sequence(config: settings.Config, model_path: str) -> int:
    prompt = config.generator.max_input_length
    response = settings.max_response_length(config)
    of_training = config.generator.sampling_params.max_generate_length
    sampling = "sampling_params" if response == of_training else "eval_sampling_params"
    lengths = (
        f"generator.max_input_length ({prompt}) and generator.{sampling}.max_generate_length "
        f"({response})"
    )
    others = config.generator.inference_engine.engine_init_kwargs
    longest = others.get("max_model_len")
    if isinstance(longest, int) and prompt + response > longest:
        raise ValueError(
            f"{lengths}: expected at most {longest} tokens together, as "
            "generator.inference_engine.engine_init_kwargs.max_model_len says, got "
            f"{prompt + response}"
        )
    positions = read_positions(model_path)
    if positions is not None and prompt + response > positions and not others:
        raise ValueError(
            f"{lengths}: expected at most the {positions} positions of {model_path} together, got "
            f"{prompt + response}"
        )
    return prompt + response


def _find_cached_folder(path: str, hub: ModelHub = HUB) -> str:
    """Return the folder of a model's files, as the trainer finds it; else `path` itself."""
    folder = Path(expanduser(path))
    if folder.is_dir():
        return str(folder)
    cached = hub.find_cached(path)
    return path if cached is None else str(cached)


def read_positions(model_path: str) -> int | None:
    """Return the model's `max_position_embeddings`; None: unknown, or with scaled RoPE."""
    model = read_model_config(model_path)
    model = model.get("text_config") or model
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    return None if is_scaled else model.get("max_position_embeddings")


def read_vocab_size(model_path: str) -> int | None:
    model = read_model_config(model_path)
    text = model.get("text_config") or {}
    return model.get("vocab_size", text.get("vocab_size"))


def _log_limited_top_k(sampling: SamplingParams) -> None:
    limit = sampling.num_kept_tokens
    if limit is not None and sampling.top_k < 1:
        log.info(
            "training samples from the %d most likely tokens at most "
            "(generator.sampling_params.max_kept_tokens), and records which remained",
            limit,
        )
