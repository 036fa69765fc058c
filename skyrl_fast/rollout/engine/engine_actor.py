"""The Ray actor of an engine: it runs the engine's server as a child process on its node.

Design: docs/design/020-several-gpus.md.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from skyrl_fast.rollout.engine.serve_vllm import (
    PARENT_VARIABLE,
    serve_command,
    serve_environment,
)
from skyrl_fast.rollout.engine.vllm_start import VllmSetup, check_model_folder
from skyrl_fast.system.log_tail import log_tail

LOG_LINES = 5  # last lines of the server's log, quoted when it has exited


class EngineActor:
    """Starts a server on this node; it exits with this process, however that ends.

    Args:
        make_setup: called on the engine's node, whose folders may differ from the trainer's; its
            `log_file` is the server's log.
        trainer: address from which weights are broadcast; None: they come as a file.
    """

    def __init__(
        self,
        make_setup: Callable[[], VllmSetup],
        *,
        key: str,
        trainer: str | None,
        weights_folder: str | None,
        folder: str,
    ) -> None:
        enter(folder)
        self._make_setup = make_setup
        self._key = key
        self._trainer = trainer
        self._weights_folder = weights_folder
        self._server: subprocess.Popen[bytes] | None = None
        self._log = Path(os.devnull)
        self._serving = threading.Event()

    def serve(self) -> str:
        """Start the server on this node's address alone; return its URL, not answering yet."""
        import ray

        setup = self._make_setup()
        check_model_folder(setup)
        address = str(ray.util.get_node_ip_address())
        port = _free_port(address)
        environment = serve_environment(
            setup,
            os.environ,
            key=self._key,
            weights_folder=self._weights_folder,
            trainer=self._trainer,
        )
        self._log = Path(setup.log_file or os.devnull)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            # The thread that this is lives as long as the process.
            self._server = subprocess.Popen(
                serve_command(setup, host=address, port=port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment, PARENT_VARIABLE: str(os.getpid())},
            )
        self._serving.set()
        return f"http://{address}:{port}"

    def ending(self) -> str:
        """Wait for the server's exit; return its exit code and the end of its log."""
        self._serving.wait()
        assert self._server is not None
        code = self._server.wait()
        lines = log_tail(self._log).splitlines()[-LOG_LINES:]
        return f"its server exited with code {code}; {self._log} ends: {' | '.join(lines)}"


def enter(folder: str) -> None:
    """Make it this process's working directory, for relative paths, if the node has it."""
    with contextlib.suppress(OSError):
        os.chdir(folder)


def _free_port(address: str) -> int:
    """Return a port that is free now; if another process takes it, the server does not start."""
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])
