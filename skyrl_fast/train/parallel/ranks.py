"""Several processes train one model: rank 0 runs the trainer, the others do what it does.

Each rank holds a part of every weight (`sharding.py`) and takes its own micro-batches through the
model (`rank_shares.py`). Nothing else knows of it: a `mirrored` method that is called on rank 0 is
called on all ranks, with the same arguments, and rank 0 has the result. One rank alone just calls.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner")
ERROR_SECONDS = 5.0  # in which the end of another rank is seen behind an error of this one


class RankError(RuntimeError):
    """The ranks cannot go on: one of them has ended, or they are out of step."""


class Ranks:
    """This process's place among those that train one model.

    Args:
        rank, size: which, of how many. Several are of use when they are connected.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.mesh: Any = None  # of the weights' devices
        self._messages: Any = None
        self._members: list[Any] = []
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread that holds it
        self._lost = threading.Event()
        self._reason = ""

    def connect(self, messages: Any, mesh: Any) -> None:
        """Reach the other ranks.

        Args:
            messages: process group on the CPU for calls and results; it waits for as long as
                rollouts take.
            mesh: device mesh of the weights.
        """
        self._messages, self.mesh = messages, mesh

    @property
    def is_waiting(self) -> bool:
        """Whether it may be waiting for the others: to connect, or in a call."""
        return self._messages is None or self._caller is not None

    def join(self, member: Any) -> None:
        """Let mirrored calls name this object; every rank makes the same ones in the same order."""
        if self.size > 1:
            self._members.append(member)

    def gather(self, own: list[R]) -> list[R]:
        """Return the items of all ranks on rank 0, and the own ones on the others."""
        if self.size == 1:
            return own
        lists: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(own, lists, dst=0, group=self._messages)
        return own if lists is None else [item for each in lists for item in each]

    def call(
        self, here: Callable[..., R], there: Callable[..., R], *arguments: Any, **options: Any
    ) -> R:
        """On rank 0: make a call here and on the others, and return its result here.

        Raises:
            RankError: the ranks cannot go on.
            Whatever the call raises here. The others are out of step then: no call follows.
        """
        if self._caller == threading.get_ident():
            raise RuntimeError(f"{here.__qualname__}: called by another mirrored function")
        with self._lock:
            if self._lost.is_set():
                raise RankError(self._reason)
            self._caller = threading.get_ident()
            try:
                self._send((there, arguments, options))
                return here(*arguments, **options)
            except Exception as error:
                if isinstance(error, RuntimeError) and self._lost.wait(ERROR_SECONDS):
                    raise RankError(self._reason) from error
                self.lose(f"rank 0 left the others behind: {type(error).__name__}: {error}")
                raise
            finally:
                self._caller = None

    def follow(self) -> None:
        """On the other ranks: make the calls of rank 0, until it releases them."""
        while (call := self._receive()) is not None:
            function, arguments, options = call
            function(*arguments, **options)

    def release(self) -> bool:
        """On rank 0: let the others end; False if they cannot be reached."""
        if self._lost.is_set():
            return False
        self._send(None)
        return True

    def lose(self, reason: str) -> None:
        """Make the call that waits for the others, and all later ones, end with this reason."""
        self._reason = reason
        self._lost.set()

    def _send(self, call: Any) -> None:
        buffer = io.BytesIO()
        _Pickler(buffer, self._members).dump(call)
        data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._messages)
        dist.broadcast(data, 0, group=self._messages)

    def _receive(self) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._messages)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._messages)
        return _Unpickler(io.BytesIO(data.numpy().data), self._members).load()


ALONE = Ranks()


def mirrored(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """Let a function of something with `ranks` run on all of them at once.

    It must not call another mirrored one, nor be a generator: a call is over when it returns.
    """
    assert not inspect.isgeneratorfunction(method)

    @functools.wraps(method)
    def call(owner: Owner, *arguments: P.args, **options: P.kwargs) -> R:
        ranks: Ranks = owner.ranks  # type: ignore[attr-defined]
        if ranks.size == 1 or ranks.rank > 0:
            return method(owner, *arguments, **options)
        return ranks.call(method, call, owner, *arguments, **options)

    return call


class _Pickler(pickle.Pickler):
    """Members by their number, functions by their name, tensors by their bytes alone."""

    def __init__(self, file: io.BytesIO, members: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers = {id(member): number for number, member in enumerate(members)}

    def persistent_id(self, value: Any) -> int | None:
        return self._numbers.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # torch's own way sends the whole storage of a view
            return torch.from_numpy, (value.detach().cpu().contiguous().numpy(),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, members: list[Any]) -> None:
        super().__init__(file)
        self._members = members

    def persistent_load(self, number: int) -> Any:
        return self._members[number]
