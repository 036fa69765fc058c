"""group_advantage compared with SkyRL's step-wise block, on padded (N, R) tensors.

Floor: write the result (4 bytes per cell), read the mask (8 bytes per cell, SkyRL's int64) and the
rewards of last rows (4 bytes per cell of J of the N rows).
"""

from __future__ import annotations

import functools
import gc

import pytest
import torch

from bench._data import rollout_arrays
from bench.baselines.advantage import skyrl_stepwise_grpo
from skyrl_fast import group_advantage

ARGS = tuple[torch.Tensor, torch.Tensor, list[str], list[bool]]


@functools.lru_cache(maxsize=1)
def padded(size: str) -> ARGS:
    arrays = rollout_arrays(size)
    lengths = torch.from_numpy(arrays.response_lengths)
    width = int(lengths.max())
    mask = torch.arange(width) >= width - lengths[:, None]
    rewards = torch.zeros(mask.shape)
    rewards[mask] = torch.from_numpy(arrays.rewards)
    uids = [f"prompt-{g}" for g in arrays.group_ids]
    return rewards, mask.long(), uids, arrays.is_last_step.tolist()


def ours(rewards: torch.Tensor, mask: torch.Tensor, uids: list[str], last: list[bool]):
    return group_advantage(rewards, uids, is_last_step=last, response_mask=mask)


def copy_floor(rewards: torch.Tensor, mask: torch.Tensor, uids: list[str], last: list[bool]):
    """Move the same bytes by torch: read an int64 mask, write a float32 result."""
    return OUT.copy_(mask)


OUT = torch.empty(0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", ["medium", "large"])
@pytest.mark.parametrize("contender", ["skyrl_fast", "skyrl", "skyrl_warm_no_gc", "copy_floor"])
def test_advantage(benchmark, contender: str, size: str, threads: int) -> None:
    global OUT
    benchmark.group = f"advantage grpo {size} {threads}T"
    args = padded(size)
    num_rows, width = args[0].shape
    num_trajectories = sum(args[3])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected, _ = skyrl_stepwise_grpo(*args)
        # SkyRL computes group statistics in float32
        torch.testing.assert_close(ours(*args), expected, atol=1e-4, rtol=1e-4)
        OUT = torch.zeros(num_rows, width)
        function = {"skyrl_fast": ours, "copy_floor": copy_floor}.get(
            contender, skyrl_stepwise_grpo
        )
        if contender == "skyrl_warm_no_gc":
            gc.collect()
            gc.disable()
        rounds = {"medium": 200, "large": 25}[size]
        if contender.startswith("skyrl") and contender != "skyrl_fast":
            rounds //= 5
        benchmark.pedantic(function, args=args, rounds=rounds, warmup_rounds=3)
    finally:
        gc.enable()
        torch.set_num_threads(before)
    num_bytes = num_rows * width * (4 + 8) + num_trajectories * width * 4
    benchmark.extra_info["bytes"] = num_bytes
    benchmark.extra_info["gb_per_s"] = num_bytes / benchmark.stats.stats.median / 1e9
