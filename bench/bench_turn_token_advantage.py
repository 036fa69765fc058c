"""gae, reinforce_plus_plus and gigpo_advantage compared with SkyRL's and verl-agent's, on (N, R).

Floor in bytes per padded cell: gae reads reward, value and mask (4 + 4 + 8, SkyRL's int64) and
writes advantage and return (4 + 4); normalising reads and writes the advantages once more (8).
reinforce_plus_plus has no value and no return: 4 + 8 + 4, and 8 again. gigpo reads reward and mask
and writes the advantage: 4 + 8 + 4. "copy_floor" moves gae's bytes by two torch calls.

The contenders treat every row as a separate sequence, so ours does too where answers are compared;
"skyrl_fast_linked" is the same op on the linked steps of the trajectories.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from bench._data import rollout_arrays
from bench.baselines import turn_token_advantage as others
from skyrl_fast import gae, gigpo_advantage, reinforce_plus_plus

GAMMA, LAMBDA = 0.999, 0.95
WEIGHT = 1.0
STATES = 12  # per group: with 8 trajectories most states occur more than once
BYTES = {"gae": 32, "reinforce_plus_plus": 24, "gigpo": 16}
CLOSE = {"atol": 2e-3, "rtol": 1e-3}  # their sums run in float32


@functools.lru_cache(maxsize=1)
def batch(size: str) -> dict[str, Any]:
    arrays = rollout_arrays(size)
    lengths = torch.from_numpy(arrays.response_lengths)
    width = int(lengths.max())
    mask = torch.arange(width) >= width - lengths[:, None]
    rewards, values = torch.zeros(2, *mask.shape)
    generator = torch.Generator().manual_seed(0)
    rewards[mask] = torch.from_numpy(arrays.rewards)
    rewards[:, -1] += 0.1 * torch.randn(len(lengths), generator=generator)  # rewards of each step
    values[mask] = torch.randn(int(mask.sum()), generator=generator)
    rng = np.random.default_rng(0)
    return {
        "rewards": rewards,
        "values": values,
        "mask": mask.long(),
        "last": arrays.is_last_step.tolist(),
        "uids": [f"prompt-{g}" for g in arrays.group_ids],
        "trajectories": [f"trajectory-{j}" for j in arrays.trajectory_ids],
        "anchors": [f"state-{s}" for s in rng.integers(0, STATES, arrays.num_rows)],
        "out": torch.zeros(2, *mask.shape),
    }


def copy_floor(b: dict[str, Any]) -> None:
    torch.add(b["rewards"], b["values"], out=b["out"][0])
    b["out"][1].copy_(b["mask"])


def our_gae(b: dict[str, Any], last: list[bool] | None = None) -> Any:
    return gae(
        b["rewards"],
        b["values"],
        is_last_step=last,
        loss_mask=b["mask"],
        gamma=GAMMA,
        lambd=LAMBDA,
        normalize=True,
    )


def our_reinforce(b: dict[str, Any], last: list[bool] | None = None) -> Any:
    return reinforce_plus_plus(b["rewards"], is_last_step=last, loss_mask=b["mask"], gamma=GAMMA)


def our_gigpo(b: dict[str, Any], last: list[bool] | None = None) -> Any:
    return gigpo_advantage(
        b["rewards"],
        b["uids"],
        b["anchors"],
        is_last_step=b["last"],
        response_mask=b["mask"],
        gamma=GAMMA,
        step_advantage_w=WEIGHT,
    )


def baseline_gigpo(b: dict[str, Any]) -> Any:
    return others.verl_agent_gigpo(
        b["rewards"].sum(1).numpy(),
        b["mask"],
        np.array(b["anchors"], dtype=object),
        np.array(b["uids"], dtype=object),
        np.array(b["trajectories"], dtype=object),
        GAMMA,
        WEIGHT,
    )


OURS = {"gae": our_gae, "reinforce_plus_plus": our_reinforce, "gigpo": our_gigpo}
BASELINES = {
    "gae": lambda b: others.skyrl_gae(b["rewards"], b["values"], b["mask"], GAMMA, LAMBDA),
    "reinforce_plus_plus": lambda b: others.skyrl_reinforce_plus_plus(
        b["rewards"], b["mask"], GAMMA
    ),
    "gigpo": baseline_gigpo,
}
CASES = [
    *(
        ("gae", size, contender)
        for size in ("medium", "large")
        for contender in ("skyrl_fast", "skyrl_fast_linked", "skyrl", "copy_floor")
    ),
    *(
        ("reinforce_plus_plus", size, contender)
        for size in ("medium", "large")
        for contender in ("skyrl_fast", "skyrl_fast_linked", "skyrl")
    ),
    ("gigpo", "medium", "skyrl_fast"),
    ("gigpo", "medium", "verl_agent"),
    ("gigpo", "large", "skyrl_fast"),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("op", "size", "contender"), CASES)
def test_turn_token_advantage(
    benchmark: Any, op: str, size: str, contender: str, threads: int
) -> None:
    benchmark.group = f"{op} {size} {threads}T"
    b = batch(size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if contender == "skyrl_fast" and (op, size) != ("gigpo", "large"):
            check(op, b)
        function = {
            "skyrl_fast": OURS[op],
            "skyrl_fast_linked": lambda b: OURS[op](b, b["last"]),
            "copy_floor": copy_floor,
        }.get(contender, BASELINES[op])
        slow = contender in ("skyrl", "verl_agent")
        benchmark.pedantic(function, args=(b,), rounds=3 if slow else 25, warmup_rounds=1)
    finally:
        torch.set_num_threads(before)
    num_bytes = b["mask"].numel() * BYTES[op]
    benchmark.extra_info["bytes"] = num_bytes
    benchmark.extra_info["gb_per_s"] = num_bytes / benchmark.stats.stats.median / 1e9


def check(op: str, b: dict[str, Any]) -> None:
    """Compare the advantages on real tokens, and the returns of gae."""
    ours, expected = OURS[op](b), BASELINES[op](b)
    if op != "gae":
        ours, expected = (ours,), (expected,)
    for one, two in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, two * b["mask"], **CLOSE)
