"""`RemoteEngine`: a local or remote `vllm serve` process, used over HTTP.

Token ids go in and out by `/v1/completions`; weights by vLLM's own `/collective_rpc`, from a folder
that both sides can read or by a broadcast; requests are interrupted by its `/pause`. The last two
exist only if the server runs with VLLM_SERVER_DEV_MODE=1. `skyrl-fast engine` starts a suitable
server, which answers only requests with its key (`serve_guard.py`). A `vllm serve` in that mode
without such a guard is controlled by whoever reaches its port, web pages in a local browser
included.

Design: docs/design/018-asynchronous.md.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.completion_answer import (
    QUOTED_CHARACTERS,
    entries,
    kept_ids,
    number,
    numbers,
    parsing,
    prompt_entries,
    prompt_logprobs,
    read_sampled,
    routes,
)
from skyrl_fast.rollout.engine.generation_check import check_generation
from skyrl_fast.rollout.engine.prompt_scores import PromptScores, read_prompt_scores
from skyrl_fast.rollout.engine.protocol import (
    Engine,
    EngineDeadError,
    EngineError,
    Generation,
    RefusedRequestError,
    vllm_sampling_params,
)
from skyrl_fast.rollout.engine.serve_guard import (
    CLAIM_AGAIN,
    CLAIM_FIRST,
    CLAIM_HEADER,
    LOAD_ADAPTER,
    TRAINER_HEADER,
)
from skyrl_fast.rollout.engine.weights.group import BACKENDS, GROUPS, SECONDS, GroupSeconds
from skyrl_fast.rollout.engine.weights.receipt import (
    WeightSyncError,
    check_receipts,
    find_common_dtype,
    read_receipts,
)
from skyrl_fast.rollout.engine.weights.transfer import WorkerCall
from skyrl_fast.rollout.engine.weights.transports.broadcast import BroadcastSender
from skyrl_fast.rollout.engine.weights.transports.file import write_adapter_folder
from skyrl_fast.rollout.stop_reason import INTERRUPTED
from skyrl_fast.system.network_interface import LOOPBACK

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 5.0
CONTROL_SECONDS = 600.0  # for a call that loads weights
MAX_SENDS = 3  # attempts for a request whose connection broke, or that found no time
CLAIM_BYTES = 16
EXTENDED = ("file", *GROUPS)  # need this package's worker extension and guard
RPC = "/collective_rpc"
COMPLETIONS = "/v1/completions"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
WRONG_KEY = (
    "it has another key: give trainer and server the same file with "
    "generator.inference_engine.api_key_file (by default RUN/engine_key of the same run)"
)


@cache
def _certificates() -> Any:
    """Return the TLS context of all clients: reading the machine's certificates takes 35 ms."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)


