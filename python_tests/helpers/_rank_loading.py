"""Models that ranks load, each rank with the bytes that it has allocated meanwhile."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _memory import LiveBytes, allocated_peak

from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.train.model.critic import load_value_model
from skyrl_fast.train.model.loading import load_model
from skyrl_fast.train.model.lora import add_adapter
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel import export
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import full_tensors, local_tensor, shard, weights_of
from skyrl_fast.train.parallel.stored_weights import read_shards

CPU = torch.device("cpu")


@dataclass(slots=True)
class Loaded:
    """Sharded models of a rank by name, and what its process allocated while it loaded each.

    Args:
        draws: a random number after each.
    """

    ranks: Ranks
    models: dict[str, Any] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    draws: dict[str, float] = field(default_factory=dict)
    policy: Policy | None = None

    def __post_init__(self) -> None:
        self.ranks.register(self)

    def load(self, name: str, folder: Path, make: Callable[[], Any]) -> None:
        """Make a model of a folder, and shard it."""
        torch.manual_seed(0)
        made: list[Any] = []

        def run() -> None:
            model = make()
            shard(model, self.ranks)
            read_shards(model)
            made.append(model)

        self.peaks[name] = allocated_peak(run, file_sizes(folder))
        self.models[name] = made[0]
        self.draws[name] = torch.rand(()).item()

    def load_policy(self, folder: Path) -> None:
        """Load a policy, whose checks compute passes of the sharded model."""

        def run() -> None:
            model = load_model(str(folder), device=CPU, ranks=self.ranks)
            self.policy = Policy(model, ranks=self.ranks)
            self.models["policy"] = model

        torch.manual_seed(0)
        self.peaks["policy"] = allocated_peak(run, file_sizes(folder))
        self.draws["policy"] = torch.rand(()).item()

    @run_on_all_ranks
    def measurements(self, name: str) -> list[tuple[int, int]]:
        """Return the peak of each rank, and the bytes of its shards."""
        shards = sum(local_tensor(value).nbytes for value in self.models[name].parameters())
        return self.ranks.gather([(self.peaks[name], shards)])

    @run_on_all_ranks
    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Return the full weights on rank 0."""
        return full_tensors(weights_of(self.models[name]), self.ranks)

    @run_on_all_ranks
    def queue_weights(self, folder: Path) -> list[int]:
        """Return what each rank allocates when a checkpoint of the policy begins."""
        queue: Any = export._queue_weights
        with LiveBytes() as live:
            queue.__wrapped__(self.policy, folder)
        self.ranks.files._queue.clear()
        return self.ranks.gather([live.peak])


def file_sizes(folder: Path) -> set[int]:
    return {file.stat().st_size for file in folder.iterdir()}


def with_adapter(path: Path, ranks: Ranks) -> Any:
    """Return a model in bfloat16 with a new adapter."""
    model = load_model(str(path), device=CPU, dtype=torch.bfloat16, ranks=ranks)
    lora = LoraConfig(rank=4, alpha=8, init_method="gaussian")
    add_adapter(model, lora, base=str(path))
    return model


def load_all(ranks: Ranks, *, folders: dict[str, Path]) -> Loaded:
    """Load the models of these folders, and with an adapter and as a critic the one named dense."""
    torch.set_num_threads(1)
    # transformers reads in threads otherwise, whose memory the profiler does not see.
    with patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"):
        return _load_all(ranks, folders)


def _load_all(ranks: Ranks, folders: dict[str, Path]) -> Loaded:
    loaded = Loaded(ranks)
    dense = folders["dense"]
    for name, folder in folders.items():
        loaded.load(name, folder, partial(load_model, str(folder), device=CPU, ranks=ranks))
    loaded.load("adapter", dense, partial(with_adapter, dense, ranks))
    loaded.load("critic", dense, partial(load_value_model, str(dense), device=CPU, ranks=ranks))
    loaded.load_policy(folders["deep"])
    return loaded
