"""The processes of `processes.py`: a server that forks, and its children, which answer calls.

Run by `python -c` with two arguments: the descriptor of the socket to the trainer, and its pid.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict

from skyrl_fast.rollout.workers.processes import (
    FORK,
    KILL,
    LENGTH,
    REQUEST,
    STATUS,
    receive_exactly,
)
from skyrl_fast.rollout.workers.protocol import CallResult, HandlerSettings
from skyrl_fast.system.importing import load_module
from skyrl_fast.system.parent_watch import die_with_parent
from skyrl_fast.system.printable import MAX_FAILURE

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0  # between checks whether the trainer lives
EXIT_SECONDS = 1.0  # for a child to exit after its socket was closed


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    data, pickled = pickle.loads(_receive(link))
    sys.path[:], folder, modules, optional_modules = pickle.loads(data)
    try:
        _preload(modules, optional_modules)
    except ValueError as error:
        _send(link, str(error)[:MAX_FAILURE].encode(errors="replace"))
        return
    settings = pickle.loads(pickled)
    _send(link, b"")
    _ForkingServer(link, int(sys.argv[2]), settings, folder).run()


def _preload(modules: list[str], optional_modules: list[str]) -> None:
    """Import what handlers need, so that forked processes share it."""
    for module in optional_modules:
        with suppress(ImportError):
            importlib.import_module(module)
    for module in modules:
        before = threading.active_count()
        load_module(module)
        if threading.active_count() > before:
            log.warning(
                "workers=process: importing %s starts threads, which forked processes do not have: "
                "start them later",
                module,
            )


class _ForkingServer:
    """Answers the trainer: forks, and tells and ends its children."""

    def __init__(
        self, link: socket.socket, trainer: int, settings: HandlerSettings, folder: str
    ) -> None:
        self._link = link
        self._trainer = trainer
        self._settings = settings
        self._folder = folder
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}  # exit codes that the trainer may ask for

    def run(self) -> None:
        try:
            self._answer_requests()
        finally:
            for pid in list(self._running):
                self._kill(pid)

    def _answer_requests(self) -> None:
        self._link.settimeout(WATCH_SECONDS)
        while os.getppid() == self._trainer:
            self._reap()
            try:
                request, links, _, _ = socket.recv_fds(self._link, REQUEST.size, 1)
            except TimeoutError:
                continue
            if not request:
                return
            kind, pid = REQUEST.unpack(request)
            if kind == FORK:
                self._say(self._fork(links[0]))
            elif kind == KILL:
                self._kill(pid)
            elif kind == STATUS:
                self._say(self._exit_code(pid))

    def _fork(self, link: int) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._link.close()
                os.setpgid(0, 0)
                _end_with(server)
                _serve(socket.socket(fileno=link), self._settings, self._folder)
            finally:
                os._exit(0)
        os.close(link)
        with suppress(OSError):  # by now it may have done so itself, or have ended
            os.setpgid(pid, pid)
        self._running.add(pid)
        return pid

    def _kill(self, pid: int) -> None:
        if pid in self._running:  # not reaped, so the pid is of no other process
            self._running.discard(pid)
            for kill in (os.killpg, os.kill):  # what it has started, too
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        self._ended.pop(pid, None)

    def _exit_code(self, pid: int) -> int:
        deadline = time.monotonic() + EXIT_SECONDS
        while pid in self._running and time.monotonic() < deadline:
            time.sleep(EXIT_SECONDS / 100)
            self._reap()
        return self._ended.get(pid, 0)

    def _reap(self) -> None:
        """Note the exit codes of children that have ended, and kill what they have started."""
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT  # the pid stays reserved until waitpid
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, ended)) is not None:
                pid = found.si_pid
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if pid in self._running:  # not killed by us
                    self._running.discard(pid)
                    self._ended[pid] = code

    def _say(self, number: int) -> None:
        self._link.sendall(struct.pack("!q", number))


def _end_with(server: int) -> None:
    """End this process with the fork server, also in the middle of a call that holds the lock."""
    die_with_parent()
    if os.getppid() != server:
        os._exit(1)


def _serve(link: socket.socket, settings: HandlerSettings, folder: str) -> None:
    """Answer calls until the trainer closes its end of the socket."""
    if "numpy" in sys.modules:  # forked processes would draw the same numbers; random reseeds
        sys.modules["numpy"].random.seed()
    handler = settings.handler()
    while request := _receive(link):
        what, argument = pickle.loads(request)
        if what == settings.first_call:
            os.chdir(folder)
        outcome = handler.call(what, argument)
        try:
            answer = _encode(outcome)
        except Exception as error:  # memory, for example
            answer = _encode(CallResult(failure=f"{what}: its answer: {type(error).__name__}"))
        _send(link, answer)


def _encode(outcome: CallResult) -> bytes:
    values = (outcome.value, outcome.failure, outcome.trace)
    text = json.dumps(values, ensure_ascii=False, default=asdict)
    return text.encode(errors="surrogatepass")


def _send(link: socket.socket, message: bytes) -> None:
    link.sendall(LENGTH.pack(len(message)) + message)


def _receive(link: socket.socket) -> bytes:
    """Return a message; b"" at the end."""
    head = receive_exactly(link, LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    (length,) = LENGTH.unpack(head)
    message = receive_exactly(link, length)
    if len(message) == length:
        return message
    return b""
