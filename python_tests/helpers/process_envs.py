"""Environments and reward functions that a process can import by name, without torch."""

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_fast.rollout.env.protocol import Env, EnvStep

CONSTRUCTED = 0  # in this process


class Scripted(Env):
    """Does what the row's `do` says at its first step, and then answers."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        global CONSTRUCTED
        CONSTRUCTED += 1
        self.row = row
        self.turns = 0

    def step(self, action: str) -> EnvStep:
        self.turns += 1
        if self.turns == 1:
            getattr(self, "do_" + self.row.get("do", "nothing"))()
        seen = {"pid": os.getpid(), "turns": self.turns, "action": action}
        seen |= {"folder": os.getcwd(), "constructed": CONSTRUCTED}
        return EnvStep(0.5, self.turns == 3, json.dumps(seen))

    def metrics(self) -> Mapping[str, Any]:
        return {"turns": self.turns}

    def do_nothing(self) -> None:
        return

    def do_raise(self) -> None:
        raise RuntimeError("the database is locked")

    def do_hang(self) -> None:
        time.sleep(600)

    def do_set_alarm(self) -> None:
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, before)

    def do_hold_lock(self) -> None:
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the interpreter's lock

    def do_segfault(self) -> None:
        ctypes.string_at(0)

    def do_exit(self) -> None:
        os._exit(3)

    def do_child(self) -> None:
        self._start_child()
        time.sleep(600)

    def do_child_and_exit(self) -> None:
        self._start_child()
        os._exit(3)

    def _start_child(self) -> None:
        import subprocess

        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(self.row["file"]).write_text(str(child.pid))

    def do_unnamed_signal(self) -> None:
        os.kill(os.getpid(), signal.SIGRTMIN + 1)

    def do_write(self) -> None:
        """Write to the trainer, by its socket, what code of a model could."""
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    os.write(int(number), struct.pack("!Q", len(self.row["write"])))
                    os.write(int(number), self.row["write"].encode())

    def do_variables(self) -> None:
        Path(self.row["file"]).write_text(json.dumps(dict(os.environ)))

    def do_chdir(self) -> None:
        os.chdir("/")

    def do_draw(self) -> None:
        number = [random.random(), float(np.random.random())]
        with Path(self.row["file"]).open("a") as file:
            file.write(json.dumps(number) + "\n")

    def do_odd(self) -> None:
        raise type("Odd", (Exception,), {"__str__": lambda self: 1 / 0})

    def do_long(self) -> None:
        self.step = lambda action: EnvStep(0.0, False, "\ud800" * 3_000_000)  # type: ignore[method-assign]


def reward(answer: str, row: Mapping[str, Any]) -> float:
    """Return 1 for the row's word."""
    return float(answer == row["word"])


def exact(completions: Any, answer: Any, **columns: Any) -> list[float]:
    assert set(columns) == {"prompts", "completion_ids", "log_metric", "level"}
    columns["log_metric"]("length", sum(len(c[0]["content"]) for c in completions))
    return [float(a in c[0]["content"]) for c, a in zip(completions, answer, strict=True)]


def short(prompts: Any, completions: Any) -> list[float]:
    assert prompts == [[{"role": "user", "content": "task"}]] * len(completions)
    return [-float(len(completion[0]["content"])) for completion in completions]


async def only_hard(level: Any, **columns: Any) -> list[float | None]:
    return [1.0 if one == "hard" else None for one in level]


def ranked(completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """Compare the answers of a group, as reward functions of TRL may."""
    lengths = [len(completion[0]["content"]) for completion in completions]
    assert [len(ids) - 1 for ids in completion_ids] == lengths  # a token each, and the end
    return [sum(other > length for other in lengths) / len(lengths) for length in lengths]


class AsyncGuess:
    """Coroutine functions, in a process or a thread."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.number = row["number"]
        self.guesses = 0

    async def init(self, messages: list[Any]) -> list[Any]:
        await asyncio.sleep(0)
        return messages

    async def step(self, action: str) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        self.guesses += 1
        return {"observations": [], "reward": float(action == str(self.number)), "done": True}

    async def metrics(self) -> dict[str, int]:
        return {"guesses": self.guesses}

    async def close(self) -> None:
        await asyncio.sleep(0)
