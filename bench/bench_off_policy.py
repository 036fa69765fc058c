"""off_policy_correction compared with SkyRL's: (N, R) mask in, weights (and mask) out.

"token_tis": weights by token, nothing masked. "full": outliers, TIS by sequence and the geometric
mask, with all metrics; "full_trajectory" is the same over full trajectories, which SkyRL lacks,
compared with SkyRL's by row. Floor in bytes per padded float32 cell, a share c of them trained:
mask in (4), two logprobs of trained cells (8 c), weights out (4), and where something masks the
mask out (4). Both return their metrics as Python floats.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from bench import _data
from bench.baselines import policy_loss as skyrl
from skyrl_fast.ops.policy_loss.off_policy import off_policy_correction

SIZES = ["medium", "large"]
ROUNDS = {"medium": 30, "large": 9}
CAP, SEQUENCE_CAP, OUTLIER_HIGH, GEOMETRIC = 2.0, 5.0, 1.4, (0.99, 1.01)
NOISE = 0.1  # of the log-probabilities: about one row in two keeps its geometric mean


@functools.lru_cache(maxsize=1)
def batch(size: str) -> dict[str, torch.Tensor]:
    """Padded response-side tensors, right-aligned as in SkyRL."""
    arrays = _data.rollout_arrays(size)
    lengths = torch.from_numpy(arrays.response_lengths)
    width = int(lengths.max())
    cells = torch.arange(width)[None] >= width - lengths[:, None]
    g = torch.Generator().manual_seed(0)

    def padded(flat: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(arrays.num_rows, width)
        out[cells] = flat.float()
        return out

    logprobs = torch.from_numpy(arrays.logprobs)
    return {
        "old": padded(logprobs),
        "rollout": padded(logprobs + NOISE * torch.randn(logprobs.shape, generator=g)),
        "mask": padded(torch.from_numpy(arrays.loss_masks)),
        "trajectory_ids": torch.from_numpy(arrays.trajectory_ids),
    }


def run_skyrl(case: str, d: dict[str, torch.Tensor]) -> tuple[Any, Any, dict[str, float]]:
    if case == "token_tis":
        weights, metrics = skyrl.token_tis(d["old"], d["rollout"], d["mask"], CAP)
        return weights, d["mask"], metrics
    return skyrl.full_correction(
        d["old"], d["rollout"], d["mask"], SEQUENCE_CAP, OUTLIER_HIGH, GEOMETRIC
    )


def run_ours(case: str, d: dict[str, torch.Tensor]) -> tuple[Any, Any, dict[str, float]]:
    rules: dict[str, Any] = {"tis_ratio_type": "token", "tis_cap": CAP}
    if case != "token_tis":
        rules = {
            "tis_ratio_type": "sequence",
            "sequence_mask": "geometric",
            "outlier_high": OUTLIER_HIGH,
        }
    if case == "full_trajectory":
        rules["trajectory_ids"] = d["trajectory_ids"]
    weights, mask, metrics = off_policy_correction(d["old"], d["rollout"], d["mask"], **rules)
    return weights, mask, {name: float(value) for name, value in metrics.items()}


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("contender", ["skyrl", "skyrl_fast"])
@pytest.mark.parametrize("case", ["token_tis", "full", "full_trajectory"])
@pytest.mark.parametrize("size", SIZES)
def test_correction(benchmark: Any, size: str, case: str, contender: str, threads: int) -> None:
    d = batch(size)
    if case != "full_trajectory":
        want, got = run_skyrl(case, d), run_ours(case, d)
        assert torch.equal(got[1], want[1])
        kept = want[1]
        torch.testing.assert_close(got[0] * kept, want[0] * kept, rtol=1e-4, atol=1e-5)
        assert 0.01 < float(kept.mean()) < 0.99
    function = run_skyrl if contender == "skyrl" else run_ours
    benchmark.group = f"off-policy {case} {size} {threads}T"
    benchmark.extra_info["cells"] = d["mask"].numel()
    benchmark.pedantic(function, (case, d), rounds=ROUNDS[size], warmup_rounds=2)
