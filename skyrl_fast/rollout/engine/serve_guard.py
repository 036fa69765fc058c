"""The guard of `skyrl-fast engine`: vLLM's development server, reduced to a trainer's requests.

vLLM's `--api-key` protects /v1 alone; the calls for weights and pauses answer everyone, and
/collective_rpc runs every method of the worker by its name.

What it protects, and from whom: docs/guide/security.md.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_fast.rollout.engine.weights.group import BACKENDS, IPC
from skyrl_fast.rollout.engine.weights.transfer import IN_MEMORY, LOAD
from skyrl_fast.rollout.engine.weights.transports import TRANSPORTS
from skyrl_fast.rollout.engine.weights.transports.file import check_path
from skyrl_fast.system.child_environment import KEY_VARIABLE
from skyrl_fast.system.http_guard import (
    App,
    HttpGuard,
    Receive,
    RefusedError,
    Route,
    Scope,
    Send,
    keep_body,
    refuse,
)

FOLDERS_VARIABLE = "SKYRL_FAST_WEIGHTS_FOLDERS"
TRAINER_VARIABLE = "SKYRL_FAST_TRAINER"
TRAINER_HEADER = "x-skyrl-fast-trainer"
CLAIM_HEADER = "x-skyrl-fast-claim"
CLAIM_FIRST = "first"  # takes the server from another trainer, which may have been killed
CLAIM_AGAIN = "again"  # after the server was restarted
ADAPTER_VARIABLE = "SKYRL_FAST_ADAPTER"
SLEEPS_VARIABLE = "SKYRL_FAST_SLEEPS"  # set where the server's trainer shares its GPUs
READS_GPU_VARIABLE = "SKYRL_FAST_READS_GPU"  # set where it opens the memory of its trainer there
GUARD_VARIABLES = frozenset(
    {
        KEY_VARIABLE,
        FOLDERS_VARIABLE,
        TRAINER_VARIABLE,
        ADAPTER_VARIABLE,
        SLEEPS_VARIABLE,
        READS_GPU_VARIABLE,
    }
)
LOAD_ADAPTER = "/v1/load_lora_adapter"  # as vLLM has it, for an adapter that workers have
MAX_NAME = 100  # length of an adapter's name: its trainer and version
MAX_PORT = 2**16
MAX_MEMBERS = 2**16  # members of a process group
MAX_BODY_BYTES = 64 << 20  # a prompt of millions of token ids
KWARGS = {"kwargs"}
UNKNOWN_CALL = "no such method here, or other arguments than a trainer's"
PAUSE_QUERY = b"mode=abort&clear_cache=false"
SLEEP_QUERY = b"level=1&mode=abort"
WAKE_QUERIES = (b"tags=weights", b"tags=kv_cache")


class EngineGuard(HttpGuard):
    """The guard as vLLM creates it from `--middleware`; its settings are environment variables."""

    def __init__(self, app: App) -> None:
        folders = []
        for text in os.environ[FOLDERS_VARIABLE].split(os.pathsep):
            folders.append(Path(text))
        trainer, adapter = map(os.environ.get, (TRAINER_VARIABLE, ADAPTER_VARIABLE))
        super().__init__(
            TrainerClaim(app if adapter is None else AdapterNames(app)),
            engine_routes(
                folders,
                trainer=trainer,
                adapter=adapter,
                sleeps=SLEEPS_VARIABLE in os.environ,
                reads_gpu=READS_GPU_VARIABLE in os.environ,
            ),
            key=os.environ[KEY_VARIABLE],
            max_body_bytes=MAX_BODY_BYTES,
        )


class TrainerClaim:
    """Pass the requests of the trainer whose weights the server holds; others get status 409.

    A trainer names itself with each request, and claims the server with its first one. Thus the
    trainer before it, and one whose server was restarted, notice before they get a token that
    their policy did not sample. Clients that update no weights send no name, and pass.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._trainer: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        trainer = headers.get(TRAINER_HEADER.encode())
        if trainer is not None:
            claim = headers.get(CLAIM_HEADER.encode(), b"").decode("latin-1")
            if claim == CLAIM_FIRST or (claim == CLAIM_AGAIN and self._trainer is None):
                self._trainer = trainer
            if self._trainer is None:
                await refuse(RefusedError(409, "the server was restarted: it has no weights"), send)
                return
            if self._trainer != trainer:
                await refuse(RefusedError(409, "another trainer updates this server now"), send)
                return
        await self._app(scope, receive, send)


