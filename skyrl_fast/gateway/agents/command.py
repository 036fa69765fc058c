"""An agent that is a command, in a folder and a process group of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_fast.gateway.agents.outcome import OutcomeError, outcome_of
from skyrl_fast.gateway.agents.task import AgentTask, BlackBox
from skyrl_fast.gateway.messages import Outcome
from skyrl_fast.rollout.chat_messages import plain_value
from skyrl_fast.rollout.env.errors import EnvError
from skyrl_fast.system.child_environment import environment_without_key
from skyrl_fast.system.printable import printable

log = logging.getLogger(__name__)

TASK_FILE = "task.json"
OUTPUT_FILE = ".agent_output"
TASK_VARIABLE = "SKYRL_FAST_TASK"
OUTPUT_CHARACTERS = 1_000  # at the end of a command's output, quoted when it fails
UTF8_BYTES = 4  # most bytes of a character
MAX_REWARD_BYTES = 1 << 20
KEPT_OUTPUT_BYTES = 256 << 10  # least output kept of a command; the file may have twice as much
MAX_KILLS, KILL_SECONDS = 100, 0.02  # of what a command has left
DROPPED = b"(the beginning of the output was dropped)\n"
# Runs a command in its own process group, which ends with this process: a pipe tells, even after
# SIGKILL; the folder, which is the current one, is deleted then. The group is killed when the
# command has ended, too. Its output goes to this process's, a file of which only the end is kept.
_LEASH = """
import os, shutil, signal, subprocess, sys, threading
most, dropped, command = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3:]
folder = os.getcwd()
child = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
def kill():
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
ending = threading.Lock()
def watch():
    sys.stdin.buffer.read()
    ending.acquire()
    kill()
    delete()
    os._exit(1)
def delete():
    if not os.path.isdir(folder):  # rmtree would open a pipe, and wait for someone who writes
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        pass
    if os.path.isdir(folder):  # too deep, or without rights
        subprocess.run(["chmod", "-R", "u+rwX", "--", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL)
def copy():
    kept = b""
    while data := os.read(child.stdout.fileno(), 1 << 16):
        kept += data
        try:
            if len(kept) > 2 * most:
                kept = kept[-most:]
                os.ftruncate(1, 0)
                data = dropped + kept
            os.write(1, data)
        except OSError:  # a full disk does not stop the command
            pass
threading.Thread(target=watch, daemon=True).start()
copying = threading.Thread(target=copy, daemon=True)
copying.start()
code = child.wait()
kill()
copying.join(1.0)  # processes that have left the group may keep the pipe open
ending.acquire()  # not while the folder is being deleted
os._exit(code if code >= 0 else 128 - code)
"""


class CommandAgent(BlackBox):
    """Runs the command for each task.

    Args:
        verifier: command that runs afterwards in the same folder and gives the reward; empty: none.
        reward_file: file in the folder with the reward, as JSON for `outcome_of`; None: the reward
            is 1 if the last command's exit code is 0, else 0.
        parent: of the folders of the tasks; None: the folder of temporary files.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        verifier: Sequence[str] = (),
        reward_file: str | None = None,
        parent: Path | None = None,
    ) -> None:
        self._parent = parent
        self._command = list(command)
        self._verifier = list(verifier)
        self._reward_file = reward_file
        self._said_dropped = False

    async def run(self, task: AgentTask) -> Outcome:
        make = partial(tempfile.mkdtemp, prefix="skyrl_fast_agent_", dir=self._parent)
        folder = Path(await asyncio.to_thread(make))
        try:
            (folder / TASK_FILE).write_text(json.dumps(plain_value(task.row), default=_as_json))
            # Open from the start on: later this name may be a pipe that nobody writes to.
            with (folder / OUTPUT_FILE).open("ab+") as output:
                return await self._run(task, folder, output.fileno())
        except OSError as error:
            raise EnvError(f"agent.command: {error}") from error
        finally:
            await asyncio.to_thread(_kill_left, folder)
            await asyncio.to_thread(_delete, folder)

    async def _run(self, task: AgentTask, folder: Path, output: int) -> Outcome:
        variables = {**task.environment, TASK_VARIABLE: str(folder / TASK_FILE)}
        code = await _exit_code(self._command, folder, output, variables)
        if self._verifier:
            code = await _exit_code(self._verifier, folder, output, variables)
        self._say_dropped(output)
        if self._reward_file is None:
            return Outcome(float(code == 0), unless_posted=True)
        return self._read(folder, output, code)

    def _say_dropped(self, output: int) -> None:
        if self._said_dropped:
            return
        self._said_dropped = os.pread(output, len(DROPPED), 0) == DROPPED
        if self._said_dropped:
            log.warning(
                "agent.command: more than %d KiB of output: only its end is kept; said once",
                2 * KEPT_OUTPUT_BYTES >> 10,
            )

    def _read(self, folder: Path, output: int, code: int) -> Outcome:
        name = f"agent.reward_file: {self._reward_file}"
        try:
            return outcome_of(json.loads(_regular_file(folder / str(self._reward_file))))
        except FileNotFoundError:
            end = _end_of_output(output)
            raise EnvError(f"{name}: no such file; exit code {code}; output: {end}") from None
        except (OSError, OutcomeError, ValueError, RecursionError) as error:
            raise EnvError(f"{name}: {error}") from error


async def _exit_code(
    command: Sequence[str], folder: Path, output: int, variables: Mapping[str, str]
) -> int:
    """Run a command to its end; kill its process group, also if this call is cancelled."""
    if shutil.which(command[0], path=os.environ.get("PATH")) is None:
        raise EnvError(f"agent.command: no program {command[0]!r}")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-c",
        _LEASH,
        str(KEPT_OUTPUT_BYTES),
        DROPPED.decode(),
        *command,
        cwd=folder,
        # As a shell sets it: some programs take their folder from it, not from the system.
        env={**environment_without_key(), **variables, "PWD": str(folder)},
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    try:
        return await process.wait()
    finally:
        if process.stdin is not None:
            process.stdin.close()  # the leash kills the command's group
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _regular_file(path: Path) -> bytes:
    """Return the bytes of a file that a command left, which may be a pipe or a link by malice."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_REWARD_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_REWARD_BYTES:
        raise OSError(f"expected at most {MAX_REWARD_BYTES:,} bytes, got more")
    return content


def _end_of_output(output: int) -> str:
    size = UTF8_BYTES * OUTPUT_CHARACTERS
    text = os.pread(output, size, max(0, os.fstat(output).st_size - size)).decode(errors="replace")
    return printable(text[-OUTPUT_CHARACTERS:].strip(), OUTPUT_CHARACTERS)


def _kill_left(folder: Path) -> None:
    """Kill processes of a command that have left its group, or killed what should end them."""
    mark = os.fsencode(f"{TASK_VARIABLE}={folder / TASK_FILE}")
    for _ in range(MAX_KILLS):  # they may start others meanwhile
        left = False
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process is another user's, or has ended
                if mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
                    left = True
        if not left:
            return
        time.sleep(KILL_SECONDS)


def _as_json(value: Any) -> Any:
    """Return a value that JSON has not: a set as a list in order, another one as text."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


def _delete(folder: Path) -> None:
    """Delete a folder, or what a command has put in its place; what cannot be deleted stays."""
    try:
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink(missing_ok=True)  # rmtree would open a pipe, and wait for a writer
            return
        with contextlib.suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)
        if folder.is_dir():  # too deep for rmtree, or without rights
            for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
                subprocess.run([*command, "--", str(folder)], check=False, capture_output=True)
    except OSError as error:
        log.warning("agent.command: %s stays: %s", folder, error)
