"""A server's parts, from settings, and its socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from skyrl_fast.config import Config
from skyrl_fast.config.model_folder import model_folder
from skyrl_fast.gateway.connections import Connection
from skyrl_fast.gateway.server import BACKLOG, KEEP_ALIVE_SECONDS, QuietServer
from skyrl_fast.rollout.engine.from_settings import ENGINE_LOG, read_positions
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import ServedAdapters, VllmSetup
from skyrl_fast.system.network_interface import LOOPBACK, http_url, listen_at
from skyrl_fast.tinker.app import TinkerApp
from skyrl_fast.tinker.checkpoints import CheckpointStore
from skyrl_fast.tinker.recording import DatumRecorder
from skyrl_fast.tinker.sampling import SnapshotSampler, VllmSampler
from skyrl_fast.tinker.service import TinkerService
from skyrl_fast.tinker.shared import ServedBase
from skyrl_fast.tinker.training import AdapterTrainer
from skyrl_fast.tinker.wire import messages
from skyrl_fast.train.model.loading import hide_progress_bars
from skyrl_fast.train.model.models import load_base_policy

MAX_CONTEXT = 32_768  # of a model that is trained for longer ones, whose caches are larger
RUNS = "runs"  # in the server's folder


@dataclass(frozen=True, slots=True)
class TinkerOptions:
    """What the command takes besides the trainer's settings.

    Args:
        names: of the model, by which clients ask for it; empty: the one of the settings.
        max_rank: the largest rank of an adapter.
        strict: see `ServedBase`.
        folder: of the server: checkpoints, key and log.
        host, port: to listen at; 0: a free port.
    """

    folder: Path
    names: tuple[str, ...] = ()
    max_rank: int = 32
    strict: bool = False
    host: str | None = None
    port: int = 0


def make_service(
    config: Config, options: TinkerOptions, sampler: SnapshotSampler | None = None
) -> TinkerService:
    """Return the service of the settings' model; its sampler is not started yet.

    Args:
        sampler: None: vLLM in this process.

    Raises:
        ValueError: there is no usable model, or the settings do not fit it.
        ImportError: the SDK is not installed.
    """
    messages()
    hide_progress_bars()
    path = str(config.trainer.policy.model.path)
    folder = str(model_folder(path))
    longest = min(read_positions(folder) or MAX_CONTEXT, MAX_CONTEXT)
    base_policy = load_base_policy(config)
    trainer = AdapterTrainer(
        base_policy,
        folder,
        config.trainer.policy.model.lora,
        max_rank=options.max_rank,
        max_length=longest,
    )
    base = ServedBase(
        names=options.names or (path,),
        tokenizer=folder,
        arch=type(base_policy.model).__name__,
        max_length=longest,
        strict=options.strict,
    )
    store = CheckpointStore(options.folder / RUNS)
    if sampler is None:
        adapters = ServedAdapters(options.max_rank, trainer.target_modules)
        setup = _engine_setup(config, folder, longest, options, adapters)
        sampler = VllmSampler(VllmEngine(setup))
    recorder = None
    if config.trainer.dump_trajectories:
        recorder = DatumRecorder(options.folder / RUNS, folder)
    return TinkerService(base, trainer, sampler, store, recorder=recorder)


def _engine_setup(
    config: Config,
    folder: str,
    longest: int,
    options: TinkerOptions,
    adapters: ServedAdapters,
) -> VllmSetup:
    return VllmSetup(
        model=folder,
        engine=replace(config.generator.inference_engine, model_dtype=config.engine_dtype),
        max_model_len=longest,
        seed=config.trainer.seed,
        log_file=str(options.folder / ENGINE_LOG),
        served_adapters=adapters,
    )


@asynccontextmanager
async def serving(
    service: TinkerService, key: str, *, host: str | None = None, port: int = 0
) -> AsyncIterator[str]:
    """Serve in the block; yield the URL.

    Raises:
        ValueError: the address is not available.
    """
    address = host or LOOPBACK
    try:
        listening = listen_at(address, port, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host, --port: cannot listen at {address}:{port}: {error}") from error
    config = uvicorn.Config(
        TinkerApp(service, key),
        http=Connection,
        log_config=None,
        log_level="warning",
        lifespan="off",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    server = QuietServer(config)
    answering = asyncio.create_task(server.serve(sockets=[listening]))
    watching = asyncio.create_task(service.run())
    try:
        yield http_url(address, listening.getsockname()[1])
    finally:
        watching.cancel()
        server.should_exit = server.force_exit = True
        await answering
        await service.close()
