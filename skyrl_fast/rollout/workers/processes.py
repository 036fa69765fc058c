"""Environments and agents in processes: one per process, killed where a call is late.

A thread that holds the interpreter's lock stops every thread of the trainer, and no deadline can
end it. A process can be killed. Processes are forked by a fork server, which has imported what
they need (2 s, once), so that each starts in milliseconds and shares that memory; it serves one
trajectory after the other.

What is sent to a process is pickled: it comes from the trainer. What a process sends is JSON of a
limited size: it handles what a model wrote, so nothing that it says is executed.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from skyrl_fast.rollout.workers.protocol import CallResult, HandlerSettings
from skyrl_fast.system.child_environment import environment_without_key
from skyrl_fast.system.printable import MAX_FAILURE

START_SECONDS = 120.0  # for the fork server to import what its processes need
END_SECONDS = 10.0  # for it to end its processes
ANSWER_SECONDS = 30.0  # for the rest of an answer that has begun
READ_BYTES = 1 << 20
LENGTH = struct.Struct("!Q")
FORK, STATUS, KILL = b"f", b"s", b"k"  # requests to the fork server, each with a pid
REQUEST = struct.Struct("!cq")
_SERVER = "from skyrl_fast.rollout.workers.fork_server import main; main()"


class ProcessWorkers:
    """The processes of a run; started when they are needed, and kept for other trajectories.

    Raises:
        ValueError: a process cannot import what it needs.
    """

    def __init__(self, settings: HandlerSettings) -> None:
        settings.check_importable()
        modules = list(settings.modules), list(settings.optional_modules)
        self._setup = pickle.dumps(
            (pickle.dumps((sys.path, os.getcwd(), *modules)), pickle.dumps(settings))
        )
        self._settings = settings
        self._server: _ForkServer | None = None
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    async def acquire(self) -> ProcessWorker:
        """Return a worker for one handler; an OSError says why no process can be started."""
        while self._idle:
            process = self._idle.pop()
            if process.alive():
                return ProcessWorker(self, process)
            process.end()
        return ProcessWorker(self, await asyncio.to_thread(self._start_process))

    async def close(self) -> None:
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        while self._idle:
            self._idle.pop().close()
        with self._lock:  # it may be starting
            if self._server is not None:
                self._server.end()
            self._server = None

    def _start_process(self) -> _Process:
        with self._lock:
            if self._server is None or not self._server.alive():
                self._server = _ForkServer(self._setup)
            ours, child_end = socket.socketpair()
            with child_end:
                pid = self._server.fork(child_end)
            return _Process(self._server, pid, ours, self._settings)

    def keep(self, process: _Process) -> None:
        """Keep a process whose handler is closed, for another one."""
        self._idle.append(process)


class ProcessWorker:
    """Runs one handler in a process."""

    def __init__(self, processes: ProcessWorkers, process: _Process) -> None:
        self._processes = processes
        self._process = process
        self.usable = True  # false: the process is gone, and its handler with it

    async def call(self, what: str, argument: Any, timeout: float | None) -> CallResult:
        """Answer as `Worker.call`; kill the process if late or cancelled. None: no deadline."""
        if not self.usable:
            return CallResult(failure=f"{what}: its process was killed")
        answer = asyncio.ensure_future(self._process.answer(what, argument))
        done: set[Any] = set()
        try:
            done, _ = await asyncio.wait({answer}, timeout=timeout)
            if not done and self._process.has_answered():  # the loop was busy at the deadline
                done, _ = await asyncio.wait({answer}, timeout=ANSWER_SECONDS)
        finally:
            if not done:
                answer.cancel()
                self._lose()
        if not done:
            raise TimeoutError
        try:
            return answer.result()
        except (OSError, EOFError, ValueError) as error:
            ended = await asyncio.to_thread(self._process.why)
            self._lose()
            if isinstance(error, EOFError):
                text = f"{what}: its process {ended}"
            else:
                text = f"{error}"
            return CallResult(failure=text[:MAX_FAILURE])

    def release(self) -> None:
        if self.usable:
            self.usable = False
            self._processes.keep(self._process)

    def _lose(self) -> None:
        self.usable = False
        self._process.end()


class _Process:
    """A process of the fork server, and the socket to it."""

    def __init__(
        self, server: _ForkServer, pid: int, link: socket.socket, settings: HandlerSettings
    ) -> None:
        link.setblocking(False)
        self._server = server
        self._pid = pid
        self._link = link
        self._settings = settings

    def alive(self) -> bool:
        return not self.has_answered()  # between calls only its end can be read

    def has_answered(self) -> bool:
        return bool(_readable(self._link, 0))

    def why(self) -> str:
        """Return how the process ended, after its end of the socket was closed."""
        return self._server.status(self._pid)

    def end(self) -> None:
        self._server.kill(self._pid)
        self.close()

    def close(self) -> None:
        self._link.close()

    async def answer(self, what: str, argument: Any) -> CallResult:
        try:
            request = pickle.dumps((what, argument))
        except Exception as error:
            raise ValueError(f"{what}: the row cannot be sent to a process: {error}") from error
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._link, LENGTH.pack(len(request)) + request)
            (length,) = LENGTH.unpack(await self._read(LENGTH.size))
            if length > self._settings.max_bytes:
                raise ValueError(f"{what}: an answer of {length:,} bytes is too long")
            value, failure, trace = json.loads(await self._read(length))
        except ConnectionError as error:
            raise EOFError from error
        except (RecursionError, TypeError) as error:  # nested too deeply; not three values
            raise ValueError(f"{what}: its answer: {error}") from error
        if failure is not None:
            return CallResult(None, str(failure), str(trace))
        return CallResult(self._settings.check_value(what, value))

    async def _read(self, length: int) -> bytearray:
        loop = asyncio.get_running_loop()
        result = bytearray()
        while len(result) < length:
            data = await loop.sock_recv(self._link, min(length - len(result), READ_BYTES))
            if not data:
                raise EOFError
            result += data
        return result


class _ForkServer:
    """The parent of all processes, which can tell and end them."""

    def __init__(self, setup: bytes) -> None:
        self._link, child_end = socket.socketpair()
        self._lock = threading.Lock()
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(child_end.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
                start_new_session=True,  # a Ctrl-C is for the trainer, which decides
                env=environment_without_key(),
            )
        self._link.settimeout(START_SECONDS)
        try:
            self._link.sendall(LENGTH.pack(len(setup)) + setup)
            failure = self._read(self._answer()).decode(errors="replace")
        except OSError as error:
            self._process.kill()
            self.end()
            raise OSError(f"the fork server did not start: {error}") from error
        if failure:
            self.end()
            raise OSError(f"the fork server did not start: {failure}")

    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, link: socket.socket) -> int:
        """Start a process that answers on this socket; return its pid."""
        with self._lock:
            socket.send_fds(self._link, [REQUEST.pack(FORK, 0)], [link.fileno()])
            return self._answer()

    def status(self, pid: int) -> str:
        try:
            with self._lock:
                self._link.sendall(REQUEST.pack(STATUS, pid))
                code = self._answer()
        except OSError:
            return "ended with the fork server"
        if code >= 0:
            return f"exited ({code})"
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"  # some have no name

    def kill(self, pid: int) -> None:
        with suppress(OSError):  # then the fork server has ended, and its processes with it
            self._link.sendall(REQUEST.pack(KILL, pid))

    def end(self) -> None:
        """End the fork server, which kills its processes and what they have started."""
        self._link.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its processes end with it
            self._process.wait()

    def _answer(self) -> int:
        (number,) = struct.unpack("!q", self._read(LENGTH.size))
        return int(number)

    def _read(self, length: int) -> bytes:
        data = receive_exactly(self._link, length)
        if len(data) < length:
            raise OSError("it has ended: see its output")
        return data


def receive_exactly(link: socket.socket, length: int) -> bytes:
    """Return so many bytes; fewer at the end."""
    data = bytearray()
    while len(data) < length and (part := link.recv(min(length - len(data), READ_BYTES))):
        data += part
    return bytes(data)


def _readable(link: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(seconds * 1_000))