class AdapterNames:
    """Serve the trainer's adapter, which workers have loaded, under the name of its version.

    vLLM's own call of this path numbers adapters by itself, and reads them from a folder.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != LOAD_ADAPTER:
            await self._app(scope, receive, send)
            return
        from vllm.lora.request import LoRARequest

        call = json.loads((await receive())["body"])
        name = call["lora_name"]
        served = scope["app"].state.openai_serving_models.lora_requests
        served.clear()  # the workers have no other one
        served[name] = LoRARequest(name, call["version"], IN_MEMORY)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})


def guard_environment(
    key: str,
    folders: Sequence[Path],
    *,
    trainer: str | None = None,
    adapter: Mapping[str, Any] | None = None,
    sleeps: bool = False,
    reads_gpu: bool = False,
) -> dict[str, str]:
    """Return the variables that `EngineGuard` reads.

    Args:
        key: of the requests.
        folders: of weights.
        trainer: address of one whose group the workers join.
        adapter: config of the adapter that the trainer sends.
        sleeps: whether the trainer may let the server free its GPUs' memory.
        reads_gpu: whether the group is one by CUDA IPC: the workers open GPU memory by handles that
            the trainer sends. Only for a server that the trainer has started.
    """
    if trainer is None:
        broadcasts = {}
    else:
        broadcasts = {TRAINER_VARIABLE: str(ipaddress.ip_address(trainer))}
    if adapter is None:
        adapts = {}
    else:
        adapts = {ADAPTER_VARIABLE: json.dumps(adapter)}
    rests = {SLEEPS_VARIABLE: "1"} if sleeps else {}
    reads = {READS_GPU_VARIABLE: "1"} if reads_gpu else {}
    shared = os.pathsep.join(map(str, folders))
    return {KEY_VARIABLE: key, FOLDERS_VARIABLE: shared, **broadcasts, **adapts, **rests, **reads}


def engine_routes(
    folders: Sequence[Path],
    *,
    trainer: str | None = None,
    adapter: str | None = None,
    sleeps: bool = False,
    reads_gpu: bool = False,
) -> list[Route]:
    more = []
    check = partial(_check_call, folders, trainer, adapter, reads_gpu)
    if adapter is not None:
        more.append(Route("POST", LOAD_ADAPTER, check=_check_name))
    if sleeps:
        more.append(Route("POST", "/sleep", queries=(SLEEP_QUERY,)))
        more.append(Route("POST", "/wake_up", queries=WAKE_QUERIES))
    return [
        Route("GET", "/health"),
        Route("GET", "/v1/models"),
        Route("POST", "/v1/completions", check=keep_body),
        Route("POST", "/collective_rpc", check=check),
        *more,
        Route("POST", "/pause", queries=(PAUSE_QUERY,)),
        Route("POST", "/resume"),
        Route("POST", "/reset_prefix_cache"),
    ]


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "expected JSON") from error


def _check_name(body: bytes) -> bytes:
    match _parse(body):
        case {"lora_name": str(name), "version": int(version), **rest} if (
            not rest and 0 < len(name) <= MAX_NAME and version > 0
        ):
            return json.dumps({"lora_name": name, "version": version}).encode()
    raise RefusedError(403, "expected an adapter's name and version")


def _check_adapter(call: Mapping[Any, Any], adapter: str | None) -> dict[str, Any]:
    """Return the arguments by which a call loads an adapter; none: it loads the model's weights."""
    if "kwargs" not in call and adapter is None:
        return {}
    match call.get("kwargs"):
        case {"adapter": str(given), "versions": {"": int(version), **others}, **rest} if (
            not others and not rest and given == adapter and version > 0
        ):
            return {"kwargs": {"adapter": given, "versions": {"": version}}}
    if adapter is None:
        what = "expected the model's weights"
    else:
        what = f"expected the adapter {adapter}"
    raise RefusedError(403, f"{what}: start server and run with the same settings of LoRA")


def _check_call(
    folders: Sequence[Path],
    trainer: str | None,
    adapter: str | None,
    reads_gpu: bool,
    body: bytes,
) -> bytes:
    allowed: dict[str, Any]
    match _parse(body):
        case {"method": str(method), "args": [*arguments], **rest} if (
            method.startswith(LOAD) and rest.keys() <= KWARGS
        ):
            transport = TRANSPORTS.get(method.removeprefix(LOAD))
            if transport and (reads_gpu or not transport.reads_gpu):
                checked = transport.check(arguments, folders, trainer)
            else:
                checked = None
            if checked is None:
                raise RefusedError(403, UNKNOWN_CALL)
            allowed = {"method": method, "args": checked, **_check_adapter(rest, adapter)}
        case {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(text), **more},
            **rest,
        } if not rest and not more:
            path = check_path(f"{text}/weights.safetensors", folders)
            allowed = {"method": "reload_weights", "kwargs": {"weights_path": str(path.parent)}}
        case {
            "method": "join_weights_group",
            "args": [str(backend), str(address), int(port), int(size)],
            **rest,
        } if not rest:
            backends = (IPC,) if reads_gpu else BACKENDS
            # Any other address would be one that the server connects to for whoever asks.
            if backend not in backends or address != trainer:
                raise RefusedError(403, "expected the broadcast of this server's trainer")
            if not (0 < port < MAX_PORT and 1 < size < MAX_MEMBERS):
                raise RefusedError(403, "expected a port and a number of members")
            allowed = {"method": "join_weights_group", "args": [backend, address, port, size]}
        case {
            "method": ("apply_patches" | "weights_dtype") as method,
            **rest,
        } if not rest:
            allowed = {"method": method}
        case _:
            raise RefusedError(403, UNKNOWN_CALL)
    return json.dumps(allowed).encode()
