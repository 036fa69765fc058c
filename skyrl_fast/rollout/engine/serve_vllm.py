"""`vllm serve` for trainers of this package: its command line and environment variables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from skyrl_fast.rollout.engine.serve_guard import (
    GUARD_VARIABLES,
    EngineGuard,
    guard_environment,
)
from skyrl_fast.rollout.engine.vllm_patches.package_version import let_cpu_package_answer
from skyrl_fast.rollout.engine.vllm_start import (
    SOCKETS,
    VllmSetup,
    engine_args,
    engine_environment,
    socket_folder,
)
from skyrl_fast.rollout.engine.weights.transports.file import weights_folders
from skyrl_fast.system.parent_watch import exit_with_parent, tie_spawned_processes

PARENT_VARIABLE = "SKYRL_FAST_PARENT"  # the process id of a parent with which a server exits
# Arguments of the Python class that the server has no flag for.
_NO_FLAGS = ("model", "use_tqdm_on_load", "disable_log_stats", "enable_log_requests")


def serve_command(setup: VllmSetup, *, host: str, port: int) -> list[str]:
    """Return the command that serves the model's folder on this address.

    Example:
        >>> serve_command(VllmSetup("model"), host="127.0.0.1", port=8001)[3:8]
        ['serve', 'model', '--host', '127.0.0.1', '--port']
    """
    arguments = engine_args(setup)
    command = [sys.executable, "-m", "skyrl_fast.rollout.engine.serve_vllm", "serve", setup.model]
    command += ["--host", host, "--port", str(port), "--disable-log-stats"]
    command += ["--disable-uvicorn-access-log"]
    command += ["--middleware", f"{EngineGuard.__module__}.{EngineGuard.__name__}"]
    for name, value in arguments.items():
        if name not in _NO_FLAGS and value is not None:
            command += _flag(name, value)
    return command


def serve_environment(
    setup: VllmSetup,
    environment: Mapping[str, str],
    *,
    key: str,
    weights_folder: str | None = None,
    trainer: str | None = None,
    reads_gpu: bool = False,
) -> dict[str, str]:
    """Return the server's environment variables; they enable the calls for weights and pauses."""
    defaults = {**engine_environment(setup), "VLLM_SERVER_DEV_MODE": "1"}
    folders = weights_folders(weights_folder)
    guard = guard_environment(
        key,
        folders,
        trainer=trainer,
        adapter=setup.adapter,
        sleeps=bool(setup.engine.enable_sleep_mode),
        reads_gpu=reads_gpu,
    )
    inherited = {name: value for name, value in environment.items() if name not in GUARD_VARIABLES}
    return {**defaults, **inherited, **guard}


def serve(
    setup: VllmSetup,
    *,
    host: str,
    port: int,
    key: str,
    weights_folder: str | None = None,
    execute: Callable[[str, list[str], Mapping[str, str]], None] = os.execve,
) -> None:
    """Replace this process by the server; does not return.

    Args:
        setup: of its engine.
        host, port: to listen at.
        key: that its requests need.
        weights_folder: that it shares with trainers.
        execute: replaces this process by a program, with a command and variables.
    """
    command = serve_command(setup, host=host, port=port)
    environment = serve_environment(setup, os.environ, key=key, weights_folder=weights_folder)
    execute(command[0], command, environment)


def run_vllm() -> None:
    """Run vLLM's own command line; its engine's processes exit with this one."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        exit_with_parent(int(parent))
    tie_spawned_processes()
    from vllm.entrypoints.cli.main import main

    let_cpu_package_answer()
    with socket_folder() as sockets:
        os.environ.setdefault(SOCKETS, sockets)
        main()


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if name == "device_ids":
        return [f"--{flag}", ",".join(map(str, value))]
    if isinstance(value, list):
        return [f"--{flag}", *map(str, value)]
    if isinstance(value, dict):
        text = json.dumps(value)
    else:
        text = str(value)
    return [f"--{flag}", text]


if __name__ == "__main__":
    run_vllm()
