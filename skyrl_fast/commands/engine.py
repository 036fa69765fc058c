"""The command `skyrl-fast engine`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from skyrl_fast.commands.command import (
    add_config_arguments,
    as_usage_error,
    load_settings,
    needs_extra,
)

if TYPE_CHECKING:
    from skyrl_fast.config.model_folder import ModelHub

HELP = "serve a model to trainers"
DESCRIPTION = (
    "Run vLLM's server for generator.inference_engine.external_server_urls. Requests need the key "
    "in generator.inference_engine.api_key_file, which is created if it is missing; over a network "
    "it is not encrypted."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")


def run(
    options: argparse.Namespace,
    *,
    hub: ModelHub | None = None,
    execute: Callable[[str, list[str], Mapping[str, str]], None] = os.execve,
) -> int:
    """Replace this process by the server.

    Args:
        options: parsed arguments.
        hub: where models are that are no folder; None: the Hugging Face hub.
        execute: replaces this process by a program, with a command and variables.
    """
    config = load_settings(options.config, options.overrides)
    with needs_extra("train,vllm"):
        from skyrl_fast.config.model_folder import HUB, model_folder
        from skyrl_fast.rollout.engine.api_key import engine_key
        from skyrl_fast.rollout.engine.from_settings import key_file, make_vllm_setup
        from skyrl_fast.rollout.engine.protocol import EngineDeadError
        from skyrl_fast.rollout.engine.serve_vllm import serve
        from skyrl_fast.rollout.engine.vllm_start import check_model_folder
    with as_usage_error(ValueError, EngineDeadError):
        path = str(config.trainer.policy.model.path)
        setup = make_vllm_setup(config, str(model_folder(path, hub=hub or HUB)))
        check_model_folder(setup)
        key = engine_key(key_file(config))
    serve(
        replace(setup, log_file=None),
        host=options.host,
        port=options.port,
        key=key,
        weights_folder=config.generator.inference_engine.weight_sync_path,
        execute=execute,
    )
    raise AssertionError("unreachable: the server has replaced this process")
