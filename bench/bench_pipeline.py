"""Generator output (lists) -> checks -> padded, dp-padded batch -> advantages -> reward metrics.

Contenders: SkyRL's own trainer methods where `skyrl` can be imported, the same steps restated with
NumPy padding, both also with warm pages and the garbage collector off, and ours with 1 and 2
threads. Tokens per second in
extra_info count prompt and response tokens of all rows.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch

from bench import _data
from bench.baselines.pipeline import Restated, load_skyrl, warm_pages
from skyrl_fast.batch import StepBatch
from skyrl_fast.train.algorithm.advantages import compute_advantages
from skyrl_fast.train.metrics.rewards import reward_metrics

DP_SIZE = 8
SIZES = ("medium", "large")
CONTENDERS = (
    "skyrl",
    "skyrl_warm",
    "skyrl_numpy",
    "skyrl_numpy_warm",
    "skyrl_fast",
    "skyrl_fast_1_thread",
)
ROUNDS = {"medium": 15, "large": 5}
SLOW_ROUNDS = {"medium": 5, "large": 2}  # of SkyRL's own: half a minute each at large


class Ours:
    """The same pipeline by this package."""

    def __init__(self, samples_per_prompt: int) -> None:
        self.samples_per_prompt = samples_per_prompt

    def prepare(self, output: dict[str, Any]) -> dict[str, Any]:
        """Return the output without what SkyRL passes next to it; not timed."""
        return {key: value for key, value in output.items() if key != "uids"}

    def run(self, output: dict[str, Any], uids: list[str]) -> dict[str, Any]:
        """Return the tensors that training reads, and the mean reward; timed."""
        batch = StepBatch.from_generator_output(output, step_wise=True)
        pad_size = -batch.num_rows % DP_SIZE
        padded = batch.padded(_data.PAD_TOKEN_ID, pad_size=pad_size)
        metrics = reward_metrics(batch, samples_per_prompt=self.samples_per_prompt)
        return {
            "sequences": padded.sequences,
            "loss_mask": padded.loss_mask,
            "advantages": compute_advantages(batch).advantages,
            "reward": metrics["reward/avg_raw_reward"],
        }


@functools.lru_cache(maxsize=1)
def _expected(size: str) -> dict[str, Any]:
    output = _data.generator_output(size)
    peer = Restated(_data.SHAPES[size].samples_per_prompt, _data.PAD_TOKEN_ID, DP_SIZE)
    return peer.run(peer.prepare(output), output["uids"])


def _check(got: dict[str, Any], size: str) -> None:
    want = _expected(size)
    assert torch.equal(got["sequences"], want["sequences"])
    assert torch.equal(got["loss_mask"], want["loss_mask"])
    assert abs(got["reward"] - want["reward"]) < 1e-9
    flat = want["advantages"]
    if got["advantages"].dim() == 1:  # ours stay ragged: one per response token
        lengths = torch.tensor([len(r) for r in _data.generator_output(size)["response_ids"]])
        cells = torch.arange(flat.shape[1]) >= flat.shape[1] - lengths[:, None]
        flat = flat[: len(lengths)][cells]
    # 1e-5: the peer computes deviations in float32.
    torch.testing.assert_close(got["advantages"], flat, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("contender", CONTENDERS)
def test_pipeline(benchmark: Any, contender: str, size: str) -> None:
    samples = _data.SHAPES[size].samples_per_prompt
    threads = 2 if contender == "skyrl_fast" else 1
    peer: Any = Ours(samples)
    if contender.startswith("skyrl_numpy"):
        peer = Restated(samples, _data.PAD_TOKEN_ID, DP_SIZE)
    elif not contender.startswith("skyrl_fast"):
        peer = load_skyrl(samples, _data.PAD_TOKEN_ID, DP_SIZE)
        if peer is None:
            pytest.skip("skyrl cannot be imported here")
    output, uids = peer.prepare(_data.generator_output(size)), _data.generator_output(size)["uids"]
    _check(peer.run(output, uids), size)
    benchmark.group = f"pipeline {size} 2T"
    benchmark.extra_info["tokens"] = _data.describe(size)["tokens"]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with warm_pages() if contender.endswith("warm") else contextlib.nullcontext():
            slow = contender in ("skyrl", "skyrl_warm")  # the check above was the warm-up
            rounds = SLOW_ROUNDS[size] if slow else ROUNDS[size]
            benchmark.pedantic(peer.run, (output, uids), rounds=rounds, warmup_rounds=2 - 2 * slow)
    finally:
        torch.set_num_threads(before)