def find_silent_servers(urls: Sequence[str], transport: Any = None) -> dict[str, str]:
    """Return why a server cannot be reached, by URL, for those that cannot be.

    Args:
        transport: of httpx; None: the network.
    """
    if not urls:
        return {}  # runs without servers need no httpx
    import httpx

    silent = {}
    options = {"transport": transport, "verify": _certificates(), "trust_env": False}
    with httpx.Client(timeout=HEALTH_SECONDS, **options) as client:
        for url in urls:
            try:
                client.get(url)  # any answer will do
            except httpx.RequestError as error:
                silent[url] = f"{type(error).__name__}: {error}"
    return silent


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How long a client waits for a server, and what it takes from it.

    Args:
        handshake: seconds for all calls to a server that has just started.
        start_poll: seconds between two questions whether it is healthy.
        resend: seconds to wait after an answer that it is busy.
        answer_bytes: of one answer: routes of a million tokens, or kept tokens of a long response,
            take hundreds of MB.
        group: seconds that a broadcast of weights waits for its workers.
    """

    handshake: float = 60.0
    start_poll: float = 1.0
    resend: float = 0.2
    answer_bytes: int = 1 << 30
    group: GroupSeconds = SECONDS


LIMITS = ServerLimits()


class RemoteEngine(Engine):
    """A `vllm serve` endpoint behind the `Engine` protocol.

    Args:
        weight_sync: "file", "gloo" or "nccl": the server runs with this package's worker extension;
            "reload": vLLM's own reload_weights, or load_lora_adapter, reads the folder; None: its
            weights are never updated, so that any `vllm serve` will do. A `StartedEngine` may get
            them by "ipc", too.
        records_routes: whether the server runs with enable_return_routed_experts.
        vocab_size: size of the vocabulary, by which ids and requests are checked; None: unknown.
        adapter: config of the LoRA adapter that it gets as new weights, as for `VllmSetup`.
        sleeps: whether the server frees its GPU's memory between `sleep` and the next weights.
        limits: of its answers.
    """

    starts_with_model = False  # it may have been given other weights before
    weight_syncs: tuple[str, ...] = ("file", *BACKENDS, "reload")
    weights_dtype: torch.dtype | None = None

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        weight_sync: str | None = "file",
        trainer: str = LOOPBACK,
        records_routes: bool = False,
        vocab_size: int | None = None,
        adapter: dict[str, Any] | None = None,
        sleeps: bool = False,
        start_timeout_seconds: float = 600.0,
        transport: Any = None,
        limits: ServerLimits = LIMITS,
    ) -> None:
        if weight_sync not in (*self.weight_syncs, None):
            raise ValueError(
                f"{type(self).__name__}: weight_sync: expected one of {self.weight_syncs}, got "
                f"{weight_sync!r}"
            )
        if importlib.util.find_spec("httpx") is None:
            raise EngineDeadError("external servers need httpx: pip install 'skyrl-fast[train]'")
        self.name = f"the server {url}"
        self._limits = limits
        self._url = url.rstrip("/")
        if api_key is None:
            self.headers = {}
        else:
            self.headers = {"authorization": f"Bearer {api_key}"}
        self._weight_sync = weight_sync
        self._trainer = trainer
        self._sender: BroadcastSender | None = None
        self._records_routes = records_routes
        self.vocab_size = vocab_size
        self.compute_dtype: torch.dtype | None = None
        self._start_timeout_seconds = start_timeout_seconds
        self._transport = transport
        self._client: Any = None
        self._model = ""
        self.max_model_len: int | None = None  # as the server says when it has started
        self._adapter = adapter
        self._adapter_version = 0  # version of the last one that was sent; never used again
        self.adapter_name: str | None = None  # name of the one that the server has
        self._interrupted = False
        self._sleeps = sleeps
        self._sleeping = False
        if weight_sync is None:
            self._claim = None
        else:
            self._claim = secrets.token_hex(CLAIM_BYTES)
        self._has_claimed = False

    async def start(self) -> None:
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self._url,
                headers=self.headers | ({TRAINER_HEADER: self._claim} if self._claim else {}),
                # A response may take as long as its trajectory's deadline, which cancels it.
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None),
                transport=self._transport,
                verify=_certificates(),
                trust_env=False,
            )
        deadline = time.monotonic() + self._start_timeout_seconds
        has_warned = False
        while reason := await self._unhealthy_reason():
            if reason == WRONG_KEY:
                raise EngineDeadError(f"{self.name} refuses requests: {reason}")
            if not has_warned:
                has_warned = True
                seconds = self._start_timeout_seconds
                log.warning("%s does not answer yet, waiting %g s: %s", self.name, seconds, reason)
            if time.monotonic() >= deadline:
                raise EngineDeadError(
                    f"{self.name} did not answer within {self._start_timeout_seconds:g} s: {reason}"
                )
            await asyncio.sleep(self._limits.start_poll)
        seconds = self._limits.handshake
        try:
            async with asyncio.timeout(seconds):
                await self._handshake()
        except TimeoutError as error:
            text = f"{self.name} is healthy but did not answer within {seconds:g} s"
            raise EngineDeadError(text) from error

    async def _handshake(self) -> None:
        claim = {CLAIM_HEADER: CLAIM_AGAIN if self._has_claimed else CLAIM_FIRST}
        models = await self._get("/v1/models", headers=claim if self._claim else {})
        self._has_claimed = True
        with self._parsing("/v1/models"):
            first = models["data"][0]
            self._model = str(first["id"])
            self.max_model_len = first.get("max_model_len")
        if self._weight_sync is None:
            return
        self._interrupted = True  # possibly, by a trainer that was killed
        await self.resume()
        if self._weight_sync in EXTENDED:
            await self._post(RPC, json={"method": "apply_patches"})
            answer = await self._post(RPC, json={"method": "weights_dtype"})
            with self._parsing(RPC):
                dtypes = list(map(str, entries(answer["results"])))
            self.weights_dtype = find_common_dtype(dtypes)
            if self._weight_sync in GROUPS:
                await self._join_workers(self._weight_sync, len(dtypes))

    async def _join_workers(self, backend: str, num_workers: int) -> None:
        sender = BroadcastSender(
            backend,
            num_workers=num_workers,
            address=self._trainer,
            seconds=self._limits.group,
        )
        join = {"method": "join_weights_group", "args": sender.join_arguments}
        try:
            await sender.connect(self._post(RPC, json=join, once=True))
        except (OSError, RuntimeError) as error:
            text = f"{self.name} could not be connected for weight_sync_backend={backend}: {error}"
            raise EngineDeadError(text) from error
        self._sender = sender

    async def close(self) -> None:
        if self._client is not None and self._interrupted:
            with suppress(EngineError, TimeoutError):  # it may be gone
                async with asyncio.timeout(HEALTH_SECONDS):
                    await self.resume()  # for other clients
        client = self._client
        self._client = None
        self._interrupted = self._sleeping = False
        self._sender = self.adapter_name = None
        if client is not None:
            await client.aclose()

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
        assert policy is None  # the settings refuse it
        start = expert_indices_start if self._records_routes else 0
        request = {
            "prompt": list(prompt_token_ids),
            **vllm_sampling_params(sampling, seed=seed, vocab_size=self.vocab_size),
            "return_token_ids": True,
            "return_tokens_as_token_ids": None if sampling.num_kept_tokens is None else True,
            "cache_salt": f"policy-{policy_version}",
            **({"routed_experts_prompt_start": start} if self._records_routes else {}),
            **sampling.additional_kwargs,
        }
        read = read_sampled if sampling.num_kept_tokens is None else json.loads
        choice = await self._complete(request, session_id, read=read)
        with self._parsing(COMPLETIONS):
            logprobs = choice["logprobs"]
            stopped_by = choice.get("stop_reason")
            reason = choice["finish_reason"] or "abort"
            if reason == INTERRUPTED:
                raise ValueError("finish_reason: no request of vLLM ends like this")
            token_ids = entries(choice["token_ids"])
            kept = None
            if sampling.num_kept_tokens is not None:
                kept = kept_ids(token_ids, entries(logprobs["top_logprobs"]))
            generation = Generation(
                token_ids,
                [] if logprobs is None else numbers(logprobs["token_logprobs"]),
                INTERRUPTED if reason == "abort" and self._interrupted else reason,
                stopped_by if isinstance(stopped_by, str) else None,
                routes(choice) if self._records_routes else None,
                start,
                kept,
            )
        return check_generation(
            generation,
            max_tokens=request["max_tokens"],
            vocab_size=self.vocab_size,
            stop=request["stop"],
            source=f"{self.name}, session {session_id}",
        )

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, policy: str | None = None
    ) -> list[float]:
        choice = await self._probe(token_ids)
        with self._parsing(COMPLETIONS):
            return prompt_logprobs(choice, token_ids)

    async def score_prompt(self, token_ids: Sequence[int], *, top_k: int = 0) -> PromptScores:
        choice = await self._probe(token_ids, top_k=top_k)
        with self._parsing(COMPLETIONS):
            return read_prompt_scores(token_ids, prompt_entries(choice), top_k)

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the ids of a text by the server's tokenizer; None: it does not tokenize."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            answer = await self._post("/tokenize", json=body)
        except EngineDeadError:
            raise
        except EngineError:
            return None
        with self._parsing("/tokenize"):
            return [int(number(token)) for token in entries(answer["tokens"])]

    async def prompt_routes(
        self, token_ids: Sequence[int], *, policy: str | None = None
    ) -> tuple[list[float], np.ndarray]:
        choice = await self._probe(token_ids)
        with self._parsing(COMPLETIONS):
            logprobs = prompt_logprobs(choice, token_ids)
            taken = routes(choice)
        if taken is None:
            raise EngineError(f"{self.name} records no routes")
        return logprobs, taken

    async def _probe(self, token_ids: Sequence[int], *, top_k: int = 0) -> dict[str, Any]:
        request = {
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top_k,
            "return_token_ids": True,
            "cache_salt": "probe",
        }
        return await self._complete(request, "probe")

    async def load_weights(self, call: WorkerCall) -> None:
        try:
            await self._wake_up("weights")
            if self._adapter is None:
                answer = await self._load(call)
            else:
                answer = await self._load_adapter(call, self._adapter)
            await self.reset_prefix_cache()
            await self._wake_up("kv_cache")
            self._sleeping = False
        except EngineDeadError:
            raise
        except TimeoutError as error:
            raise EngineDeadError(f"{self.name} did not load weights: {error}") from error
        except RuntimeError as error:
            raise WeightSyncError(f"{self.name} could not load the new weights: {error}") from error
        if self._weight_sync in EXTENDED:
            with self._parsing(RPC):
                receipts = read_receipts(answer["results"])
            self.compute_dtype = check_receipts(receipts, call.sent.digests, call.sent.frozen)

    async def _load(self, call: WorkerCall, **options: Any) -> Any:
        body: dict[str, Any] = {"method": call.method, "args": call.arguments}
        if options:
            body["kwargs"] = options
        if self._weight_sync == "reload":
            folder = str(Path(call.arguments[0]).parent)
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        # Buckets come once: workers that are called again would wait for others.
        once = self._weight_sync in GROUPS
        load = partial(self._post, RPC, json=body, timeout=CONTROL_SECONDS, once=once)
        return await call.make(self._sender, load)

    async def _load_adapter(self, call: WorkerCall, adapter: dict[str, Any]) -> Any:
        """Load an adapter under a name that no adapter of any trainer has had.

        vLLM caches keys and values by that name, and reads nothing for one that it knows.
        """
        if not self._interrupted:
            await self.interrupt()  # requests of others, too: their adapter is replaced
        self._adapter_version = version = self._adapter_version + 1
        name = f"policy-{self._claim}-{version}"
        before = self.adapter_name
        if self._weight_sync == "reload":
            folder = write_adapter_folder(Path(call.arguments[0]), adapter)
            request = {"lora_name": name, "lora_path": str(folder)}
            # vLLM refuses to load a name again, and to unload one that it does not have.
            await self._send("POST", LOAD_ADAPTER, json=request, timeout=CONTROL_SECONDS, once=True)
            self.adapter_name = name
            answer = None
            if before is not None:
                await self._send("POST", UNLOAD_ADAPTER, json={"lora_name": before}, once=True)
        else:
            answer = await self._load(call, adapter=json.dumps(adapter), versions={"": version})
            named = {"lora_name": name, "version": version}
            await self._send("POST", LOAD_ADAPTER, json=named, once=True)
            self.adapter_name = name
        return answer

    async def reset_prefix_cache(self) -> None:
        await self._post("/reset_prefix_cache")

    async def sleep(self) -> None:
        """Free the server's GPU memory, if it is one that sleeps; requests in flight end."""
        if self._sleeps and not self._sleeping:
            # Level 1: see SLEEP_LEVEL of vllm_engine.py.
            await self._post("/sleep", params={"level": "1", "mode": "abort"})
            self._sleeping = True

    async def _wake_up(self, what: str) -> None:
        """Get the GPU memory of "weights" or "kv_cache" back, if the server sleeps."""
        if self._sleeping:
            await self._post("/wake_up", params={"tags": what}, timeout=CONTROL_SECONDS)

    async def interrupt(self) -> None:
        self._interrupted = True
        await self._post("/pause", params={"mode": "abort", "clear_cache": "false"})

    async def resume(self) -> None:
        if self._interrupted:
            await self._post("/resume")
            self._interrupted = False

    def check_running(self) -> None:
        """Do nothing: requests alone tell whether a server runs."""

    async def comes_back(self) -> bool:
        return not await self._unhealthy_reason()

    async def _unhealthy_reason(self) -> str:
        import httpx

        try:
            async with (
                asyncio.timeout(HEALTH_SECONDS),  # httpx restarts its own with each byte
                httpx.AsyncClient(
                    base_url=self._url,
                    headers=self.headers,
                    timeout=HEALTH_SECONDS,
                    transport=self._transport,
                    verify=_certificates(),
                    trust_env=False,
                ) as client,
                client.stream("GET", "/health") as answer,  # its body is not read
            ):
                pass
        except (httpx.RequestError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            return WRONG_KEY
        healthy = answer.status_code == httpx.codes.OK
        if healthy:
            return ""
        return f"it answered {answer.status_code} to /health"

    async def _complete(
        self,
        request: dict[str, Any],
        session_id: str,
        *,
        read: Callable[[bytes], Any] = json.loads,
    ) -> dict[str, Any]:
        body = {}
        for key, value in request.items():
            if value is not None:
                body[key] = value
        answer = await self._send(
            "POST",
            COMPLETIONS,
            json={"model": self.adapter_name or self._model, **body},
            headers={"x-session-id": session_id},
        )
        fields = self._json(answer, COMPLETIONS, read)
        with self._parsing(COMPLETIONS):
            choice: dict[str, Any] = fields["choices"][0]
        return choice

    async def _get(self, path: str, **arguments: Any) -> Any:
        return self._json(await self._send("GET", path, **arguments), path)

    async def _post(self, path: str, **arguments: Any) -> Any:
        answer = await self._send("POST", path, **arguments)
        if answer.content:
            return self._json(answer, path)
        return {}

    def _json(self, answer: Any, path: str, read: Callable[[bytes], Any] = json.loads) -> Any:
        try:
            return read(answer.content)
        except (ValueError, RecursionError, MemoryError) as error:
            text = answer.text[:QUOTED_CHARACTERS]
            raise EngineError(f"{self.name} answered {path} without JSON: {text!r}") from error

    def _parsing(self, path: str) -> AbstractContextManager[None]:
        return parsing(f"{self.name} answered {path}")

    async def _answer(self, method: str, path: str, **arguments: Any) -> Any:
        """Return the server's answer, read completely; EngineError if it is too long."""
        import httpx

        most = self._limits.answer_bytes
        async with self._client.stream(method, path, **arguments) as answer:
            body = bytearray()
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > most:
                    raise EngineError(f"{self.name} answered {path} with more than {most:,} bytes")
        return httpx.Response(answer.status_code, content=bytes(body))

    async def _send(self, method: str, path: str, *, once: bool = False, **arguments: Any) -> Any:
        """Return the server's answer; resend if the connection broke but the server is healthy.

        Args:
            once: the request must not reach the server twice: a lost answer is an EngineDeadError,
                after which the engine is connected again.
        """
        import httpx

        text = f"{self.name}: the connection for {path} broke {MAX_SENDS} times"
        for _ in range(MAX_SENDS):
            if self._client is None:
                raise EngineDeadError(f"{self.name} is not connected: await engine.start() first")
            try:
                answer = await self._answer(method, path, **arguments)
            except httpx.RequestError as error:
                if await self._unhealthy_reason():
                    text = f"{self.name} is gone: {type(error).__name__}: {error}"
                    raise EngineDeadError(text) from error
                if once:
                    what = f"the answer to {path} was lost: {type(error).__name__}: {error}"
                    raise EngineDeadError(f"{self.name}: {what}") from error
                continue
            if answer.is_success:
                return answer
            quoted = answer.text[:QUOTED_CHARACTERS]
            text = f"{self.name} answered {answer.status_code} to {path}: {quoted}"
            failed = answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
            if failed and await self._unhealthy_reason():
                raise EngineDeadError(text)
            if answer.status_code in (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE):
                await asyncio.sleep(self._limits.resend)
                continue
            if answer.status_code == httpx.codes.CONFLICT:  # the claim was refused
                raise EngineDeadError(text)
            refused = answer.status_code == httpx.codes.BAD_REQUEST
            raise RefusedRequestError(text) if refused else EngineError(text)
        raise EngineError(text)
