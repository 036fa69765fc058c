"""What all transports share: the call of an engine's workers that each yields, and tied tensors.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from skyrl_fast.rollout.engine.weights.receipt import SentWeights
from skyrl_fast.system.torch_threads import end_torch_threads

T = TypeVar("T")

LOAD = "load_weights_"  # before a transport's name: the method of workers that loads by it
IN_MEMORY = "handed over by the trainer"  # path of an adapter, from which nothing is read
OF_POLICY = ":"  # between a policy's name and those of its adapter's matrices

# By name. They are read again for an engine that is restarted, unless they are an iterator.
Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A call of `WeightUpdateExtension` that loads weights; its answer is a `Receipt`.

    Several engines can make it at once, and repeat it as long as the transport's context is open.

    Args:
        transport: its name in `TRANSPORTS`.
        arguments: texts, bytes, numbers and lists of them: vLLM sends them without pickle.
        sent: the tensors that the receipt must have.
    """

    transport: str
    arguments: list[Any]
    sent: SentWeights

    @property
    def method(self) -> str:
        return f"{LOAD}{self.transport}"

    async def make(self, sender: Any, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the workers' answer; `sender` is the engine's `BroadcastSender`, if it has one."""
        return await call()

    def for_engines(self, number: int) -> Sequence[WorkerCall]:
        """Return the calls of engines that load at the same time; each must be made, or closed."""
        return [self] * number

    def close(self) -> None:
        """Do not let other engines wait for this one any more."""


# Called with the weights and the engines' dtype (None: several).
Transport = Callable[[Weights, torch.dtype | None], AbstractContextManager[WorkerCall]]


@asynccontextmanager
async def transfer_weights(
    transport: Transport,
    weights: Weights,
    dtype: torch.dtype | None,
    frozen: Collection[str] = (),
) -> AsyncIterator[WorkerCall]:
    """Start a transfer in a thread; yield its call. Weights of `frozen` modules are not sent."""
    with ExitStack() as stack:

        def start() -> WorkerCall:
            try:
                return stack.enter_context(transport(weights, dtype))
            finally:
                end_torch_threads()

        call = await asyncio.to_thread(start)
        call.sent.frozen.update(frozen)
        yield call


def distinct_tensors(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors, one with several names (tied) under the first."""
    items = weights.items() if isinstance(weights, Mapping) else weights
    # Not the tensors: they may be gathered one after another. A later one may have the address of
    # one that was freed.
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], StorageWeakRef] = {}
    for name, tensor in items:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen and not seen[key].expired():
            continue
        seen[key] = StorageWeakRef(tensor.untyped_storage())
        yield name, tensor.detach()
