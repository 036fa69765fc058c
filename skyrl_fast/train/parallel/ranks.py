"""Several processes that train one model: rank 0 runs the trainer, the others follow its calls.

Each rank holds a shard of every weight (`sharding.py`) and processes its local micro-batches
(`rank_shares.py`). The rest of the code is unaware of this: a `run_on_all_ranks` method called on
rank 0 is executed on all ranks with the same arguments, and rank 0 gets the result; of an argument
that is `PerRank` each rank gets its part. With a single rank it is a plain call.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from skyrl_fast.errors import RunError
from skyrl_fast.train.parallel.per_rank import PerRank
from skyrl_fast.train.parallel.sequence_ranks import SINGLE, SequenceRanks
from skyrl_fast.train.parallel.traffic import CALLS, RESULTS, ROWS, Traffic

P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner")
PER_RANK = "per rank"  # in a message, in place of an argument of which each rank gets a part
ERROR_SECONDS = 5.0  # within which an exit of another rank is taken as the cause of an error here


class RankError(RunError):
    """The ranks cannot continue: one of them has exited, or they are out of sync."""


class Ranks:
    """This process's place among those that train one model.

    Args:
        rank, size: number of this rank, and number of ranks. Several must be connected before use.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.mesh: Any = None  # device mesh of the weights
        self.sequence = SINGLE  # those that share the tokens of a pass
        self.holds_gradients = True  # whether there is memory for a model's full gradients
        self.traffic = Traffic()
        self.files: Any = None  # `SharedFiles` of several ranks
        self._messages: Any = None
        self._members: list[Any] = []
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread that holds the lock
        self._lost = threading.Event()
        self._reason = ""

    def connect(self, messages: Any, mesh: Any) -> None:
        """Set the CPU process group of calls and results, and the device mesh of the weights."""
        self._messages = messages
        self.mesh = mesh

    def share_sequences(self, size: int) -> None:
        """Let every `size` consecutive ranks share the tokens of a pass; all ranks call this."""
        if size == 1:
            return
        for first in range(0, self.size, size):
            # All ranks create all groups, also those that they are not in.
            group = dist.new_group(list(range(first, first + size)))
            if first <= self.rank < first + size:
                self.sequence = SequenceRanks(self.rank - first, size, group, self.traffic)

    @property
    def is_waiting(self) -> bool:
        """Whether this rank may be waiting for the others: to connect, in a call, for files."""
        if self._messages is None or self._caller is not None:
            return True
        return self.size > 1 and self.files.is_writing

    def register(self, member: Any) -> None:
        """Make this object addressable in calls; all ranks register in the same order."""
        if self.size > 1:
            self._members.append(member)

    def gather(self, local: list[R], *, from_each: bool = False) -> list[R]:
        """Return the items of all ranks on rank 0, and only the local ones on the others.

        Args:
            from_each: whether each rank of a sequence group has items of its own; else all of a
                group have the same items, which count once.
        """
        if self.size == 1:
            return local
        if self.rank > 0:
            if from_each or self.sequence.rank == 0:
                sent = local
            else:
                sent = []
            # Pickled here, so that rank 0 can count the bytes.
            dist.gather_object(pickle.dumps(sent), dst=0, group=self._messages)
            return local
        found: list[Any] = [None] * self.size
        dist.gather_object(b"", found, dst=0, group=self._messages)
        others = found[1:]
        self.traffic.add(RESULTS, sum(map(len, others)), len(others))
        return [*local, *(item for each in others for item in pickle.loads(each))]

    def agree(self, value: R) -> R:
        """Return rank 0's value on all ranks, which call this together."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._messages)
        return values[0]

    def call(
        self, here: Callable[..., R], there: Callable[..., R], *arguments: Any, **options: Any
    ) -> R:
        """On rank 0: run a call on all ranks and return the local result.

        Args:
            here, there: the function to run on this rank, and on the others.

        Raises:
            RankError: the ranks cannot continue.
            Whatever the call raises here. The others are out of sync then: no call may follow.
        """
        # It would wait for its own lock.
        if self._caller == threading.get_ident():
            raise RuntimeError(f"{here.__qualname__}: called by another run_on_all_ranks function")
        # Calls come from several threads; the ranks must see them in one order.
        with self._lock:
            if self._lost.is_set():
                raise RankError(self._reason)
            self._caller = threading.get_ident()
            try:
                with self.exits_named():
                    self._send((there, arguments, options))
                    return here(*arguments, **options)
            except RankError:
                raise
            except Exception as error:
                self.fail(f"rank 0 is out of sync with the others: {type(error).__name__}: {error}")
                raise
            finally:
                self._caller = None

    def follow(self) -> None:
        """On the other ranks: execute the calls of rank 0 until it releases them."""
        while (call := self._receive()) is not None:
            function, arguments, options = call
            function(*arguments, **options)

    def release(self) -> bool:
        """On rank 0: let the others exit; return False if they cannot be reached."""
        if self._lost.is_set():
            return False
        self._send(None)
        return True

    def fail(self, reason: str) -> None:
        """Make the running call and all later ones raise RankError with this reason."""
        self._reason = reason
        self._lost.set()

    @contextmanager
    def exits_named(self) -> Iterator[None]:
        """Raise RankError in place of a torch error in the block that a rank's exit has caused."""
        try:
            yield
        except RuntimeError as error:
            # torch's error may come before the watching thread has noticed the exit.
            if self._lost.wait(ERROR_SECONDS):
                raise RankError(self._reason) from error
            raise

    def _send(self, call: Any) -> None:
        data, arguments = self._pickled(call)
        self.traffic.add(CALLS, (self.size - 1) * len(data), self.size - 1)
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._messages)
        dist.broadcast(data, 0, group=self._messages)
        if arguments:
            self._send_parts(arguments)

    def _send_parts(self, arguments: list[PerRank[Any]]) -> None:
        """Send each of the others its part of some arguments."""
        data = None
        sent: list[Any] = []
        for rank in range(1, self.size):
            number, place = divmod(rank, self.sequence.size)
            if data is None or place == 0:
                data, _ = self._pickled([argument.part(number) for argument in arguments])
            # It is made while the one before is on its way.
            _wait_for(sent)
            sent = [
                dist.isend(message, rank, group=self._messages, tag=tag)
                for tag, message in enumerate((torch.tensor([len(data)]), data))
            ]
            self.traffic.add(ROWS, len(data))
        _wait_for(sent)

    def _pickled(self, value: Any) -> tuple[torch.Tensor, list[PerRank[Any]]]:
        """Return a message's bytes, and what it has of arguments whose parts follow it."""
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self._members)
        pickler.dump(value)
        # A copy: gloo's thread may be the last that holds the tensor, and must not free Python's.
        return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).clone(), pickler.per_rank

    def _receive(self) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._messages)
        # Its length was sent first: a broadcast needs a buffer of the right size.
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._messages)
        call, arguments = self._unpickled(data)
        if arguments:
            dist.recv(length, 0, group=self._messages, tag=0)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(data, 0, group=self._messages, tag=1)
            parts, _ = self._unpickled(data)
            for argument, part in zip(arguments, parts, strict=True):
                argument.receive(part)
        return call

    def _unpickled(self, data: torch.Tensor) -> tuple[Any, list[PerRank[Any]]]:
        unpickler = _Unpickler(io.BytesIO(data.numpy().data), self._members)
        return unpickler.load(), unpickler.per_rank


