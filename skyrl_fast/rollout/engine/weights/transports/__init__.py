"""Ways of new weights to an engine: a file for each, and its line in `TRANSPORTS`.

A transport of this table is chosen by `choose_transport`, loaded by `WeightUpdateExtension`, and
passed or refused by `EngineGuard`.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.rollout.engine.weights.transfer import Transport
from skyrl_fast.rollout.engine.weights.transports.broadcast import (
    check_broadcast_call,
    receive_by_broadcast,
    send_by_broadcast,
)
from skyrl_fast.rollout.engine.weights.transports.file import (
    check_file_call,
    receive_by_file,
    send_by_file,
)
from skyrl_fast.rollout.engine.weights.transports.ipc import (
    finish_ipc,
    receive_by_ipc,
    send_by_ipc,
)
from skyrl_fast.rollout.engine.weights.transports.memory import SharedMemory, receive_from_memory
from skyrl_fast.rollout.engine.weights.transports.rank_ipc import (
    check_rank_ipc_call,
    receive_by_rank_ipc,
    send_by_rank_ipc,
)


@dataclass(frozen=True, slots=True)
class WeightTransport:
    """One way of new weights.

    Args:
        send: returns the trainer's side, given the folder of files and whether one may be unnamed.
        receive: yields the tensors, given the worker and the arguments of the trainer's call.
        check: returns the arguments as a server may take them from the network, given them, its
            folders and its trainer's address; None: it refuses them.
        finish: called with the worker when all tensors are loaded.
        shares_memory: whether all workers read the same memory of one GPU; they divide its digests.
        reads_gpu: whether workers open the trainer's GPU memory, as only those of a server do that
            the run has started on the ranks' GPUs.
    """

    send: Callable[[str | None, bool], Transport]
    receive: Callable[..., Iterator[tuple[str, torch.Tensor]]]
    check: Callable[[list[Any], Sequence[Path], str | None], list[Any] | None] = (
        lambda arguments, folders, trainer: None
    )
    finish: Callable[[Any], None] = lambda worker: None
    shares_memory: bool = False
    reads_gpu: bool = False


TRANSPORTS = {
    "file": WeightTransport(
        lambda folder, unnamed: partial(send_by_file, folder=folder, unnamed=unnamed),
        lambda worker, path: receive_by_file(path),
        check=check_file_call,
    ),
    # The next two name memory of the trainer's process, so that no server takes them.
    "memory": WeightTransport(
        lambda folder, unnamed: SharedMemory(),
        lambda worker, path, parts: receive_from_memory(path, parts),
    ),
    "ipc": WeightTransport(
        lambda folder, unnamed: send_by_ipc,
        lambda worker, handles: receive_by_ipc(handles, worker.cuda_ipc),
        finish=lambda worker: finish_ipc(worker.cuda_ipc),
        shares_memory=True,
    ),
    "broadcast": WeightTransport(
        lambda folder, unnamed: send_by_broadcast,
        lambda worker: receive_by_broadcast(worker.weights_group),
        check=check_broadcast_call,
    ),
    "rank_ipc": WeightTransport(
        lambda folder, unnamed: send_by_rank_ipc,
        lambda worker, handles: receive_by_rank_ipc(handles, worker.weights_group, worker.cuda_ipc),
        check=check_rank_ipc_call,
        finish=lambda worker: finish_ipc(worker.cuda_ipc),
        reads_gpu=True,
    ),
}
