"""The command `skyrl-fast gateway`: the gateway without the trainer, which records sessions."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from os.path import expanduser
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from skyrl_fast.commands.command import (
    add_config_arguments,
    as_override,
    as_usage_error,
    log_to_stderr,
    needs_extra,
    say,
)
from skyrl_fast.system.event_loop import run_coroutine

if TYPE_CHECKING:
    from skyrl_fast.config import Config
    from skyrl_fast.gateway.sessions import Sessions
    from skyrl_fast.rollout.engine.pool import EnginePool
    from skyrl_fast.rollout.engine.protocol import Sampler

log = logging.getLogger(__name__)

KEY_FILE = "gateway_key"  # in the folder of the recording
DEFAULT_PORT = 8080
DEFAULT_RUN = "runs/gateway"
# Where there is no configuration file: a long context, and as many calls as an agent may make.
MAX_CALLS = 10_000
MAX_CONTEXT = 32_768
MAX_ANSWER = 4_096
SESSION_SECONDS = 24 * 3600


HELP = "record the calls of agents, without training"
DESCRIPTION = (
    "Serve a model by OpenAI's and Anthropic's APIs, and record sessions with the exact tokens. "
    "`skyrl-fast export` and `skyrl-fast view` read them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, is_required=False)
    parser.add_argument("--model", help="model folder or hub name: trainer.policy.model.path")
    parser.add_argument(
        "--engine",
        nargs="+",
        metavar="URL",
        help="servers of the model (`skyrl-fast engine` or `vllm serve`) in place of an engine in "
        "this process",
    )
    parser.add_argument("--host", help="address to listen on: agent.host; default: 127.0.0.1")
    parser.add_argument(
        "--port",
        type=int,
        help=f"port to listen on: agent.port; default: {DEFAULT_PORT}; 0: a free one",
    )
    parser.add_argument(
        "--record",
        metavar="DIR",
        default=DEFAULT_RUN,
        help="folder of the recorded sessions; those that it holds are kept",
    )


def run(options: argparse.Namespace) -> int:
    log_to_stderr()
    with needs_extra("train"), as_usage_error(ValueError):
        config = config_of(options)
    with needs_extra("train,gateway"):
        import skyrl_fast.gateway.server  # noqa: F401
    with as_usage_error(ValueError, ImportError):
        run_coroutine(_serve(config))
    return 0


def config_of(options: argparse.Namespace) -> Config:
    """Return the settings of the command line: the file's, and those of its options."""
    from skyrl_fast.config.loading import (
        as_config,
        check_config,
        check_without_adapter,
        read_yaml,
    )

    overrides = list(options.overrides)
    path = options.config
    if path is not None and "=" in path:  # no file: the first override
        overrides = [path, *overrides]
        path = None
    if path is None and options.model is None:
        raise ValueError("gateway: expected a configuration file or --model, got neither")
    if options.port is None:
        given = []
    else:
        given = [f"agent.port={options.port}"]
    for key, text in (
        ("agent.host", options.host),
        ("trainer.run_path", options.record),  # not the one of a file, which is that of training
        ("trainer.policy.model.path", options.model),
    ):
        if text is not None:
            given.append(as_override(key, text))
    if options.engine:
        engine = "generator.inference_engine"
        given += [as_override(f"{engine}.external_server_urls", options.engine)]
    if path is None:
        as_config(read_yaml(None, [*given, *overrides]))  # typos, before the model is looked for
        given = [*_lengths(options.model), *given]
    values = read_yaml(path, [*given, *overrides])
    agent = values.setdefault("agent", {})
    if isinstance(agent, dict):  # else `as_config` refuses it
        agent.setdefault("port", DEFAULT_PORT)
    config = as_config(values)
    config.trainer.run_path = expanduser(config.trainer.run_path)
    check_config(config, has_prompts=True)
    check_without_adapter(config, "skyrl-fast gateway")
    return config


