"""Agents that a process can import by name."""

import asyncio
import contextlib
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TASKS = 0  # in this process


async def solve(task: Any) -> dict[str, Any]:
    """Ask, do what the row says, and ask again."""
    create = task.async_openai.chat.completions.create
    messages = list(task.row["prompt"])
    first = await create(model=task.model, messages=messages)
    _do(task.row)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    messages += [answer, {"role": "user", "content": "again"}]
    await create(model=task.model, messages=messages)
    return {"reward": 0.1, "call_rewards": {first.id: 0.3}, **_seen()}


def solve_sync(task: Any) -> dict[str, Any]:
    """Ask, with the synchronous client, and do what the row says."""
    task.openai.chat.completions.create(model=task.model, messages=task.row["prompt"])
    _do(task.row)
    return {"reward": 0.7, **_seen()}


def until_refused(task: Any) -> float:
    """Ask until that is refused, and do what the row says."""
    import openai

    create = task.openai.chat.completions.create
    with contextlib.suppress(openai.APIStatusError):
        while True:
            create(model=task.model, messages=task.row["prompt"])
    _do(task.row)
    return 0.25


def act(task: Any) -> float:
    """Do what the row says."""
    _do(task.row)
    return 1.0


def _seen() -> dict[str, int]:
    global TASKS
    TASKS += 1
    return {"pid": os.getpid(), "parent": os.getppid(), "tasks": TASKS}


def _do(row: Any) -> None:
    what, once = row.get("do"), row.get("once")
    if once is not None:  # in the first attempt alone
        if Path(once).exists():
            return
        Path(once).touch()
    if what == "hold":
        while Path(row["hold"]).exists():
            time.sleep(0.05)
    if what == "raise":
        raise LookupError("given up")
    if what == "sys_exit":
        sys.exit(3)
    if what == "cancel":
        raise asyncio.CancelledError
    if what == "exit":
        os._exit(3)
    if what == "segfault":
        ctypes.string_at(0)
    if what in ("hang", "hold_lock"):
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
        Path(row["pids"]).write_text(f"{os.getpid()} {child.pid}")
        if what == "hang":
            time.sleep(600)
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the interpreter's lock
