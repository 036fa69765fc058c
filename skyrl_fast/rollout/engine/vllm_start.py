"""Before vLLM starts: its settings, checks, arguments and environment variables.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from skyrl_fast.config import InferenceEngineConfig
from skyrl_fast.config.engine import LORA_RANKS
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.weights.group import BACKENDS, IPC
from skyrl_fast.system.main_guard import Place

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WORKER_EXTENSION = "skyrl_fast.rollout.engine.weights.worker.WeightUpdateExtension"
UNSHARED = 0.9  # gpu_memory_utilization of an engine without a trainer; vLLM's default
# Tokens of a block of keys and values. The prefix cache reuses full blocks only, and vLLM's 128 on
# a CPU are more than many prompts have. Its kernels prefer multiples of 32.
CPU_BLOCK_SIZE = 32
CPU_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
CPU_CACHE_GIB = "1"  # size of keys and values, where that is not set
# From here on an engine uses the trainer's core as well: between the quickstart's model (2 MB),
# whose steps gain nothing by a second thread, and SmolLM2-135M (538 MB), whose steps take 0.7 of
# the time.
LARGE_MODEL_BYTES = 64 << 20
# A prefix of these in config.json tells of recurrences or convolutions.
STATE_KEYS = ("mamba_", "ssm_", "linear_", "conv")
QUERY_SCALES = "attn_temperature_tuning"  # setting of Llama 4: larger for later tokens
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


CPU_LIBRARY = "libnuma.so.1"  # vLLM's CPU build is linked with it, and no wheel has it


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """Adapters that come with requests, from folders, instead of as new weights.

    Log-probabilities are then the model's own, before temperature and truncation.

    Args:
        max_rank: the largest rank.
        target_modules: last parts of the names of the modules that may have one.
        at_once: adapters of the requests of one engine step.
        in_memory: adapters that are kept in main memory; others are loaded again when they are
            named.
    """

    max_rank: int
    target_modules: tuple[str, ...]
    at_once: int = 4
    in_memory: int = 16


@dataclass(frozen=True, slots=True)
class VllmSetup:
    """The start settings of one vLLM engine.

    Args:
        engine: the settings of generator.inference_engine. A `model_dtype` of "auto" is float32
            on CPU and bfloat16 on GPU; on CPU `max_num_batched_tokens` is at least
            `max_model_len`.
        max_model_len: longest prompt plus response; None: the model's own.
        log_file: file for vLLM's log; None: warnings go to the terminal.
        reasoning_parser: of the model's family: structured outputs begin after the thoughts.
        takes_turns: whether nothing is trained while it generates.
        adapter: config of the LoRA adapter that it gets as new weights, as in PEFT's files; None:
            it gets the model's own weights.
        policies: names of the policies, each with an adapter of this config; empty: one.
        served_adapters: those that come with requests; None: none do.
        reads_ranks: whether several ranks hand it its weights on their GPUs.
        on_cpu: whether it computes on the CPU; None: if torch finds no GPU where it starts.
    """

    model: str
    engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    max_model_len: int | None = None
    seed: int = 0
    log_file: str | None = None
    reasoning_parser: str | None = None
    takes_turns: bool = False
    adapter: dict[str, Any] | None = None
    policies: tuple[str, ...] = ()
    served_adapters: ServedAdapters | None = None
    reads_ranks: bool = False
    on_cpu: bool | None = None

    @property
    def weights_group(self) -> str | None:
        """Backend of the group over which it gets weights; None: it is in none."""
        if self.reads_ranks:
            return IPC
        backend = self.engine.weight_sync_backend
        return backend if backend in BACKENDS else None

    @property
    def computes_on_cpu(self) -> bool:
        if self.on_cpu is None:
            return not torch.cuda.is_available()
        return self.on_cpu


GUARD = (
    "vLLM starts processes that import your main module. Start the engine under "
    '`if __name__ == "__main__":` in a file, or use `skyrl-fast train`'
)


@dataclass(frozen=True, slots=True)
class MainModule:
    """The module that the processes of vLLM import.

    Args:
        file: None: it has none, as in a notebook.
        is_imported_by_child: whether this process is one that imports it.
    """

    file: str | None
    is_imported_by_child: bool = False


def main_module() -> MainModule:
    """Return the main module of this process."""
    is_child = getattr(multiprocessing.current_process(), "_inheriting", False)
    return MainModule(getattr(sys.modules.get("__main__"), "__file__", None), is_child)


def check_can_spawn(main: MainModule, unguarded: Place | None = None) -> None:
    """Raise EngineDeadError unless vLLM can spawn: its processes import the main module.

    That module must exist, and must not start an engine when it is imported.

    Args:
        unguarded: its line that starts one, also when it is imported.
    """
    if main.is_imported_by_child:
        raise EngineDeadError(
            f"the engine was started while a child process was importing: {GUARD}"
        )
    if unguarded is not None:
        raise EngineDeadError(
            f"{unguarded.file}, line {unguarded.line}, starts the engine without a guard. {GUARD}"
        )
    main_file = main.file
    if main_file is not None and not os.path.exists(main_file):
        raise EngineDeadError(f"the main module {main_file!r} is no file: {GUARD}")


def missing_guard(main: MainModule) -> str:
    """Return what a script lacks that never asks for its `__name__`, else ""."""
    main_file = main.file
    if main_file is None or not main_file.endswith(".py"):
        return ""
    with suppress(OSError, UnicodeDecodeError):
        if "__name__" not in Path(main_file).read_text(encoding="utf-8"):
            return f"{main_file} starts it without a guard. {GUARD}"
    return ""


def missing_library(library: str = CPU_LIBRARY, *, is_cpu_build: bool | None = None) -> str:
    """Return which library of the system vLLM's CPU build lacks, "" if none.

    Args:
        library: that it is linked with.
        is_cpu_build: whether vLLM is that build; None: as it is installed here.
    """
    if is_cpu_build is None:
        is_cpu_build = _is_cpu_build()
    if not is_cpu_build:
        return ""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return f"vLLM's CPU build needs a library: {error}; apt-get install libnuma1"
    return ""


def _is_cpu_build() -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-cpu")
        return True
    return False


def check_model_folder(setup: VllmSetup) -> None:
    """Raise EngineDeadError if there is no model, or it cannot record routes as configured."""
    model = setup.model
    folder = Path(model)
    if not folder.is_dir():
        raise EngineDeadError(
            f"model folder not found: {model}. Give a folder with config.json, *.safetensors and "
            "the tokenizer's files"
        )
    if not (folder / "config.json").is_file():
        raise EngineDeadError(f"model folder {model} has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise EngineDeadError(f"model folder {model} has no *.safetensors")
    if setup.engine.enable_return_routed_experts:
        model_config = (folder / "config.json").read_text(encoding="utf-8")
        if not any(f'"{key}"' in model_config for key in NUM_EXPERTS_KEYS):
            raise EngineDeadError(
                f"enable_return_routed_experts: the model in {model} is no mixture of experts"
            )


def engine_args(setup: VllmSetup) -> dict[str, Any]:
    engine = setup.engine
    model_config = read_model_config(setup.model)
    text_config = model_config.get("text_config") or model_config
    dtype = engine.model_dtype
    if dtype == "auto":
        dtype = "float32" if setup.computes_on_cpu else "bfloat16"
    eager = engine.enforce_eager
    if eager is None:
        eager = setup.computes_on_cpu
    args: dict[str, Any] = {
        "model": setup.model,
        "dtype": dtype,
        "max_model_len": setup.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enforce_eager": eager,
        "seed": setup.seed,
        "worker_extension_cls": WORKER_EXTENSION,
        # Logprobs of the sampling distribution: after temperature.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # no limit for those of kept tokens
        # An engine has the compiler of its first form, and other ones' features are lost in it.
        "structured_outputs_config": {"backend": "xgrammar"},
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if (tuning := text_config.get(QUERY_SCALES)) is not None:
        # vLLM 0.30 decides it by max_model_len otherwise.
        args["override_generation_config"] = {QUERY_SCALES: tuning}
    if text_config is not model_config:
        args["language_model_only"] = True  # rows are text: no memory for images and their model
    if engine.tensor_parallel_size > 1:
        args["tensor_parallel_size"] = engine.tensor_parallel_size
    if setup.reasoning_parser is not None:
        args["reasoning_parser"] = setup.reasoning_parser
    if engine.enable_return_routed_experts:
        args["enable_return_routed_experts"] = True
    if setup.adapter is not None:
        rank = setup.adapter["r"]
        args["enable_lora"] = True
        args["max_lora_rank"] = next(most for most in LORA_RANKS if most >= rank)
        args["lora_target_modules"] = setup.adapter["target_modules"]  # else the head, too
        # No request is in the engine while the next versions are loaded.
        args["max_loras"] = max(1, len(setup.policies))
    if (served := setup.served_adapters) is not None:
        args["enable_lora"] = True
        args["max_lora_rank"] = next(most for most in LORA_RANKS if most >= served.max_rank)
        args["lora_target_modules"] = list(served.target_modules)  # else the head, too
        args["max_loras"] = served.at_once
        args["max_cpu_loras"] = max(served.in_memory, served.at_once)
        args["logprobs_mode"] = "raw_logprobs"
    if setup.computes_on_cpu:
        # A prompt prefilled in chunks, by a request with a seed, kills vLLM 0.30 on CPU
        # ("CPU Generator does not use offset"). Unchunked, a prompt must fit into one step.
        longest = setup.max_model_len or text_config.get("max_position_embeddings", 0)
        args["enable_chunked_prefill"] = False
        if keeps_states(text_config):  # vLLM caches their prefixes in chunks only
            args["enable_prefix_caching"] = False
        args["block_size"] = CPU_BLOCK_SIZE
        args["max_num_batched_tokens"] = max(engine.max_num_batched_tokens, longest)
    else:
        args["gpu_memory_utilization"] = engine.gpu_memory_utilization or UNSHARED
        if engine.enable_sleep_mode:
            args["enable_sleep_mode"] = True
        if engine.gpu_ids is not None:
            args["device_ids"] = engine.gpu_ids
    args.update(engine.engine_init_kwargs)
    return args


def keeps_states(text_config: Mapping[str, Any]) -> bool:
    """Return whether a model has layers with a state: recurrences or convolutions."""
    return any(name.startswith(STATE_KEYS) for name in text_config)


def read_model_config(model_path: str) -> dict[str, Any]:
    path = Path(model_path) / "config.json"
    if not path.is_file():
        return {}
    try:
        model = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(model, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(model).__name__}")
    return model


LOGGING_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"


def engine_environment(setup: VllmSetup, *, num_cores: int | None = None) -> dict[str, str]:
    """Return the environment variables that vLLM and its processes read at their start.

    Args:
        setup: of the engine.
        num_cores: that it may use; None: those of this process.
    """
    result = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # see parent_watch.py
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a warning about memory binding at every start
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore::FutureWarning"),  # to vLLM
    }
    if setup.log_file is not None:
        result["VLLM_LOGGING_LEVEL"] = "INFO"
        result[LOGGING_VARIABLE] = _logging_config(setup.log_file)
    if setup.computes_on_cpu:
        result[CPU_CACHE_VARIABLE] = CPU_CACHE_GIB
        # The worker runs in the engine core's process: a third process costs seconds at the start,
        # and the two would poll each other on the cores that the trainer needs.
        result["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # oneDNN keeps a compiled kernel for every shape of a batch: by default 1,024 of them, so
        # that memory grows by 150 MiB over hundreds of steps.
        result["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "256"
        # A waiting OpenMP thread sleeps instead of spinning, for the same reason.
        result["OMP_WAIT_POLICY"] = "PASSIVE"
        result["OMP_NUM_THREADS"] = str(
            setup.engine.num_threads or default_num_threads(setup, num_cores)
        )
    return result


def default_num_threads(setup: VllmSetup, num_cores: int | None = None) -> int:
    """Return an engine's threads on a CPU: all cores but one, which the trainer's event loop has.

    All cores for a large model while nothing is trained. The steps of a small one are so short that
    another thread is waited for longer than it computes.
    """
    cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
    files = Path(setup.model).glob("*.safetensors")
    is_large = sum(file.stat().st_size for file in files) >= LARGE_MODEL_BYTES
    if setup.takes_turns and is_large:
        return cores
    return max(1, cores - 1)


SOCKETS = "VLLM_RPC_BASE_PATH"  # the folder of the sockets between vLLM's processes


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder for `SOCKETS`, removed at the latest when this process exits.

    vLLM never deletes its sockets. The name is short: a socket's path has at most 107 bytes.
    """
    return tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)


