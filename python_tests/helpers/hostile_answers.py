"""Seeded answers of environments that misbehave wherever they are looked at."""

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from skyrl_fast.rollout.env.protocol import Env, EnvStep

METHODS = (
    *("__float__", "__int__", "__index__", "__bool__", "__str__", "__repr__", "__len__"),
    *("__iter__", "__getitem__", "__hash__", "__eq__", "__contains__", "__abs__", "__le__"),
    *("keys", "items", "get", "tolist", "__format__", "__reduce__", "__getattribute__"),
)


class SilentError(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


class LoudError(Exception):
    """An exception with a text of a megabyte and terminal codes."""

    def __str__(self) -> str:
        return "\x1b[2J\r\nforged\x07" * 100_000


def failures(source: random.Random) -> BaseException:
    """Return what a method raises."""
    kinds: list[Callable[[], BaseException]] = [
        *(lambda: SilentError(), lambda: LoudError(), lambda: SystemExit(3), KeyboardInterrupt),
        *(GeneratorExit, StopIteration, StopAsyncIteration, RecursionError, MemoryError),
        *(lambda: TimeoutError("not ours"), lambda: OSError(5, "gone"), AssertionError),
        lambda: BaseExceptionGroup("two", [SystemExit(1), ValueError("a")]),
        lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    ]
    return source.choice(kinds)()


def hostile_object(source: random.Random) -> Any:
    """Return an object of a base type, some of whose methods raise or return odd values."""
    bases: list[tuple[type, tuple[Any, ...]]] = [
        *((object, ()), (dict, ({"role": "user", "content": "x"},)), (list, ([1],))),
        *((str, ("text",)), (int, (3,)), (float, (0.5,)), (tuple, ((1, 2),)), (Mapping, ())),
    ]
    base, arguments = source.choice(bases)

    def method(*_: Any, **__: Any) -> Any:
        if source.random() < 0.6:
            raise failures(source)
        return source.choice([None, "x", -1, 10**400, float("nan"), [], {}, object(), b"x"])

    names = set(source.sample(METHODS, source.randrange(1, 5)))
    if base is Mapping:
        names |= {"__getitem__", "__iter__", "__len__"}
    names -= {"__getattribute__"} if source.random() < 0.9 else set()
    return type("Hostile", (base,), dict.fromkeys(names, method))(*arguments)


def odd_value(source: random.Random, depth: int = 0) -> Any:
    """Return any value: plain, too large, nested, cyclic or hostile."""
    kind = source.randrange(16)
    if kind < 4 or depth > 3:
        return hostile_object(source)
    if kind == 4:
        return {odd_key(source): odd_value(source, depth + 1) for _ in range(3)}
    if kind == 5:
        return [odd_value(source, depth + 1) for _ in range(3)]
    if kind == 6:
        cycle: list[Any] = []
        cycle.append(cycle)
        return cycle
    if kind == 7:
        deep: Any = "end"
        for _ in range(source.choice([10, 70, 3_000])):
            deep = [deep]
        return deep
    plain = [
        *(None, True, 0, 1, -1, 2**70, 10**400, 0.5, 1e39, float("nan"), float("inf")),
        *("", "text", "\ud800", "\x00", "a" * 200_000, "\x1b]52;c;x\x07", b"\xff", 1j),
        *(np.float32(0.25), np.ones(2), np.array(1.0), np.array([object()]), sys, Env, Ellipsis),
        *({"role": "user", "content": "go on"}, [{"role": "tool", "content": "x"}], set("ab")),
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
    ]
    return source.choice(plain)


def odd_key(source: random.Random) -> Any:
    """Return a key of a mapping."""
    return source.choice(["role", "content", "reward", "done", "tool_calls", "", 3, None, (1,)])


def odd_answer(source: random.Random) -> Any:
    """Return an answer to a step: about right, with odd values in some places."""
    if source.random() < 0.15:
        return odd_value(source)
    answer: dict[Any, Any] = {"observations": "more", "reward": 0.5, "done": False}
    names = [*answer, "postprocessed_action", "metadata"]
    for name in source.sample(names, source.randrange(3)):
        answer[name] = odd_value(source)
    if source.random() < 0.1:
        answer.pop(source.choice(list(answer)), None)
    if source.random() < 0.3:
        fields = ("reward", "done", "observations", "postprocessed_action")
        return EnvStep(**{name: answer.get(name) for name in fields})
    return answer


class HostileEnv:
    """An environment whose every answer follows from the row's `seed`."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.source = random.Random(row["seed"])
        self._maybe_raise(0.05)

    def _maybe_raise(self, share: float) -> None:
        if self.source.random() < share:
            raise failures(self.source)

    def init(self, messages: list[dict[str, Any]]) -> Any:
        self._maybe_raise(0.05)
        return odd_value(self.source) if self.source.random() < 0.1 else messages

    def step(self, action: str) -> Any:
        self._maybe_raise(0.1)
        return odd_answer(self.source)

    def metrics(self) -> Any:
        self._maybe_raise(0.2)
        return odd_value(self.source) if self.source.random() < 0.7 else {"score": 1.0}

    def close(self) -> None:
        self._maybe_raise(0.2)