def _lengths(model: str) -> list[str]:
    from skyrl_fast.config.model_folder import model_folder
    from skyrl_fast.rollout.engine.from_settings import read_positions

    context = min(read_positions(str(model_folder(model))) or MAX_CONTEXT, MAX_CONTEXT)
    answer = min(MAX_ANSWER, context // 4)
    return [
        f"generator.max_turns={MAX_CALLS}",
        f"generator.max_input_length={context - answer}",
        f"generator.sampling_params.max_generate_length={answer}",
        f"generator.trajectory_timeout_seconds={SESSION_SECONDS}",
    ]


async def _serve(config: Config) -> None:
    from skyrl_fast.config.model_folder import model_folder
    from skyrl_fast.rollout.engine.from_settings import describe_start, make_untrained_engines
    from skyrl_fast.rollout.engine.pool import EnginePool
    from skyrl_fast.rollout.engine.start_report import report_start
    from skyrl_fast.train.flow.frozen_heap import freeze_heap
    from skyrl_fast.train.model.loading import load_tokenizer

    folder = str(model_folder(str(config.trainer.policy.model.path)))
    run = Path(config.trainer.run_path)
    run.mkdir(parents=True, exist_ok=True)  # for engine.log
    restarts = config.generator.inference_engine.max_restarts
    pool = EnginePool(make_untrained_engines(config, folder), max_restarts=restarts)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(config, pool, load_tokenizer(folder), run=run) as sessions:

        async def start() -> None:
            begin, log = describe_start(config, folder)
            with report_start(begin, log, say):
                await pool.start()

        starting = asyncio.create_task(start())
        stopped = asyncio.create_task(stop.wait())
        watching = None
        try:
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                sys.stdout.write(_greeting(config, sessions, run))
                sys.stdout.flush()
                watching = asyncio.create_task(_keep_running(pool))
                with freeze_heap():
                    await asyncio.wait([watching, stopped], return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    watching.result()
        finally:
            tasks = [task for task in (starting, stopped, watching) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await pool.close()


async def _keep_running(pool: EnginePool) -> None:
    while True:
        await pool.wait_for_fault()
        await pool.restart()


@asynccontextmanager
async def serving(
    config: Config, engine: Sampler, tokenizer: Any, *, run: Path
) -> AsyncIterator[Sessions]:
    """Serve sessions of an engine inside the block, and record them.

    Args:
        config: settings of the generator and the agent.

    Raises:
        ValueError: a package is missing, the folder or the address is in use, or a tokenizer
            without end token.
        StoreError: sessions that were open at the end cannot be written.
    """
    from skyrl_fast.gateway.start import check_packages, gateway_policy

    check_packages()
    from skyrl_fast.gateway.recording import Recording
    from skyrl_fast.gateway.server import Gateway
    from skyrl_fast.gateway.sessions import Sessions
    from skyrl_fast.rollout.engine.api_key import read_or_create_key
    from skyrl_fast.rollout.engine.weights.gate import WeightGate
    from skyrl_fast.rollout.loop_settings import loop_settings
    from skyrl_fast.rollout.policy_calls import PolicyCalls

    calls = PolicyCalls(engine, WeightGate(0), tokenizer, config.trainer.seed)
    policy = gateway_policy(config.agent, calls, loop_settings(config))
    server = Gateway(host=config.agent.host, port=config.agent.port)
    recording = Recording(run, tokenizer)
    try:
        key = read_or_create_key(run / KEY_FILE, "--record")
        seconds = config.generator.trajectory_timeout_seconds
        sessions = Sessions(server, policy, recording, key=key, seconds=seconds)
        await server.start()
        try:
            yield sessions
        finally:
            try:
                await sessions.close()
            finally:
                await server.close()
    finally:
        recording.close()


def _greeting(config: Config, sessions: Sessions, run: Path) -> str:
    return (
        f"serving {config.trainer.policy.model.path} as {config.agent.model!r} at {sessions.url}\n"
        f'new session: curl -X POST {sessions.url}/sessions -H "Authorization: Bearer '
        f'$(cat {quote(str(run / KEY_FILE))})"\n'
        f"recorded sessions: skyrl-fast view {quote(str(run))}\n"
    )