def _logging_config(log_file: str) -> str:
    """Write a Python logging config that sends vLLM's messages to `log_file`; return its path."""
    # The file is next to `log_file`.
    path = Path(log_file).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(processName)s %(levelname)s %(message)s"}},
        "handlers": {
            "file": {"class": "logging.FileHandler", "filename": str(path), "formatter": "line"}
        },
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    file = path.with_name(f".{path.name}.json")
    file.write_text(json.dumps(settings), encoding="utf-8")
    return str(file)


@contextmanager
def end_on_signals() -> Iterator[None]:
    """Kill the processes that are started in the context when a signal to stop arrives.

    vLLM's start blocks this thread, for minutes with a large model; whoever waits for the process
    to stop does not wait that long. The handlers that were installed before are called first.
    """
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield
        return
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = {child.pid for child in multiprocessing.active_children()}

    def stop(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        assert callable(handler)
        handler(number, frame)
        for child in multiprocessing.active_children():
            if child.pid not in before:
                child.kill()

    changed = [number for number, handler in handlers.items() if callable(handler)]
    for number in changed:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, handlers[number])


def let_engine_go_first(yes: bool, *, on_cpu: bool) -> None:
    """Let the engine's process run before this one's threads on a CPU that they share, or not.

    On Linux, this process is scheduled as SCHED_BATCH, and so is what it starts then: its threads
    wait for a core when they wake up, and do not take the engine's in the middle of a step. Threads
    with another policy than the default keep it.
    """
    if not on_cpu or sys.platform != "linux":
        return
    usual = os.SCHED_OTHER
    batch = os.SCHED_BATCH
    before = usual if yes else batch
    after = batch if yes else usual
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # it has ended, or this is not allowed
            if os.sched_getscheduler(thread) == before:
                os.sched_setscheduler(thread, after, os.sched_param(0))


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes started in the context; variables that the user set are kept.

    On exit the environment is restored: vLLM adds LD_PRELOAD and others for its own processes, and
    tools that an environment starts must not inherit those.
    """
    before = dict(os.environ)
    for name, value in values.items():
        if name not in before:
            os.environ[name] = value
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
