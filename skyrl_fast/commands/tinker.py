"""The command `skyrl-fast tinker`: a server for the unmodified Tinker SDK."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_fast.commands.command import (
    as_override,
    as_usage_error,
    count,
    log_to_stderr,
    needs_extra,
    say,
)
from skyrl_fast.system.event_loop import run_coroutine

if TYPE_CHECKING:
    from skyrl_fast.config import Config
    from skyrl_fast.tinker.start import TinkerOptions

KEY_FILE = "tinker_key"  # in the server's folder
KEY_PREFIX = "tml-"  # that the SDK asks of a key
DEFAULT_PORT = 8070
DEFAULT_FOLDER = "runs/tinker"
DEFAULT_RANK = 32  # the SDK's own
ALPHA = 32  # of every adapter, whatever its rank

HELP = "serve a model to programs that use the Tinker SDK"
DESCRIPTION = (
    "Train and sample LoRA adapters of one model by Tinker's API, on this machine. Programs that "
    "use the Tinker SDK run unmodified with the two variables that are printed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="model folder or hub name: trainer.policy.model.path")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings of the trainer, such as trainer.max_tokens_per_microbatch=8192",
    )
    parser.add_argument(
        "--max-rank",
        type=count,
        default=DEFAULT_RANK,
        metavar="R",
        help=f"largest rank of an adapter; default: {DEFAULT_RANK}",
    )
    parser.add_argument(
        "--name",
        nargs="+",
        metavar="NAME",
        help="names by which programs ask for the model; default: MODEL as it is given",
    )
    parser.add_argument("--host", help="address to listen on; default: 127.0.0.1")
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"port to listen on; default: {DEFAULT_PORT}; 0: a free one",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        default=DEFAULT_FOLDER,
        help="folder of checkpoints, which outlive the server, its key and the engine's log",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse adapters that lack what a program asks for, in place of a warning",
    )


def run(options: argparse.Namespace) -> int:
    log_to_stderr()
    with needs_extra("train"), as_usage_error(ValueError):
        config = make_config(options.model, options.overrides)
    with needs_extra("train,tinker"):
        import skyrl_fast.gateway.server  # noqa: F401
        from skyrl_fast.tinker.wire import messages

        messages()
    with as_usage_error(ValueError, ImportError):
        run_coroutine(_serve(config, _options(options)))
    return 0


def make_config(model: str, overrides: list[str]) -> Config:
    """Return the trainer's settings for the server.

    Raises:
        ValueError: a setting is unknown, out of range, or has no meaning here.
    """
    from skyrl_fast.config.loading import as_config, check_config, read_yaml
    from skyrl_fast.tinker.settings import check_settings

    lora = "trainer.policy.model.lora"
    always = [
        as_override("trainer.policy.model.path", model),
        f"{lora}.rank=1",  # so that there are adapters; each program chooses its own rank
        f"{lora}.alpha={ALPHA}",
    ]
    config = as_config(read_yaml(None, [*always, *overrides]))
    check_settings(config, as_config(read_yaml(None, always)))
    check_config(config, has_prompts=True)
    return config


def _options(options: argparse.Namespace) -> TinkerOptions:
    from skyrl_fast.tinker.start import TinkerOptions

    return TinkerOptions(
        folder=Path(expanduser(options.folder)),
        names=tuple(options.name or ()),
        max_rank=options.max_rank,
        strict=options.strict,
        host=options.host,
        port=options.port,
    )


async def _serve(config: Config, options: TinkerOptions) -> None:
    from skyrl_fast.rollout.engine.api_key import read_or_create_key
    from skyrl_fast.rollout.engine.from_settings import ENGINE_LOG
    from skyrl_fast.rollout.engine.start_report import report_start
    from skyrl_fast.tinker.start import make_service, serving

    options.folder.mkdir(parents=True, exist_ok=True)
    key = KEY_PREFIX + read_or_create_key(options.folder / KEY_FILE, "--folder")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    service = make_service(config, options)
    try:
        log = options.folder / ENGINE_LOG
        with report_start(f"vLLM starts; its log: {log}", log, say):
            await service.start()
        async with serving(service, key, host=options.host, port=options.port) as url:
            sys.stdout.write(_greeting(service.base.names[0], url, key))
            sys.stdout.flush()
            await stop.wait()
    finally:
        await service.stop_sampler()


def _greeting(name: str, url: str, key: str) -> str:
    return (
        f"serving {name} to programs that use the Tinker SDK; for each, set\n"
        f"  export TINKER_BASE_URL={url}\n"
        f"  export TINKER_API_KEY={key}\n"
        f"chat clients, with that key: {url}/v1 for OpenAI's, {url} for Anthropic's; "
        f"their model is {name} or a tinker:// path\n"
    )
