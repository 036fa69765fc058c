"""A real `vllm serve` in another process, with this package's guard and without."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from examples.asynchronous.two_servers import end, free_ports
from skyrl_fast.config import InferenceEngineConfig
from skyrl_fast.rollout.engine.serve_vllm import (
    PARENT_VARIABLE,
    serve_command,
    serve_environment,
)
from skyrl_fast.rollout.engine.vllm_start import VllmSetup

KEY = "k" * 32


@contextmanager
def server(model: Path, log: Path, *without: str, **options: Any) -> Iterator[str]:
    """`vllm serve` without these options, which have a value each; its address."""
    (port,) = free_ports(1)
    engine = InferenceEngineConfig(num_threads=1)
    config = VllmSetup(str(model), engine, max_model_len=256, **options)
    command = serve_command(config, host="127.0.0.1", port=port)
    for option in without:
        at = command.index(option)
        del command[at : at + 2]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}  # of vLLM's own call, without a guard
            | {PARENT_VARIABLE: str(os.getpid())}
            | serve_environment(config, os.environ, key=KEY),
            start_new_session=True,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        end(process)


def plain_server(model: Path, log: Path, **options: Any) -> AbstractContextManager[str]:
    """`vllm serve` as without this package."""
    return server(model, log, "--worker-extension-cls", "--middleware", **options)
