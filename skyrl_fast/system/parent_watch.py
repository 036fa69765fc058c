"""Child processes that exit with the process that started them, however that one ends.

A file of the standard library's modules only: new processes run it by its path, before they know
where the package is.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, spawn
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

POLL_SECONDS = 1.0  # how long a process may outlive its parent where the kernel does not end it
PR_SET_PDEATHSIG = 1  # option of Linux's prctl
# A terminal sends them to all its processes at once, on Ctrl-C and when it closes.
TERMINAL_SIGNALS = {signal.SIGINT, signal.SIGHUP}
QUIET_TRACKER = "ignore:resource_tracker:UserWarning"  # as of `python -W`


def watch_parent(parent: int) -> None:
    """Exit this process within a second after its parent has exited, even by SIGKILL.

    Args:
        parent: process id of the parent; if it is no longer the parent, this process exits now.
    """
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(parent,), name="parent watch", daemon=True).start()


def exit_with_parent(parent: int) -> None:
    """Do the same; on Linux the kernel ends this process at once.

    The thread of the parent that started this process must not end before the parent.
    """
    die_with_parent()
    watch_parent(parent)


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def children_exit_with_this_process(logging_file: str | None = None) -> Iterator[None]:
    """Make processes that multiprocessing spawns in the context exit with this one.

    So do their children. It holds from their first instruction, before they import anything; on
    Linux the kernel ends them at once. The thread that starts them must not end before them. SIGINT
    and SIGHUP, which a terminal sends to them too, do not end them: this process stops them.

    Args:
        logging_file: logging configuration of these processes, as JSON.
    """
    original = spawn.get_command_line
    _start_resource_tracker()
    tie_spawned_processes(logging_file)
    try:
        yield
    finally:
        spawn.get_command_line = original


def tie_spawned_processes(logging_file: str | None = None) -> None:
    """Do the same as `children_exit_with_this_process`, from now on."""
    original = spawn.get_command_line

    def get_command_line(**arguments: Any) -> list[str]:
        command = original(**arguments)
        program = command.index("-c") + 1
        begin = f"runpy.run_path({__file__!r})['_begin']"
        first = f"import runpy; {begin}({os.getpid()}, {logging_file!r}); "
        command[program] = first + command[program]
        return command

    spawn.get_command_line = get_command_line


def _begin(parent: int, logging_file: str | None) -> None:
    """Start a spawned process: exit with the parent, and make its children exit with it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    exit_with_parent(parent)
    tie_spawned_processes(logging_file)
    if logging_file is not None:
        configure_logging(logging_file)
    _collect_new_objects()


def configure_logging(file: str) -> None:
    # Here, as most processes that begin with this file do not need them.
    import json
    import logging.config

    with open(file, encoding="utf-8") as stream:
        logging.config.dictConfig(json.load(stream))


def _collect_new_objects() -> None:
    """Exempt what a spawned process imports before it runs its target from garbage collection.

    Of the seconds that an engine core takes to import its modules and to exit, a third are
    collections that visit all of them.
    """
    every: Any = BaseProcess  # whose stub has no `_bootstrap`
    bootstrap = every._bootstrap

    def run(process: BaseProcess, *arguments: Any, **options: Any) -> NoReturn:
        every._bootstrap = bootstrap  # also runs in processes that this one forks
        gc.freeze()
        gc.enable()
        code = bootstrap(process, *arguments, **options)
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code)  # as a forked process does: the interpreter would collect once more

    every._bootstrap = run
    gc.disable()


def _start_resource_tracker() -> None:
    """Start multiprocessing's tracker of semaphores, if it is not running, with SIGHUP blocked.

    An engine that is killed, as when a run is stopped while it starts, leaves the semaphores of
    vLLM and tqdm. The tracker removes them, which is no reason for its warning.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    sys.warnoptions.append(QUIET_TRACKER)  # the tracker's process gets them as arguments
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(QUIET_TRACKER)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)