def _wait_for(messages: list[Any]) -> None:
    for message in messages:
        message.wait()


SINGLE_RANK = Ranks()


def run_on_all_ranks(
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """Decorate a function whose first argument has `ranks`: rank 0's call runs on all ranks.

    The function must not call another such function, nor be a generator: a call must be complete
    when it returns.
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
    """Pickles members as their number, functions as their name, tensors as their bytes.

    Arguments of which each rank gets a part are left out, and listed in `per_rank`.
    """

    def __init__(self, file: io.BytesIO, members: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.per_rank: list[PerRank[Any]] = []
        self._numbers = {id(member): number for number, member in enumerate(members)}

    def persistent_id(self, value: Any) -> int | str | None:
        if isinstance(value, PerRank):
            self.per_rank.append(value)
            return PER_RANK
        return self._numbers.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # torch would send the full storage of a view
            return torch.from_numpy, (value.detach().cpu().contiguous().numpy(),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, members: list[Any]) -> None:
        super().__init__(file)
        self.per_rank: list[PerRank[Any]] = []
        self._members = members

    def persistent_load(self, number: int | str) -> Any:
        if isinstance(number, str):
            self.per_rank.append(PerRank(_not_received))
            return self.per_rank[-1]
        return self._members[number]


def _not_received(number: int) -> Any:
    raise AssertionError(f"part {number} of an argument is read before it was received")
