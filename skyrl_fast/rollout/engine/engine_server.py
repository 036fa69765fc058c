"""The server of one engine as a child process: it is started, waited for, and ends with this one.

Design: docs/design/020-several-gpus.md.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_fast.rollout.engine.serve_vllm import (
    PARENT_VARIABLE,
    serve_command,
    serve_environment,
)
from skyrl_fast.rollout.engine.vllm_start import VllmSetup, check_model_folder
from skyrl_fast.system.log_tail import log_tail

_CHOSEN_PORTS: set[int] = set()
LOG_LINES = 5  # last lines of the server's log, quoted when it has exited


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """Who may use a server, and how it gets weights.

    Args:
        key: that its requests need.
        trainer: address of the trainer's group, over which weights come; None: they come as a file.
        reads_gpu: whether workers read them from the trainer's GPU memory.
        weights_folder: that trainer and server share; None: this machine's shared memory.
    """

    key: str = field(repr=False)
    trainer: str | None = None
    weights_folder: str | None = None
    reads_gpu: bool = False


class EngineServer:
    """A `vllm serve` that this process starts; it exits with this process, however that ends.

    Args:
        make_setup: called when it starts, as a model may have to be downloaded; the `log_file` is
            the server's log.
        access: who may use it.
        command: returns the command of a server, given its settings, host and port.
    """

    def __init__(
        self,
        make_setup: Callable[[], VllmSetup],
        access: ServerAccess,
        *,
        command: Callable[..., list[str]] = serve_command,
    ) -> None:
        self._make_setup = make_setup
        self._access = access
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path(os.devnull)
        self._started = threading.Event()

    def start(self, address: str) -> str:
        """Start it at an address of this machine; return its URL, which does not answer yet.

        The thread that calls this must live as long as the process.

        Raises:
            EngineDeadError: there is no model.
        """
        setup = self._make_setup()
        check_model_folder(setup)
        port = _free_port(address)
        self._log = Path(setup.log_file or os.devnull)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(setup, host=address, port=port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(setup, os.environ),
                # What stops the trainer does not stop it: the trainer's last step may need it.
                start_new_session=True,
            )
        self._started.set()
        return f"http://{address}:{port}"

    def wait(self) -> str:
        """Wait for its exit; return its exit code and the end of its log."""
        self._started.wait()
        assert self._process is not None
        code = self._process.wait()
        lines = log_tail(self._log).splitlines()[-LOG_LINES:]
        return f"its server exited with code {code}; {self._log} ends: {' | '.join(lines)}"

    def kill(self) -> None:
        """End it, if it runs; its own processes exit with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _environment(self, setup: VllmSetup, variables: Mapping[str, str]) -> dict[str, str]:
        access = self._access
        environment = serve_environment(
            setup,
            variables,
            key=access.key,
            weights_folder=access.weights_folder,
            trainer=access.trainer,
            reads_gpu=access.reads_gpu,
        )
        return {**environment, PARENT_VARIABLE: str(os.getpid())}


def _free_port(address: str) -> int:
    """Return a port that is free now; if another process takes it, the server does not start."""
    while True:
        with socket.create_server((address, 0)) as listener:
            port = int(listener.getsockname()[1])
        # Not one of another server of this process, which does not listen yet.
        if port not in _CHOSEN_PORTS:
            _CHOSEN_PORTS.add(port)
            return port
