"""A search server that runs during a `with` block."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_fast.system.child_environment import environment_without_key
from skyrl_fast.system.log_tail import log_tail
from skyrl_fast.system.network_interface import LOOPBACK

START_SECONDS = 120.0  # for the server to become healthy
POLL_SECONDS = 0.1
STOP_SECONDS = 5.0  # grace period before SIGKILL
LOG_TAIL = 2000  # characters of the log that an error shows


@contextmanager
def retrieval_server(corpus: Path, *, log_file: Path) -> Iterator[str]:
    """Start `examples.search_r1.retrieval` on a free port of loopback, and stop it at the end.

    The server is healthy when the block begins. It stops at the end of the block, also on errors
    and on Ctrl-C (which does not reach it directly, so that the rest of the block can still
    search), and within a second if this process is killed.

    Yields:
        The address of `/retrieve`.

    Raises:
        RuntimeError: it exited, or did not become healthy in time.
    """
    listening = socket.create_server((LOOPBACK, 0))
    address = f"http://{LOOPBACK}:{listening.getsockname()[1]}"
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as log, listening:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "examples.search_r1.retrieval",
                "--corpus",
                str(corpus),
                "--socket-fd",
                str(listening.fileno()),
                "--parent",
                str(os.getpid()),
            ],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is handled here
            env={**environment_without_key(), "PYTHONPATH": path},
        )
    try:
        _wait_until_healthy(process, address, log_file)
        yield f"{address}/retrieve"
    finally:
        _stop(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], address: str, log_file: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _is_healthy(address):
        if process.poll() is not None:
            raise RuntimeError(
                f"the retrieval server exited with code {process.returncode}: {_tail(log_file)}"
            )
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the retrieval server is not healthy after {START_SECONDS:g} s: {_tail(log_file)}"
            )
        time.sleep(POLL_SECONDS)


def _is_healthy(address: str) -> bool:
    # Ignore proxies of the environment, which are wrong for loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{address}/health", timeout=1.0) as answer:
            return bool(json.load(answer)["status"] == "ok")
    except (OSError, ValueError, KeyError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log_file: Path) -> str:
    return log_tail(log_file)[-LOG_TAIL:].strip()
