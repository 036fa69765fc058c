"""A policy and its optimizer on several ranks, which count what each rank allocates in a phase."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _memory import LiveBytes
from _shared_gpus import SharedGpu

from skyrl_fast.config import OptimizerConfig
from skyrl_fast.rollout.engine.weights.receipt import tensor_digest
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import like_shard, local_tensor, shard, shard_rows
from skyrl_fast.train.parallel.stored_weights import read_shards

CPU = torch.device("cpu")


@dataclass(slots=True)
class Counted:
    """What a rank trains, and what it has allocated meanwhile."""

    ranks: Ranks
    policy: Policy
    optimizer: Optimizer
    loading: int
    live: LiveBytes | None = None

    def __post_init__(self) -> None:
        self.ranks.register(self)

    @run_on_all_ranks
    def shards(self) -> list[int]:
        """Return the bytes of each rank's shards of the weights."""
        parameters = self.policy.model.parameters()
        return self.ranks.gather([sum(local_tensor(value).nbytes for value in parameters)])

    @run_on_all_ranks
    def peaks_of_loading(self) -> list[int]:
        return self.ranks.gather([self.loading])

    @run_on_all_ranks
    def step(self) -> None:
        """Take an optimizer step, after which there are moments."""
        for value in self.policy.model.parameters():
            full = torch.ones(value.shape)
            rows = shard_rows(value)
            value.grad = like_shard(full if rows is None else full[rows], value)
        step: Any = type(self.optimizer).step
        step.__wrapped__(self.optimizer)

    @run_on_all_ranks
    def forget(self) -> None:
        """Drop the moments, as a process that resumes has none."""
        self.optimizer.adamw.state.clear()

    @run_on_all_ranks
    def begin(self) -> None:
        """Begin to count."""
        self.live = LiveBytes()
        self.live.__enter__()

    @run_on_all_ranks
    def peaks(self) -> list[int]:
        """Return the peak of each rank since `begin`."""
        assert self.live is not None
        self.live.__exit__(None, None, None)
        return self.ranks.gather([self.live.peak])


def counted(ranks: Ranks, *, folder: Path) -> Counted:
    """Load the model of a folder on a rank, first without a policy's checks to count that."""
    torch.set_num_threads(1)
    # transformers reads in threads otherwise, which are not counted.
    with patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"):
        with LiveBytes() as live:
            model = load_model(str(folder), device=CPU, ranks=ranks)
            shard(model, ranks)
            read_shards(model)
        policy = Policy(load_model(str(folder), device=CPU, ranks=ranks), ranks=ranks)
    policy.cuda_ipc = SharedGpu(f"GPU-{ranks.rank}")
    tensor_digest(torch.zeros(1))  # keeps a table of its own
    optimizer = Optimizer(policy, OptimizerConfig(lr=1e-2), total_steps=9)
    return Counted(ranks, policy, optimizer, live.peak)
